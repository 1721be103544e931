"""A plan on one page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from math import prod

from attrs import frozen

from prepkit.codec import plan_digest
from prepkit.findings.text import aligned, collapse, count, in_bytes
from prepkit.plan import Plan
from prepkit.plan.dtypes import itemsize
from prepkit.plan.layout import FlatPart, ParamLayout, local_shape
from prepkit.plan.summary import about, about_lines, finding_lines, origin_lines, step_lines, title
from prepkit.render.memory import memory_lines
from prepkit.render.tree import tree_lines

DIGEST = 12
"""Characters shown of a digest."""


def plan_text(plan: Plan, *, sources: bool = False) -> str:
    """A plan on one page: what it is for, its steps with their reasons, what every rank will hold, and the warnings.

    ``sources`` adds the behaviour rows of each step.
    """
    sections = (
        tuple(_header(plan)),
        tuple(origin_lines(plan.config)),
        tuple(step_lines(plan.steps, sources=sources)),
        tuple(layout_lines(plan)),
        (tables(plan),),
        tuple(finding_lines("warnings", plan.warnings)),
        tuple(finding_lines("overridden (accepted in config.overrides)", plan.overridden)),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def tables(plan: Plan) -> str:
    """Structure, memory and traffic of a plan, and what they mean."""
    return "\n\n".join("\n".join(lines) for lines in (tuple(tree_lines(plan)), tuple(memory_lines(plan))) if lines)


def _header(plan: Plan) -> Iterator[str]:
    provenance = plan.provenance
    sources = f"config {_digest(provenance.config)}, facts {_digest(provenance.facts)}"
    yield title(plan.config, plan.facts)
    yield from about_lines(
        (
            *about(plan.config, plan.facts, plan.mesh, plan.owners, provenance.assumed),
            ("digest", f"{_digest(plan_digest(plan))} ({sources})"),
            ("made by", f"prepkit {provenance.prepkit}"),
        )
    )


def _digest(digest: str) -> str:
    """The first hexadecimal digits, without the name of the algorithm."""
    return digest.rpartition(":")[2][:DIGEST]


# --- layout ----------------------------------------------------------------------------------------------------------


ROWS = 16
"""Rows shown of one unit class; the rest is summed up."""


@frozen(kw_only=True)
class UnitClass:
    """Units that hold the same parameters, by name inside the unit, shape, dtype and placement."""

    cls: str
    """Class of their modules."""
    paths: tuple[str, ...]
    layouts: tuple[ParamLayout, ...]
    """Of the first unit."""


def layout_lines(plan: Plan) -> Iterator[str]:
    """The section ``layout`` of a plan's page."""
    last = plan.world_size - 1
    total = sum(prod(layout.shape) for layout in plan.layout)
    whole = in_bytes(sum(map(_whole, plan.layout)))
    yield f"layout: {count(len(plan.layout), 'parameter')}, {count(total, 'element')}, {whole} in all"
    if any(layout.placements for layout in plan.layout):
        yield f"  each rank holds {_span(plan, plan.layout)} of them; shapes are whole -> rank 0 .. rank {last}"
    elif any(_is_cut(layout) for layout in plan.layout):
        yield f"  each rank holds {_span(plan, plan.layout)} of them with padding; places are in the flat parameter"
    elif last:
        yield "  each rank holds all of them"
    for unit in unit_classes(plan):
        yield from _unit_lines(plan, unit)


def unit_classes(plan: Plan) -> tuple[UnitClass, ...]:
    """The units of the plan, equal ones together, in the order of the parameters."""
    units: dict[str, list[ParamLayout]] = {}
    for layout in plan.layout:
        units.setdefault(layout.unit, []).append(layout)
    model = plan.facts.model
    classes = {module.path: model.classes[module.cls].name for module in model.modules}
    alike: dict[object, list[str]] = {}
    for path, layouts in units.items():
        form = tuple(
            (_inside(layout), layout.shape, layout.dtype, layout.placements, layout.requires_grad) for layout in layouts
        )
        alike.setdefault((classes.get(path, ""), form), []).append(path)
    return tuple(
        UnitClass(cls=classes.get(paths[0], ""), paths=tuple(paths), layouts=tuple(units[paths[0]]))
        for paths in alike.values()
    )


