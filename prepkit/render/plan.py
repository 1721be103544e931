"""A plan as text: its reasons, the tree of its units, and the bytes of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from math import prod

from attrs import evolve, frozen

from prepkit.codec import plan_digest
from prepkit.findings.text import aligned, collapse, count, in_bytes
from prepkit.plan import Plan
from prepkit.plan.layout import FlatPart, ParamLayout, frees_after_forward, itemsize, local_shape
from prepkit.plan.summary import about, about_lines, finding_lines, origin_lines, step_lines, title
from prepkit.predict import predict, unit_sizes
from prepkit.predict.inputs import inputs_of
from prepkit.predict.prediction import Category, Label, Place, Prediction, RankClass, Traffic
from prepkit.steps import CheckpointModules, CompileModules, FlatUnit, ShardUnits, WrapFSDP1

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


SHOWN = ShardUnits | WrapFSDP1 | CheckpointModules | CompileModules
"""Steps that give a model structure."""


@frozen(kw_only=True)
class Node:
    """Units that are equal in all that is shown, and the units inside the first of them."""

    paths: tuple[str, ...]
    cls: str
    marks: tuple[str, ...]
    whole: int
    """Bytes of the parameters of one, as stored."""
    kept: int
    """Bytes of one on every rank, padding included."""
    gathered: int
    """Bytes of one while it is gathered; 0 where nothing is."""
    inside: tuple[Node, ...]
    form: int
    """Equal for nodes that are equal in all but their paths."""


def tree_lines(plan: Plan) -> Iterator[str]:
    """The section ``structure`` of a plan's page; nothing for a model that is one plain unit."""
    root = tree(plan)
    if not any(isinstance(planned.step, SHOWN) for planned in plan.steps):
        return
    yield "structure"
    yield from aligned(tuple(_node_rows(root, 0)), indent=2)


def _node_rows(node: Node, depth: int) -> Iterator[tuple[str, ...]]:
    where = ", ".join(paths.text or "(root)" for paths in collapse(node.paths)[:4])
    times = f"{len(node.paths)} x " if len(node.paths) > 1 else ""
    cells = (in_bytes(node.whole), f"-> {in_bytes(node.kept)} a rank" if node.gathered else "")
    gathered = f"{in_bytes(node.gathered)} gathered" if node.gathered else ""
    yield ("  " * depth + f"{times}{node.cls} {where}", *cells, gathered, ", ".join(node.marks))
    for inner in node.inside:
        yield from _node_rows(inner, depth + 1)


def tree(plan: Plan) -> Node:
    """The root with everything that is sharded, checkpointed or compiled by itself inside it."""
    inputs = inputs_of(plan)
    marks = _marks(plan)
    shards = any(isinstance(planned.step, ShardUnits | WrapFSDP1) for planned in plan.steps)
    sizes = unit_sizes(inputs)
    units = {
        unit.path: (content.bytes(), size.kept, size.gathered if shards else 0)
        for unit in inputs.units
        for content, size in ((inputs.contents[unit.content], sizes[unit.content]),)
    }
    classes = {m.path: plan.facts.model.classes[m.cls].name for m in plan.facts.model.modules}
    inside: dict[str, list[str]] = {}
    known = {*marks, *units}
    for path in classes:  # the order of the modules
        if path and path in known:
            inside.setdefault(_holder(path, known), []).append(path)
    return _node("", units, classes, marks, inside, {})


def _holder(path: str, known: set[str]) -> str:
    while path := path.rpartition(".")[0]:
        if path in known:
            return path
    return ""


def _marks(plan: Plan) -> dict[str, tuple[str, ...]]:
    marks: dict[str, tuple[str, ...]] = {}
    for planned in plan.steps:
        match planned.step:
            case ShardUnits(units=units):
                pairs = [(unit.path, _after(unit.reshard_after_forward, unit.path)) for unit in units]
            case WrapFSDP1(units=flat, sharding=sharding):
                pairs = [(unit.path, _flat(sharding, unit)) for unit in flat]
            case CheckpointModules(paths=paths):
                pairs = [(path, "checkpointed") for path in paths]
            case CompileModules(paths=paths):
                pairs = [(path, "compiled") for path in paths]
            case _:
                pairs = []
        for path, mark in pairs:
            marks[path] = (*marks.get(path, ()), mark)
    return marks


def _flat(sharding: str, unit: FlatUnit) -> str:
    frees = frees_after_forward(sharding) and bool(unit.path)
    words = _after(frees, unit.path) if sharding != "NO_SHARD" else "unit, whole on every rank"
    return f"flat {words}{', in float32' if unit.full_precision else ''}"


def _after(reshard: bool | int, path: str) -> str:
    if isinstance(reshard, bool):
        return "unit, freed after forward" if reshard else f"{'root unit' if not path else 'unit'}, kept until backward"
    return f"unit, resharded to {count(reshard, 'rank')} after forward"


def _node(
    path: str,
    sizes: dict[str, tuple[int, int, int]],
    classes: dict[str, str],
    marks: dict[str, tuple[str, ...]],
    inside: dict[str, list[str]],
    forms: dict[object, int],
) -> Node:
    """The module at a path with all that is inside it; ``forms`` numbers what has been met, so that it is told once."""
    whole, kept, gathered = sizes.get(path, (0, 0, 0))
    children = _merged([_node(inner, sizes, classes, marks, inside, forms) for inner in inside.get(path, ())])
    cls, marked = classes.get(path, ""), marks.get(path, ())
    form = (cls, marked, whole, kept, gathered, tuple((len(child.paths), child.form) for child in children))
    return Node(
        paths=(path,),
        cls=cls,
        marks=marked,
        whole=whole,
        kept=kept,
        gathered=gathered,
        inside=children,
        form=forms.setdefault(form, len(forms)),
    )


