"""Which modules a selection means, and which unit owns which parameter.

Sums on config and facts that rules and planner share, so that what is checked is what is planned.
Every function is linear in the number of modules and parameters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import assert_never

from attrs import frozen

from prepkit.config import (
    Wrap,
    WrapBlocks,
    WrapClasses,
    WrapPaths,
    WrapRoot,
    WrapSize,
)
from prepkit.facts import ModelFacts

_LISTS = frozenset({"ModuleList", "Sequential"})


PACKED = frozenset({"Params4bit", "Int8Params"})
"""Classes of parameters whose values are packed in fewer bits (bitsandbytes)."""
BATCH_NORM = "_BatchNorm"
"""Base of every batch norm of torch."""


def unsynchronized_batch_norms(model: ModelFacts) -> tuple[str, ...]:
    """Paths of the batch norms that are not synchronised yet, in module order."""
    plain = {i for i, cls in enumerate(model.classes) if BATCH_NORM in cls.mro and cls.name != "SyncBatchNorm"}
    return tuple(module.path for module in model.modules if module.cls in plain)


def parent(path: str) -> str:
    """Path of the enclosing module: ``a.b`` of ``a.b.weight``, ``""`` of ``weight``."""
    return path.rpartition(".")[0]


@frozen(kw_only=True)
class RepeatedBlock:
    """A class whose modules fill lists of at least two: the natural unit of sharding and of compilation."""

    cls: str
    paths: tuple[str, ...]


def repeated_blocks(model: ModelFacts) -> tuple[RepeatedBlock, ...]:
    """The repeated blocks of a model, outermost only, in module order."""
    lists = {m.path for m in model.modules if _LISTS & {model.classes[m.cls].name, *model.classes[m.cls].mro}}
    items: dict[str, list[int]] = defaultdict(list)
    for module in model.modules:
        if module.path and parent(module.path) in lists:
            items[parent(module.path)].append(module.cls)
    uniform = {
        path
        for path, kinds in items.items()
        if len(kinds) > 1 and len(set(kinds)) == 1 and model.classes[kinds[0]].has_forward
    }
    blocks: dict[str, list[str]] = {}
    inside: set[str] = set()
    for module in model.modules:
        up = parent(module.path)
        if module.path and up in inside:
            inside.add(module.path)
        elif module.path and up in uniform:
            inside.add(module.path)
            blocks.setdefault(model.classes[module.cls].name, []).append(module.path)
    return tuple(RepeatedBlock(cls=name, paths=tuple(paths)) for name, paths in blocks.items())


def select(wrap: Wrap, model: ModelFacts) -> tuple[str, ...]:
    """Paths of the modules that a selection means, children before parents, never the root.

    Modules without a forward of their own (``ModuleList``) are never selected: torch refuses them (G-8).
    """
    able = [m for m in model.modules if m.path and model.classes[m.cls].has_forward]
    match wrap:
        case WrapRoot():
            return ()
        case WrapClasses(names=names, paths=patterns):
            matched = matcher(patterns)
            chosen = {m.path for m in able if model.classes[m.cls].name in names or matched(m.path)}
        case WrapBlocks():
            chosen = _blocks(model) & {m.path for m in able}
        case WrapPaths(patterns=patterns):
            matched = matcher(patterns)
            chosen = {m.path for m in able if matched(m.path)}
        case WrapSize(min_params=least):
            return _by_size(model, tuple(m.path for m in able), least)
        case _:
            assert_never(wrap)
    return bottom_up(model, chosen)


def matches(pattern: str, path: str) -> bool:
    """Return whether a dotted path matches a shell pattern in which ``*`` and ``?`` stay inside one segment.

    >>> matches("model.layers.*", "model.layers.3"), matches("model.layers.*", "model.layers.3.mlp")
    (True, False)
    """
    return matcher((pattern,))(path)


def matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Whether a path matches one of the patterns, as a function that does not grow with the number of plain paths."""
    exact = frozenset(pattern for pattern in patterns if not set("*?") & set(pattern))
    wild = [re.escape(p).replace(r"\*", r"[^.]*").replace(r"\?", r"[^.]") for p in patterns if p not in exact]
    test = re.compile("|".join(f"(?:{text})" for text in wild)).fullmatch if wild else None
    return lambda path: path in exact or (test is not None and test(path) is not None)


def _blocks(model: ModelFacts) -> set[str]:
    declared = set(model.declared_blocks)
    chosen = {m.path for m in model.modules if m.path and model.classes[m.cls].name in declared}
    chosen = chosen or {path for block in repeated_blocks(model) for path in block.paths}
    return chosen - _splitting(chosen, model)


def _splitting(chosen: set[str], model: ModelFacts) -> set[str]:
    """Modules that hold some names of a tied parameter and not the others (BERT declares its embeddings as a block)."""
    splitting: set[str] = set()
    paths = {module.path for module in model.modules}  # a name elsewhere is a second way to the same module
    for names in model.ties:
        holders = [chosen.intersection(_ancestors(name)) for name in names if parent(name) in paths]
        splitting.update(*(holder ^ holders[0] for holder in holders))
    return splitting


def _ancestors(path: str) -> Iterator[str]:
    while path := parent(path):
        yield path


def bottom_up(model: ModelFacts, chosen: set[str]) -> tuple[str, ...]:
    """Module order, but a chosen module comes after the chosen modules inside it."""
    out: list[str] = []
    open_: list[str] = []
    for path in (m.path for m in model.modules if m.path in chosen):
        while open_ and not path.startswith(open_[-1] + "."):
            out.append(open_.pop())
        open_.append(path)
    return (*out, *reversed(open_))


def _by_size(model: ModelFacts, able: tuple[str, ...], least: int) -> tuple[str, ...]:
    own: dict[str, int] = defaultdict(int)
    for param in model.params:
        own[parent(param.name)] += param.numel
    may = set(able)
    out: list[str] = []
    for path in (m.path for m in reversed(model.modules)):  # children come before their parents
        if path in may and own[path] >= least:
            out.append(path)
        elif path:
            own[parent(path)] += own[path]
    return bottom_up(model, set(out))


def packed_params(model: ModelFacts) -> tuple[str, ...]:
    """Frozen packed weights: their bytes mean nothing apart from each other, so that every rank holds all of them."""
    return tuple(param.name for param in model.params if param.cls in PACKED and not param.requires_grad)


def unit_of(paths: tuple[str, ...], model: ModelFacts) -> dict[str, str]:
    """Parameter name, aliases of tied ones included, to the path of the unit that its module belongs to.

    ``paths`` are the units below the root; what none of them holds belongs to the root, ``""``.
    """
    chosen = set(paths)
    owner: dict[str, str] = {"": ""}
    for module in model.modules:
        if module.path:
            owner[module.path] = module.path if module.path in chosen else owner.get(parent(module.path), "")
    names = [param.name for param in model.params] + [name for group in model.ties for name in group[1:]]
    return {name: owner.get(parent(name), "") for name in names}
