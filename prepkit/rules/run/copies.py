"""Weights that lie over each other, and averages that follow them at once."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.copies import AverageFacts
from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import count
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


def _still(facts: RunFacts) -> Iterator[Hit]:
    for one in _averages(facts).still:
        what = f"An average of the weights (`{one.model}`) is evaluated: its weights have moved, and the running"
        of = f"statistics of its {count(one.norms, 'norm')} stand as they were made, while those of the model moved"
        yield Hit(one.line, f"{what} {of}.")


def _rounded(facts: RunFacts) -> Iterator[Hit]:
    for one in _averages(facts).rounded:
        what = f"The average of the weights is kept in {one.dtype}: {100 * one.share:.0f} % of its numbers that were"
        yield Hit(one.line, f"{what} looked at stand still in each update, which rounding loses, far from the weights.")


def _often(facts: RunFacts) -> Iterator[Hit]:
    for name, times in _averages(facts).often:
        what = (
            f"The average {f'of `{name}` ' if name else ''}is moved {times} times in each step, as at each micro-batch"
        )
        yield Hit(name or "model", f"{what}: it forgets by decay ** {times} in a step.")


def _stays(facts: RunFacts) -> Iterator[Hit]:
    for one in _averages(facts).stays:
        what = f"`{one.model}` is evaluated with an average of its weights in it, and trains on from there: each"
        yield Hit(one.line, f"{what} evaluation throws away what the steps before it have done.")


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
    Rule(
        id="run.average-buffers",
        summary="An average of weights that is evaluated has the running statistics of its norms with it.",
        check=_still,
        at=(Moment.AUDIT,),
        fix=(
            "Copy them in each update: for old, new in zip(average.buffers(), model.buffers()): old.copy_(new); or "
            "AveragedModel(model) with update_parameters, or update_bn(loader, average) before it is evaluated."
        ),
        severity=Severity.WARNING,
        source=("torch AveragedModel",),
    ),
    Rule(
        id="run.average-rounds",
        summary="An average of weights has the digits that its updates need.",
        check=_rounded,
        at=(Moment.AUDIT,),
        fix="Keep the average in float32: average = param.detach().float().clone().",
        severity=Severity.WARNING,
        source=("torch AveragedModel",),
    ),
    Rule(
        id="run.average-often",
        summary="An average of weights is moved once in a step.",
        check=_often,
        at=(Moment.AUDIT,),
        fix="Move it behind the optimizer's step alone, not behind each micro-batch of it.",
        severity=Severity.WARNING,
        source=("torch AveragedModel",),
    ),
    Rule(
        id="run.average-stays",
        summary="An average that is put into a model to evaluate it is taken out again before it trains.",
        check=_stays,
        at=(Moment.AUDIT,),
        fix=(
            "Keep the weights: kept = copy.deepcopy(model.state_dict()), and behind the evaluation "
            "model.load_state_dict(kept); or evaluate a copy that holds the average."
        ),
        severity=Severity.WARNING,
        source=("torch AveragedModel",),
    ),
)
"""Reporting order."""