def extremes(plan: Plan, layouts: Iterable[ParamLayout]) -> tuple[int, int]:
    """Bytes of these parameters on the rank that holds fewest and on the one that holds most.

    Chunks never grow from one rank to the next (``torch.chunk``), so these are the last rank and rank 0.
    """
    params = tuple(layouts)
    if any(map(_is_cut, params)):
        whole = sum(_whole(layout) for layout in params if layout.flat is None)
        size = whole + sum(part.shard * itemsize(dtype) for part, dtype in _flat_parameters(params))
        return size, size
    most, least = (sum(_held(plan, layout, rank) for layout in params) for rank in (0, plan.world_size - 1))
    return least, most


def _is_cut(layout: ParamLayout) -> bool:
    return layout.flat is not None and layout.flat.shards > 1


def _flat_parameters(layouts: Iterable[ParamLayout]) -> Iterator[tuple[FlatPart, str]]:
    """One part and the dtype of every flat parameter that these lie in; its shards are equal on all ranks."""
    flat_params = {layout.unit: (layout.flat, layout.dtype) for layout in layouts if layout.flat is not None}
    yield from flat_params.values()


def _held(plan: Plan, layout: ParamLayout, rank: int) -> int:
    return prod(local_shape(layout, plan.mesh, rank)) * itemsize(layout.dtype)


def _whole(layout: ParamLayout) -> int:
    return prod(layout.shape) * itemsize(layout.dtype)


def _inside(layout: ParamLayout) -> str:
    return layout.name.removeprefix(f"{layout.unit}." if layout.unit else "")


def _span(plan: Plan, layouts: Iterable[ParamLayout]) -> str:
    least, most = extremes(plan, layouts)
    return in_bytes(most) if least == most else f"{in_bytes(least)} to {in_bytes(most)}"


def _unit_lines(plan: Plan, unit: UnitClass) -> Iterator[str]:
    where = ", ".join(paths.text or "(root)" for paths in islice(collapse(unit.paths), 4))
    times = f"{len(unit.paths)} x " if len(unit.paths) > 1 else ""
    each = " each" if times else ""
    size = in_bytes(sum(map(_whole, unit.layouts)))
    if any(layout.placements or _is_cut(layout) for layout in unit.layouts):
        size += f" -> {_span(plan, unit.layouts)}"
    yield ""
    yield f"  {times}{unit.cls} {where}: {count(len(unit.layouts), 'parameter')}{each}, {size}{each}"
    rows = tuple(_rows(plan, unit))
    yield from aligned(tuple(text for text, _ in rows[:ROWS]), indent=4)
    if left := tuple(layout for _, members in rows[ROWS:] for layout in members):
        on_a_rank = "" if any(map(_is_cut, left)) else f", {_span(plan, left)} on a rank"
        yield f"    and {len(left):,} more parameters{on_a_rank}"


def _rows(plan: Plan, unit: UnitClass) -> Iterator[tuple[tuple[str, ...], tuple[ParamLayout, ...]]]:
    alike: dict[object, dict[str, ParamLayout]] = {}
    for layout in unit.layouts:
        key = (layout.shape, layout.dtype, layout.placements, layout.requires_grad, layout.flat)
        alike.setdefault(key, {})[_inside(layout)] = layout
    groups = [(collapsed, by_name) for by_name in alike.values() for collapsed in collapse(by_name)]
    order = {_inside(layout): position for position, layout in enumerate(unit.layouts)}
    for collapsed, by_name in sorted(groups, key=lambda pair: order[pair[0].names[0]]):
        members = tuple(by_name[name] for name in collapsed.names)
        yield (collapsed.text, _times(len(members)), *_cells(plan, members[0])), members


def _times(number: int) -> str:
    return f"x {number}" if number > 1 else ""


def _cells(plan: Plan, layout: ParamLayout) -> tuple[str, str, str]:
    frozen_ = "" if layout.requires_grad else "frozen"
    shape = f"{list(layout.shape)}"
    if layout.placements:
        first, last = (list(local_shape(layout, plan.mesh, rank)) for rank in (0, plan.world_size - 1))
        shape += f" -> {first}" if first == last else f" -> {first} .. {last}"
    if layout.flat is not None:
        shape += f" at {layout.flat.start:,} of {layout.flat.size:,}"
    return layout.dtype, shape, frozen_
