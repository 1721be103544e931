"""Many observed models of one class as one tree, whose sizes, counts and conditions are solved for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from attrs import asdict, define, field
from transformers.activations import ACT2FN

from prepkit.facts import ClassFact, ModelFacts
from prepkit.formats.models.expressions import INDICES
from prepkit.observe import observe
from tests.tools.model_tables.fit import Solver, Unsolved, Where

WHOLE = (
    *("declared_blocks", "tied_keys", "has_tie_weights", "input_embedding", "output_embedding", "forward"),
    *("tensor_plan", "methods", "param_attributes", "strided", "self_written"),
)
"""Fields of ``ModelFacts`` that are kept as they are, with a condition where they differ."""

ODD = ("param_hooks", "device_map", "quantised", "grad_inputs", "units", "prepared")
"""Fields that a new model does not fill."""


@define
class Node:
    """One place in the tree of modules, with what was seen there in each probe."""

    classes: dict[Where, ClassFact] = field(factory=dict)
    params: dict[str, dict[Where, Any]] = field(factory=dict)
    buffers: dict[str, dict[Where, Any]] = field(factory=dict)
    children: dict[str, Node] = field(factory=dict)
    repeat: Node | None = None
    counts: dict[Where, int] = field(factory=dict)


@define
class Plain:
    """A module of one model."""

    cls: ClassFact
    params: dict[str, Any] = field(factory=dict)
    buffers: dict[str, Any] = field(factory=dict)
    children: dict[str, Plain] = field(factory=dict)


def model_table(observed: Sequence[tuple[Mapping[str, Any], ModelFacts]], solver: Solver) -> dict[str, Any]:
    """The table of one class of models. Raises ``Unsolved``."""
    CLASSES.clear()
    trees = [_tree(facts) for _, facts in observed]
    if any(
        getattr(facts, name) != getattr(ModelFacts(classes=(), modules=(), params=()), name)
        for name in ODD
        for _, facts in observed
    ):
        raise Unsolved("a new model has what none should have")
    root = Node()
    _merge(root, [((number, ()), tree) for number, tree in enumerate(trees)])
    every = [(number, ()) for number in range(len(observed))]
    whole = {}
    for name in WHOLE:
        seen = {place: json.dumps(getattr(facts, name)) for place, (_, facts) in zip(every, observed, strict=True)}
        whole[name] = _choice(seen, solver)
    groups = dict.fromkeys(group for _, facts in observed for group in facts.ties)
    ties = []
    for group in groups:
        there = {place: group in facts.ties for place, (_, facts) in zip(every, observed, strict=True)}
        ties.append([list(group), solver.solve(there)])
    tree = _solved(root, every, solver)
    return {
        "classes": {name: class_data(one) for name, one in CLASSES.items()},
        "whole": {name: value for name, value in whole.items() if value != _empty(name)},
        "ties": ties,
        "tree": tree,
    }


def _empty(name: str) -> Any:
    return {"forward": "bound", "has_tie_weights": False, "input_embedding": None, "output_embedding": None}.get(
        name, []
    )


def _choice(seen: Mapping[Where, str], solver: Solver) -> Any:
    """The value, or ``{"when": [[condition, value], ..., ["True", value]]}``."""
    kinds = list(dict.fromkeys(seen.values()))
    if len(kinds) == 1:
        return json.loads(kinds[0])
    rows = []
    rest = dict(seen)
    for kind in kinds[:-1]:
        rows.append([solver.solve({place: value == kind for place, value in rest.items()}), json.loads(kind)])
        rest = {place: value for place, value in rest.items() if value != kind}
    return {"when": [*rows, ["True", json.loads(kinds[-1])]]}


def class_data(fact: ClassFact) -> dict[str, Any]:
    """What of the class is not as usual, but for its name."""
    defaults = asdict(ClassFact(name=fact.name, module=""))
    return {name: value for name, value in asdict(fact).items() if value != defaults[name]}


def _tree(facts: ModelFacts) -> Plain:
    found: dict[str, Plain] = {}
    for module in facts.modules:
        node = Plain(cls=facts.classes[module.cls])
        if module.marks:
            raise Unsolved("a new model has marks")
        found[module.path] = node
        if module.path:
            above, _, name = module.path.rpartition(".")
            found[above].children[name] = node
    for param in facts.params:
        above, _, name = param.name.rpartition(".")
        if param.cls != "Parameter" or param.placements:
            raise Unsolved("a parameter is of another class")
        found[above].params[name] = (param.shape, param.dtype, param.requires_grad)
    for buffer in facts.buffers:
        above, _, name = buffer.name.rpartition(".")
        found[above].buffers[name] = (buffer.shape, buffer.dtype, buffer.persistent)
    return found[""]


def _merge(node: Node, seen: list[tuple[Where, Plain]]) -> None:
    node.classes = {where: plain.cls for where, plain in seen}
    for held, kind in ((node.params, "params"), (node.buffers, "buffers")):
        for name in _ordered([list(getattr(plain, kind)) for _, plain in seen]):
            held[name] = {where: getattr(plain, kind)[name] for where, plain in seen if name in getattr(plain, kind)}
    sizes = {where: len(plain.children) for where, plain in seen}
    digits = all(list(plain.children) == [str(i) for i in range(len(plain.children))] for _, plain in seen)
    if digits and len(set(sizes.values())) > 1:
        node.repeat, node.counts = Node(), sizes
        inside = [
            ((number, (*counts, index)), child)
            for (number, counts), plain in seen
            for index, child in enumerate(plain.children.values())
        ]
        _merge(node.repeat, inside)
        return
    for name in _ordered([list(plain.children) for _, plain in seen]):
        child = node.children[name] = Node()
        _merge(child, [(where, plain.children[name]) for where, plain in seen if name in plain.children])


def _ordered(lists: list[list[str]]) -> list[str]:
    """All names, in an order that agrees with each list. Raises ``Unsolved`` where there is none."""
    after: dict[str, set[str]] = {name: set() for names in lists for name in names}
    for names in {tuple(names) for names in lists}:
        for first, second in pairwise(names):
            after[second].add(first)
    found: list[str] = []
    while len(found) < len(after):
        ready = next((name for name in after if name not in found and after[name] <= set(found)), None)
        if ready is None:
            raise Unsolved("children come in several orders")
        found.append(ready)
    return found


def _solved(node: Node, there: list[Where], solver: Solver, name: str = "", depth: int = 0) -> list[str]:
    """The node as lines of a table; it is due at each of the places ``there``."""
    present = list(node.classes)
    count = f"[{solver.solve(node.counts)}]" if node.repeat is not None else ""
    said = f"{name}{count}: " if name else ""
    line = " " * depth + said + _class_of(node.classes, solver)
    lines = [line + _condition({where: where in node.classes for where in there}, solver)]
    for sign, held in (("=", node.params), ("~", node.buffers)):
        lines += [" " * (depth + 1) + _tensor(f"{name} {sign}", seen, present, solver) for name, seen in held.items()]
    if node.repeat is not None:
        lines += _solved(node.repeat, list(node.repeat.classes), solver, INDICES[_loops(present)], depth + 1)
    for name, child in node.children.items():
        lines += _solved(child, present, solver, name, depth + 1)
    return lines


def _loops(places: list[Where]) -> int:
    return len(places[0][1]) if places else 0


def _condition(there: Mapping[Where, bool], solver: Solver) -> str:
    return "" if all(there.values()) else f" ? {solver.solve(there)}"


def _class_of(seen: dict[Where, ClassFact], solver: Solver) -> str:
    """The class, ``act(field)`` of an activation that a field names, or a condition over names of classes."""
    kinds = list(dict.fromkeys(seen.values()))
    if len(kinds) > 1:
        for name in solver.texts():
            if all(activation(solver.flat(where).get(name)) == fact for where, fact in seen.items()):
                return f"act({name})"
    for fact in kinds:
        if CLASSES.setdefault(fact.name, fact) != fact:
            raise Unsolved(f"two classes are called {fact.name}")
    return kinds[0].name if len(kinds) == 1 else solver.solve({where: fact.name for where, fact in seen.items()})


CLASSES: dict[str, ClassFact] = {}
"""Classes of the table that is made."""


@cache
def activation(name: Any) -> ClassFact | None:
    """The class that transformers has for an activation's name."""
    if name not in ACT2FN:
        return None
    facts = observe(ACT2FN[name]).facts.model
    return facts.classes[facts.modules[0].cls] if len(facts.modules) == 1 and not facts.params else None


def _tensor(begun: str, seen: dict[Where, Any], present: list[Where], solver: Solver) -> str:
    """``name = [dims]; dtype; flag ? condition``, without what is as usual."""
    if len({len(shape) for shape, _, _ in seen.values()}) > 1:
        raise Unsolved("a tensor has several numbers of dimensions")
    rank = len(next(iter(seen.values()))[0])
    dims = [solver.solve({where: value[0][dim] for where, value in seen.items()}) for dim in range(rank)]
    dtype = solver.solve({where: value[1] for where, value in seen.items()})
    flag = solver.solve({where: value[2] for where, value in seen.items()})
    rest = "" if (dtype, flag) == ("dtype", "True") else f"; {dtype}" + ("" if flag == "True" else f"; {flag}")
    return f"{begun} [{', '.join(dims)}]{rest}{_condition({where: where in seen for where in present}, solver)}"
