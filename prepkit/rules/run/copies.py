"""Weights that lie over each other, and averages that follow them at once."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.copies import AverageFacts
from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.rules.rule import Hit, Moment, Rule


def _overlapping(facts: RunFacts) -> Iterator[Hit]:
    for one, other in facts.window.overlapping if facts.window is not None else ():
        what = f"`{one}` and `{other}` are two parameters over one piece of memory: each step moves the weights twice"
        yield Hit(one, f"{what}, each time by a part of their gradient.")


def _following(facts: RunFacts) -> Iterator[Hit]:
    for one in facts.window.following if facts.window is not None else ():
        of = f"of `{one.name}` " if one.name else ""
        what = f"The average {of}goes {100 * one.part:.3g} % of its distance to the model in each step, so that it is"
        yield Hit(one.name or "model", f"{what} the model of the last step: the factors seem to be swapped.")


def _averages(facts: RunFacts) -> AverageFacts:
    return facts.window.averages if facts.window is not None else AverageFacts()


def _itself(facts: RunFacts) -> Iterator[Hit]:
    for line in _averages(facts).itself:
        what = "This averages weights that are trained with themselves: both models are one, so that the average is"
        yield Hit(line, f"{what} the model of the last step.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.storage-shared",
        summary="What is stepped twice is one parameter.",
        check=_overlapping,
        at=(Moment.AUDIT,),
        fix="Tie by the parameter itself, decoder.weight = encoder.weight, or call F.linear(h, encoder.weight.t()).",
        severity=Severity.WARNING,
        source=("torch Module.register_parameter",),
    ),
    Rule(
        id="run.average-follows",
        summary="An average of weights goes a small part of its distance to them in a step.",
        check=_following,
        at=(Moment.AUDIT,),
        fix="Write average.mul_(decay).add_(param, alpha=1 - decay), or average.lerp_(param, 1 - decay).",
        severity=Severity.WARNING,
        source=("torch AveragedModel",),
    ),
    Rule(
        id="run.average-itself",
        summary="An average of weights lies elsewhere than the weights.",
        check=_itself,
        at=(Moment.AUDIT,),
        fix="Write teacher = copy.deepcopy(model).requires_grad_(False) where it is made.",
        severity=Severity.WARNING,
        source=("torch Tensor.lerp_",),
    ),
)
"""Reporting order."""
