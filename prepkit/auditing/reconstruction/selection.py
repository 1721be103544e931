"""Modules as the selection of a config that means just these."""

from __future__ import annotations

from collections.abc import Callable

from prepkit.config import Wrap, WrapBlocks, WrapClasses, WrapPaths, WrapRoot
from prepkit.facts import ModelFacts
from prepkit.resolve.modules import matches, select


def selection(
    paths: frozenset[str], model: ModelFacts, means: Callable[[Wrap], frozenset[str]] | None = None
) -> Wrap | None:
    """By class where they are all that the class has, then as blocks, then by path; None where no selection means them.

    ``means``: what a selection comes to; None: the modules that it names.
    """
    understood = means or (lambda wrap: frozenset(select(wrap, model)))
    classes = {module.path: model.classes[module.cls].name for module in model.modules}
    names = tuple(sorted({classes[path] for path in paths if path in classes}))
    patterns = tuple(dict.fromkeys(_pattern(path) for path in classes if path in paths))
    exact = tuple(path for path in classes if path in paths)
    candidates: tuple[Wrap, ...] = (
        WrapRoot(),
        WrapClasses(names),
        WrapBlocks(),
        WrapPaths(patterns),
        WrapPaths(exact),
    )
    return next((wrap for wrap in candidates if understood(wrap) == paths), None)


def pattern(paths: tuple[str, ...], every: tuple[str, ...]) -> str | None:
    """One shell pattern that matches these of all paths and no others, ``*`` for numbers; None where there is none."""
    if len(paths) == 1:
        return paths[0]
    patterns = {_pattern(path) for path in paths}
    one = patterns.pop()
    if patterns or {path for path in every if matches(one, path)} != set(paths):
        return None
    return one


def _pattern(path: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))
