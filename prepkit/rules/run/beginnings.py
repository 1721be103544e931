"""How the layers of a model that trains began, and what they go on with from batch to batch."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.facts.values import BeginningFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, some
from prepkit.rules.rule import Hit, Moment, Rule


def _begun(facts: RunFacts) -> BeginningFacts:
    return facts.window.beginnings if facts.window is not None else BeginningFacts()


def _alike(facts: RunFacts) -> Iterator[Hit]:
    if alike := _begun(facts).alike:
        name, units = alike[0]
        others = f" So have those of {some([one for one, _ in alike[1:]])}." if alike[1:] else ""
        what = f"All {units} units have the same weights and the same gradient, so that they stay one unit."
        yield Hit(at(name), f"{what}{others}")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.units-alike",
        summary="The units of a layer begin unlike, so that they can learn unlike things.",
        check=_alike,
        at=(Moment.AUDIT,),
        fix="Draw the weights: nn.init.xavier_uniform_(layer.weight), or leave them as torch has made them.",
        severity=Severity.WARNING,
        source=("torch nn.init",),
    ),
)
"""Reporting order."""
