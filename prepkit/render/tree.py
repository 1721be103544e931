"""The wrapped structure as a tree: units inside units, equal ones once, with what each costs."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve, frozen

from prepkit.findings.text import aligned, collapse, count, in_bytes
from prepkit.plan import Plan
from prepkit.plan.layout import frees_after_forward
from prepkit.predict import unit_sizes
from prepkit.predict.inputs import inputs_of
from prepkit.steps import CheckpointModules, CompileModules, FlatUnit, ShardUnits, WrapFSDP1

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
    yield from aligned(tuple(_rows(root, 0)), indent=2)


def _rows(node: Node, depth: int) -> Iterator[tuple[str, ...]]:
    where = ", ".join(paths.text or "(root)" for paths in collapse(node.paths)[:4])
    times = f"{len(node.paths)} x " if len(node.paths) > 1 else ""
    cells = (in_bytes(node.whole), f"-> {in_bytes(node.kept)} a rank" if node.gathered else "")
    gathered = f"{in_bytes(node.gathered)} gathered" if node.gathered else ""
    yield ("  " * depth + f"{times}{node.cls} {where}", *cells, gathered, ", ".join(node.marks))
    for inner in node.inside:
        yield from _rows(inner, depth + 1)


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
