"""Why ranks disagree: how this rank's plan differs from another rank's, name by name.

``ranks.agree`` compares digests, which say that two plans differ and not in what. Only then the plan of one rank of the
majority travels to all as text (``plan_differences``); every rank compares it with its own, and sends back one
line per difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from prepkit.codec import plan_from_text, plan_to_text
from prepkit.codec.diff import Change, Set, Splice, diff, place
from prepkit.plan import Plan
from prepkit.plan.drift import drift
from prepkit.render.changes import value_text


def plan_differences(plan: Plan) -> tuple[str, Callable[[str], tuple[str, ...]]]:
    """The text of this rank's plan, and a function from another rank's text to the lines in which the two differ.

    The text is that of a plan file, so that a rank with another version of prepkit refuses it rather than misreads it:
    the function raises ``PlanRejected`` as ``codec.plan_from_text`` does.
    """
    return plan_to_text(plan), lambda text: differences(plan_from_text(text), plan)


def differences(theirs: Plan, mine: Plan) -> tuple[str, ...]:
    """One line per difference, such as ``config.accumulation: 1 there, 4 here``: ``theirs`` is there, ``mine`` is here.

    Config first, then facts parameter by parameter: what else differs in the plans follows from these two. Only where
    both are equal, as with two versions of prepkit, steps and layouts are compared.
    """
    changes = diff(theirs, mine)
    config = _lines(tuple(change for change in changes if change.path[0] == "config"))
    facts = tuple(f"{fact.where}: {fact.planned} there, {fact.now} here" for fact in drift(theirs.facts, mine.facts))
    return (*config, *facts) or _lines(changes)


def _lines(changes: tuple[Change, ...]) -> tuple[str, ...]:
    return tuple(_line(change) for change in changes)


def _line(change: Change) -> str:
    match change:
        case Set(path=path, before=before, after=after):
            return f"{place(path)}: {value_text(before)} there, {value_text(after)} here"
        case Splice(path=path, index=index, removed=removed, added=added):
            return f"{place((*path, index))}: {value_text(removed)} there, {value_text(added)} here"
        case _:
            assert_never(change)
