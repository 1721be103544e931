"""What the terms of a loss are, and what they train."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.facts.terms import TermFacts
from prepkit.findings import Severity
from prepkit.rules.rule import Hit, Moment, Rule


def _terms(facts: RunFacts) -> TermFacts:
    return facts.window.terms if facts.window is not None else TermFacts()


def _targets(facts: RunFacts) -> Iterator[Hit]:
    for line in _terms(facts).targets:
        what = "The target, a reward and a part of the model's own outputs, requires a gradient: the loss moves it"
        yield Hit(line, f"{what} towards what is predicted.")


def _cancelled(facts: RunFacts) -> Iterator[Hit]:
    for one in _terms(facts).cancelled:
        which = f"One of {one.terms} terms of the loss" if one.terms > 1 else "The loss"
        what = f"{which} trains nothing: both sides of a {one.of} in it, of shape {[*one.shape]}, are computed alike"
        yield Hit(one.line, f"{what}, and their gradients cancel.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.target-trains",
        summary="What a model is to predict does not train where it is made of its own outputs.",
        check=_targets,
        at=(Moment.AUDIT,),
        fix="Compute the target under torch.no_grad(), or give the loss target.detach().",
        severity=Severity.WARNING,
        source=("torch Tensor.detach",),
    ),
    Rule(
        id="run.term-cancels",
        summary="Each term of a loss trains something.",
        check=_cancelled,
        at=(Moment.AUDIT,),
        fix="Compute the one that is compared with before the update, and detach it: old = logp.detach().",
        severity=Severity.WARNING,
        source=("torch Tensor.detach",),
    ),
)
"""Reporting order."""