def _merged(nodes: list[Node]) -> tuple[Node, ...]:
    """Equal ones as one; two are equal when they differ in their paths only."""
    alike: dict[int, list[Node]] = {}
    for node in nodes:
        alike.setdefault(node.form, []).append(node)
    return tuple(
        evolve(nodes[0], paths=tuple(path for node in nodes for path in node.paths)) for nodes in alike.values()
    )


SHOWN_TERMS = 2
"""Terms of one category that are named."""


def memory_lines(plan: Plan) -> Iterator[str]:
    """The sections ``memory`` and ``traffic`` of a plan's page."""
    prediction = predict(plan)
    if not prediction.classes:
        yield f"memory: not predicted ({'; '.join(prediction.not_predicted)})"
        return
    yield f"memory of a rank, {prediction.about}{_budget(plan, prediction)}"
    yield from aligned(tuple(_memory(prediction)), indent=2)
    yield from (f"  not predicted: {entry}" for entry in prediction.not_predicted)
    yield ""
    if prediction.traffic:
        yield f"traffic of a rank per optimizer step: {in_bytes(prediction.sent)} sent{_between(plan, prediction)}"
        yield from aligned(tuple(_traffic(entry) for entry in prediction.traffic), indent=2)
    else:
        yield "traffic: none"
    yield ""
    yield "what it means"
    yield from (f"  {note}" for note in prediction.notes)


def _between(plan: Plan, prediction: Prediction) -> str:
    """Return how much of it goes from node to node; empty where all ranks are on one node, or nodes are not known."""
    per_node = plan.facts.env.per_node
    if per_node is None or plan.world_size <= per_node:
        return ""
    crossing = prediction.crossing(per_node)
    share = "all" if crossing == prediction.sent else in_bytes(crossing) if crossing else "none"
    return f", {share} of it between nodes"


def _budget(plan: Plan, prediction: Prediction) -> str:
    memory = plan.facts.env.memory
    floor, most = max(ranks.floor() for ranks in prediction.classes), prediction.fullest.total()
    needs = f": {in_bytes(floor)} for certain, {in_bytes(most)} at most"
    return needs + (f", of {in_bytes(memory)}" if memory else "")


def columns(prediction: Prediction) -> tuple[tuple[str, RankClass], ...]:
    """The fullest and the emptiest kind of rank with their names; one where all ranks are alike."""
    most, least = prediction.fullest, prediction.emptiest
    if most == least:
        return ((called(prediction, most), most),)
    return ((f"fullest: {called(prediction, most)}", most), (f"emptiest: {called(prediction, least)}", least))


def called(prediction: Prediction, ranks: RankClass) -> str:
    """``every rank``, ``rank 511``, ``rank 3 and 63 like it``."""
    if ranks.ranks == prediction.world_size:
        return "every rank" if ranks.ranks > 1 else "the only rank"
    return f"rank {ranks.first * prediction.tensor}" + (f" and {ranks.ranks - 1:,} like it" if ranks.ranks > 1 else "")


def _memory(prediction: Prediction) -> Iterator[tuple[str, ...]]:
    classes = columns(prediction)
    yield ("", *(name for name, _ in classes), "", "")
    for category, place in prediction.categories():
        cells = tuple(in_bytes(ranks.category(category, place)) for _, ranks in classes)
        yield (
            _name(category, place),
            *cells,
            label(classes[0][1], category, place),
            _whats(classes[0][1], category, place),
        )
    places: tuple[Place, Place] = ("device", "host")
    for place in places:
        if any(ranks.total(place) for _, ranks in classes):
            yield (f"all, {place}", *(in_bytes(ranks.total(place)) for _, ranks in classes), "", "")


def _name(category: Category, place: Place) -> str:
    return category + (" (host)" if place == "host" else "")


def label(ranks: RankClass, category: Category, place: Place) -> str:
    """Return how sure the sum of a category is: the weakest label among its terms."""
    labels = [t.label for t in ranks.terms if t.category == category and t.place == place and t.bytes]
    return max(labels, key=tuple(Label).index).value if labels else ""


def _whats(ranks: RankClass, category: Category, place: Place) -> str:
    """What they are, the largest first; the report names them all."""
    terms = [t for t in ranks.terms if t.category == category and t.place == place and t.bytes]
    terms.sort(key=lambda term: -term.bytes)
    left = f" and {len(terms) - SHOWN_TERMS} more" if len(terms) > SHOWN_TERMS else ""
    return "; ".join(term.what for term in terms[:SHOWN_TERMS]) + left


def _traffic(entry: Traffic) -> tuple[str, ...]:
    over = f"over {count(entry.ranks, 'rank')}" if entry.ranks > 1 else ""
    return (
        entry.collective,
        entry.what,
        count(entry.calls, "call"),
        f"{in_bytes(entry.bytes)} whole",
        f"{in_bytes(entry.sent)} {'copied' if entry.collective == 'host copy' else 'sent'}",
        over,
        entry.label.value,
    )
