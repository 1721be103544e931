"""Values that a program has changed on the way, and how its weights began."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.facts.values import ValueFacts
from prepkit.findings import Severity
from prepkit.rules.rule import Hit, Moment, Rule


def _values(facts: RunFacts) -> ValueFacts:
    return facts.window.values if facts.window is not None else ValueFacts()


def _permutes(facts: RunFacts) -> Iterator[Hit]:
    for one in _values(facts).permuted:
        what = f"{one.function} makes {[*one.after]} of {[*one.before]}: it moves no dimension, it cuts the same row of"
        then = "" if len(one.after) == len(one.before) else f".reshape({', '.join(map(str, one.after))})"
        fix = f"Write permute({', '.join(map(str, one.order))}){then} in its place." if one.order else ""
        yield Hit(one.line, f"{what} numbers anew, so that values of different places get mixed.", fix)


def _empties(facts: RunFacts) -> Iterator[Hit]:
    for line, method in _values(facts).emptied:
        yield Hit(line, f"{method} makes whole numbers of fractions between -1 and 1: all of them are 0 then.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.view-permutes",
        summary="No view stands where dimensions are to be moved.",
        check=_permutes,
        at=(Moment.AUDIT,),
        fix="Write permute or transpose in its place; to merge dimensions, permute first and reshape then.",
        severity=Severity.WARNING,
        source=("torch Tensor.view", "torch Tensor.permute"),
    ),
    Rule(
        id="run.cast-to-nothing",
        summary="A cast to whole numbers leaves something of the numbers.",
        check=_empties,
        at=(Moment.AUDIT,),
        fix="Leave the cast out; for classes, cast the column of classes, before anything is normalised.",
        severity=Severity.WARNING,
        source=("torch Tensor.long",),
    ),
)
"""Reporting order."""
