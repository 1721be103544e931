"""Which sizes of a config have to divide which: asked of transformers' models, with one size that does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from attrs import frozen

from tests.tools.model_tables.draws import HEADS, KV, WIDTH, Drawer, Path, Unbuilt

DRAWS, FEWEST = 4, 2
"""Configs that each pair of sizes is tried in, and in how many of them the size that divides has to work."""


@frozen
class Pair:
    """Two fields, and sizes of both: all that differs is whether the one divides the other."""

    whole: Path
    part: Path
    fits: Mapping[Path, int]
    breaks: Mapping[Path, int]
    mends: Mapping[Path, int]
    """As ``breaks``, but for this one size: others are not to blame."""


def needs(config_class: Any, model_class: Any) -> list[str]:
    """Conditions without which the model is not built, or does not run on the meta device."""
    drawer = Drawer(config_class, model_class, seed=3)
    raws = []
    for _ in range(DRAWS):
        try:
            raws.append(drawer.probe().raw)
        except Unbuilt:
            continue
    return [
        f"{'.'.join(pair.whole)} % {'.'.join(pair.part)} == 0"
        for pair in _pairs(tuple(drawer.kinds))
        if _needed(config_class, model_class, raws, pair)
    ]


def _pairs(paths: tuple[Path, ...]) -> Iterator[Pair]:
    """Heads and width, of which heads of one size are left in both; groups of heads and heads."""
    for heads in (one for one in paths if HEADS.search(one[-1]) and not KV.search(one[-1])):
        beside = [one for one in paths if one[:-1] == heads[:-1] and one != heads]
        widths = [one for one in beside if WIDTH.search(one[-1])]
        groups = [one for one in beside if HEADS.search(one[-1]) and KV.search(one[-1])]
        for width in widths:
            rest = {**dict.fromkeys(widths, 240), **dict.fromkeys(groups, 1)}
            yield Pair(width, heads, {**rest, heads: 30}, {**rest, heads: 29}, {**rest, heads: 29, width: 870})
        for group in groups:
            rest = {**dict.fromkeys(widths, 240), heads: 4}
            yield Pair(heads, group, {**rest, group: 2}, {**rest, group: 3}, {**rest, heads: 6, group: 3})


def _needed(config_class: Any, model_class: Any, raws: list[dict[str, Any]], pair: Pair) -> bool:
    """Whether it works wherever the size divides, and nowhere else; one that does not run in either says nothing."""
    told = 0
    for raw in raws:
        built, ran = _works(config_class, model_class, raw, pair.fits)
        broken_built, broken_ran = _works(config_class, model_class, raw, pair.breaks) if built else (True, False)
        if ran and broken_ran:
            return False
        mended_built, mended_ran = _works(config_class, model_class, raw, pair.mends) if built else (False, False)
        told += mended_ran if ran else mended_built and not broken_built
    return told >= FEWEST


def _works(config_class: Any, model_class: Any, raw: dict[str, Any], sizes: Mapping[Path, int]) -> tuple[bool, bool]:
    """Whether the model is built at these sizes, and whether it runs."""
    given = deepcopy(raw)
    for path, size in sizes.items():
        held = given
        for name in path[:-1]:
            held = held.setdefault(name, {})
        held[path[-1]] = size
    built = False
    try:
        with torch.device("meta"):
            model = model_class._from_config(config_class(**given))
            built = True
            model(**_inputs(model))
    except TimeoutError:
        raise
    except Exception:  # any other error is the answer
        return built, False
    return True, True


def _inputs(model: Any) -> dict[str, torch.Tensor]:
    config = model.config
    if model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 224)
        sizes = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.zeros(1, config.num_channels, *sizes, dtype=model.dtype)}
    tokens = torch.zeros(1, 8, dtype=torch.long)
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if config.is_encoder_decoder else {})
