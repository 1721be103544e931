"""What apply has made of a model, against the plan: layout, master weights, buffers, values, owners, steps."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import AppliedFacts, RunFacts
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule

NOTHING = AppliedFacts()

REPORT = (
    "Build model and optimizer again before the next apply. It is a defect of prepkit or of torch: report it with the "
    "plan file and the attestation."
)
"""Where a step was done, and has not led to what the plan says."""


def _layout(facts: RunFacts) -> Iterator[Hit]:
    """One hit for all that differ in the same way."""
    names: dict[str, list[str]] = {}
    for one in (facts.applied or NOTHING).layout:
        names.setdefault(one.what, []).append(one.where)
    for what, those in names.items():
        yield Hit(at(those[0]), what + (f"; likewise {some(those[1:])}" if those[1:] else ""))


def _masters(facts: RunFacts) -> Iterator[Hit]:
    if low := (facts.applied or NOTHING).masters:
        yield Hit("model", f"Master weights are not float32 where the plan says who keeps them: {'; '.join(low[:5])}.")


def _values(facts: RunFacts) -> Iterator[Hit]:
    if changed := (facts.applied or NOTHING).changed:
        what = f"{count(len(changed), 'tensor')} with other values than before the first step: {some(changed)}."
        yield Hit(at(changed[0]), what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.other-layout",
        summary="Parameters and buffers are those of the plan, each with its shape, dtype, placement and attributes.",
        check=_layout,
        at=(Moment.APPLY,),
        fix=REPORT,
        source=("pain 1",),
    ),
    Rule(
        id="run.no-master-weights",
        summary="Float32 master weights are kept by whom the plan says.",
        check=_masters,
        at=(Moment.APPLY,),
        fix=REPORT,
        source=("pain 2",),
    ),
    Rule(
        id="run.values-changed",
        summary="Weights and buffers that no step writes have the values that they had before apply.",
        check=_values,
        at=(Moment.APPLY,),
        needs=(Need.VALUES,),
        cost="a pass over all buffers, and with apply(fingerprint=True) two over all weights",
        fix=REPORT,
        source=("pain 17",),
    ),
    Rule(
        id="run.other-owners",
        summary="Who scales, counts, clips and ticks is who the plan says.",
        check=lambda facts: [Hit(one.where, one.what) for one in (facts.applied or NOTHING).owners],
        at=(Moment.APPLY,),
        fix=REPORT,
        source=("pain 16",),
    ),
)
"""Reporting order: the model, its values, who does what."""

STEPS = Rule(
    id="run.step-undone",
    summary="Every step of a plan has left what it says.",
    check=lambda facts: [Hit(one.where, one.what) for one in (facts.applied or NOTHING).steps],
    at=(Moment.APPLY,),
    fix=REPORT,
)
"""Told last: what else is wrong often follows from it, and is said in words of the model."""
