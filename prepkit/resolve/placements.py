"""The layout of every parameter once prepared: its dtype, its class, and which part of it a rank holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import get_args

from prepkit.config import FP8, MSAMP, Config
from prepkit.facts import ModelFacts, ParamFact
from prepkit.plan.layout import FlatPart, ParamLayout, Placement
from prepkit.resolve.engines import traits
from prepkit.resolve.modules import PACKED
from prepkit.resolve.tensor_parallel import TPPlacement
from prepkit.steps import Axis

CAST = ("float64", "float32", "bfloat16", "float16")
"""What ``Module.bfloat16()`` and ``Module.half()`` cast."""
_ZERO: dict[str, Placement] = {"shard": "partition", "replicate": "replicate", "tensor": "split"}
"""Axis of a DeepSpeed mesh to what it does to every parameter."""


def placements(
    cfg: Config,
    model: ModelFacts,
    mesh: tuple[Axis, ...],
    tensor: Mapping[str, TPPlacement],
    unsharded: tuple[str, ...],
) -> dict[str, tuple[Placement, ...]]:
    """Parameter name to one word per axis of the mesh; none for a plain parameter, which every rank holds whole.

    ``tensor``: how parameters lie on the tensor axis. ``unsharded``: names of those that FSDP2 leaves as they are.
    torch ``_fsdp_param.py`` shards dim 0 over the shard axis. ZeRO-3 gives every rank an equal padded part of each.
    """
    if traits(cfg).own_layout:
        words = tuple(_ZERO[axis.name] for axis in mesh)
        return dict.fromkeys((param.name for param in model.params), words if {"partition", "split"} & {*words} else ())
    if traits(cfg).cuts_all_ranks:
        return {param.name: _alone(param, tensor.get(param.name)) for param in model.params}
    if not traits(cfg).makes_dtensors:
        return dict.fromkeys((param.name for param in model.params), ())
    sharded: dict[TPPlacement | None, tuple[Placement, ...]] = {  # one value for all that lie alike
        word: _with_shards(mesh, word) for word in (None, *get_args(TPPlacement))
    }
    whole = {name: _whole(mesh, tensor.get(name)) for name in unsharded}
    return {param.name: sharded[tensor.get(param.name)] for param in model.params} | whole


def _whole(mesh: tuple[Axis, ...], tensor: TPPlacement | None) -> tuple[Placement, ...]:
    """Of what FSDP2 leaves alone: nothing, or the part that the tensor axis has cut."""
    return () if tensor is None else tuple(tensor if axis.name == "tensor" else "off-mesh" for axis in mesh)


def _alone(param: ParamFact, tensor: TPPlacement | None) -> tuple[Placement, ...]:
    if tensor is not None:
        return (tensor,)
    return tuple(word for word in get_args(Placement) if (word,) == param.placements)  # of one that arrived parallel


def _with_shards(mesh: tuple[Axis, ...], tensor: TPPlacement | None) -> tuple[Placement, ...]:
    words: dict[str, Placement] = {
        "replicate": "replicate",
        "shard": "strided(0)" if tensor == "shard(0)" else "shard(0)",  # the tensor axis shards first
        "tensor": tensor or "off-mesh",
    }
    return tuple(words[axis.name] for axis in mesh)


def scaled_weights(cfg: Config, fp8_linears: tuple[str, ...]) -> frozenset[str]:
    """Names of the weights that MS-AMP turns into scaled float16 (msamp ``FP8Linear``)."""
    if not isinstance(cfg.precision, FP8) or not isinstance(cfg.precision.backend, MSAMP):
        return frozenset()
    return frozenset(f"{path}.weight" for path in fp8_linears)


def layout(
    cfg: Config,
    model: ModelFacts,
    *,
    stored: Mapping[str, str],
    low: str | None,
    scaled: Collection[str],
    placed: Mapping[str, tuple[Placement, ...]],
    unit_of: Mapping[str, str],
    flat: Mapping[str, FlatPart],
) -> tuple[ParamLayout, ...]:
    """One layout per parameter, in the order of the facts. Each mapping is from a parameter's name.

    ``stored``: dtype in storage, before DeepSpeed casts to ``low``. ``scaled``: what MS-AMP scales. ``placed``: as
    ``placements`` says. ``unit_of``: the path of its unit; the root where there is none. ``flat``: its place in a flat
    parameter, if it has one.
    """
    dtypes, classes = dict(stored), {p.name: "DTensor" if placed[p.name] else p.cls for p in model.params}
    if traits(cfg).own_layout:
        dtypes = {p.name: low if low and p.dtype in CAST else p.dtype for p in model.params}
        classes = {p.name: p.cls if p.cls in PACKED else "Parameter" for p in model.params}
    dtypes |= dict.fromkeys(scaled, "float16")
    classes |= dict.fromkeys(scaled, "ScalingParameter")
    return tuple(
        ParamLayout(
            name=param.name,
            shape=param.shape,
            dtype=dtypes[param.name],
            cls=classes[param.name],
            placements=placed[param.name],
            unit=unit_of.get(param.name, ""),
            requires_grad=param.requires_grad,
            flat=flat.get(param.name),
        )
        for param in model.params
    )
