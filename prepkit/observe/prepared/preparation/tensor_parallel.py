"""How layers are cut over ranks: told by the hooks that torch's parallel styles leave, and by their names."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from prepkit.facts.preparation import TensorParallelModule
from prepkit.objects.activation_placements import PLACEMENTS
from prepkit.objects.names import Site
from prepkit.observe.prepared.preparation.blocks import inside

STYLES = {
    "ColwiseParallel._prepare_input_fn": "colwise",
    "RowwiseParallel._prepare_input_fn": "rowwise",
    "SequenceParallel._prepare_input_fn": "sequence",
    "_distribute_input": "",  # prepkit's own: sequence or replicate, as the layout inside says
}
"""Function that lays out the input to the style that it belongs to (torch ``tensor.parallel.style``)."""
OUTPUTS = (
    *("ColwiseParallel._prepare_output_fn", "RowwiseParallel._prepare_output_fn"),
    *("SequenceParallel._prepare_output_fn", "_collect_output"),
)
WORDS = {str(placement): word for word, placement in reversed(PLACEMENTS.items())}


def tensor_parallel(places: list[Site]) -> tuple[TensorParallelModule, ...]:
    """Every module with the hooks of a parallel style, in module order."""
    return tuple(
        _module(site, before, _found(site.module._forward_hooks.values(), OUTPUTS))
        for site in places
        if site.first and (before := _found(site.module._forward_pre_hooks.values(), tuple(STYLES))) is not None
    )


def tensor_ranks(places: list[Site], cut: tuple[TensorParallelModule, ...]) -> int:
    """Over how many ranks these modules are cut: the last axis of the mesh that their weights lie on."""
    paths = {one.path for one in cut}
    weights: list[Any] = [p for site in places if site.path in paths for p in site.module._parameters.values()]
    return max((int(p.device_mesh.size(-1)) for p in weights if isinstance(p, DTensor)), default=1)


def _found(hooks: Iterable[Any], names: tuple[str, ...]) -> Any:
    """The partial function of one of these names, in the closure that ``distribute_module`` makes of it."""
    for hook in hooks:
        for part in inside(hook, 4):
            if isinstance(part, partial) and getattr(part.func, "__qualname__", "") in names:
                return part
    return None


def _module(site: Site, before: Any, after: Any) -> TensorParallelModule:
    style, layouts = STYLES[before.func.__qualname__], [_word(value) for value in before.args]
    arriving, leaving = layouts[0], _word(after.args[0]) if after is not None else ""
    if not style:
        style = "sequence" if layouts[-1] == "sequence" else "replicate"
    elif after is None or after.args[-1] is not True:  # what leaves as a DTensor is no layout of prepkit's
        style = ""
    elif style == "sequence":
        leaving = "sequence"
    return TensorParallelModule(
        path=site.path, style=style if arriving and leaving else "", input_layout=arriving, output_layout=leaving
    )


def _word(layout: Any) -> str:
    one = layout[0] if isinstance(layout, tuple) and len(layout) == 1 else layout
    return WORDS.get(str(one), "") if isinstance(one, Placement) else ""
