"""What of parameters makes them hard to put in another's place: attributes, hooks, strides, and who writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from prepkit.facts.model import ParamHook
from prepkit.live.model.names import Site
from prepkit.live.model.param_extras import attributes, hooks

_Named = Sequence[tuple[str, nn.Parameter]]


def extras(places: Sequence[Site], named: _Named, first: Mapping[int, str]) -> dict[str, Any]:
    """Fields of ``ModelFacts``; each parameter under its first name."""
    once = [(name, param) for name, param in named if first[id(param)] == name]
    return {
        "param_attributes": tuple((name, key) for name, param in once for key in sorted(attributes(param))),
        "param_hooks": tuple(_hooks(once)),
        "strided": tuple(name for name, param in once if _is_strided(param)),
        "self_written": tuple(_self_written(places, first)),
    }


def _hooks(once: _Named) -> Iterator[tuple[str, ParamHook]]:
    for name, param in once:
        for kind in hooks(param):
            yield name, kind


def _is_strided(param: nn.Parameter) -> bool:
    """Of a sharded parameter not asked: torch has put it into order."""
    return type(param) is nn.Parameter and not is_lazy(param) and not param.is_contiguous()


def _self_written(places: Sequence[Site], first: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Embeddings with ``max_norm`` shorten the rows that they look up, in place (torch ``F.embedding``)."""
    for site in places:
        module = site.module
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and site.first and module.max_norm is not None:
            yield first[id(module.weight)], f"max_norm={float(module.max_norm):g}"
