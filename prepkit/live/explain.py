"""How this rank's plan differs from another rank's, name by name, for a disagreement's message."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from prepkit.codec import plan_from_text, plan_to_text
from prepkit.codec.diff import Change, Set, Splice, diff, place
from prepkit.plan import Plan
from prepkit.plan.drift import drift
from prepkit.render.changes import value_text


def dossier(plan: Plan) -> tuple[str, Callable[[str], tuple[str, ...]]]:
    """The plan as text, and what to ask about another rank's text."""
    return plan_to_text(plan), lambda text: differences(plan_from_text(text), plan)


def differences(theirs: Plan, mine: Plan) -> tuple[str, ...]:
    """Config first, then facts parameter by parameter; where both are equal, whatever else the plans differ in."""
    changes = diff(theirs, mine)
    config = _lines(tuple(change for change in changes if change.path[0] == "config"))
    facts = tuple(f"{one.where}: {one.planned} there, {one.now} here" for one in drift(theirs.facts, mine.facts))
    return (*config, *facts) or _lines(changes)


def _lines(changes: tuple[Change, ...]) -> tuple[str, ...]:
    return tuple(_said(change) for change in changes)


def _said(change: Change) -> str:
    match change:
        case Set(path=path, before=before, after=after):
            return f"{place(path)}: {value_text(before)} there, {value_text(after)} here"
        case Splice(path=path, index=index, removed=removed, added=added):
            return f"{place((*path, index))}: {value_text(removed)} there, {value_text(added)} here"
        case _:
            assert_never(change)
