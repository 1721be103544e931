"""Where a run has gone wrong since an earlier look: modes, options, counts."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.facts.window import CourseFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule


def _pairs(facts: RunFacts) -> Iterator[tuple[CourseFacts, CourseFacts]]:
    return ((before.course, now.course) for before, now in facts.running)


def _mode(facts: RunFacts) -> Iterator[Hit]:
    for before, now in _pairs(facts):
        if new := [name for name in now.resting if name not in before.resting]:
            what = f"{count(len(new), 'module')} with dropout or batch norm went into evaluation mode: {some(new)}."
            yield Hit(at(new[0]), what)


def _zeroed(facts: RunFacts) -> Iterator[Hit]:
    for _, now in _pairs(facts):
        if now.zeroed:
            what = f"The moments of {count(len(now.zeroed), 'parameter')} are zero, and were not: {some(now.zeroed)}."
            yield Hit("optimizer", what)


def _counts(facts: RunFacts) -> Iterator[Hit]:
    for before, now in _pairs(facts):
        for index, (old, new) in enumerate(zip(before.counts, now.counts, strict=False)):
            if old is not None and new is not None and new < old:
                where = "optimizer" if len(now.counts) == 1 else f"optimizer[{index}]"
                yield Hit(where, f"Its state has counted {count(new, 'step')}, and {old} at the last look.")


def _options(facts: RunFacts) -> Iterator[Hit]:
    for _, now in _pairs(facts):
        for name, old, new in now.altered:
            yield Hit(name, f"It is {new} since the last look, and was {old}.")


def _steps(seen: CourseFacts) -> int:
    """Optimizer steps until then; 0 where nobody counts them."""
    return seen.steps if seen.steps is not None else next((one for one in seen.counts if one is not None), 0)


def _ticks(facts: RunFacts) -> Iterator[Hit]:
    each = facts.scheduler.ticks if facts.scheduler is not None else 1
    for before, now in _pairs(facts):
        if now.ticked is None or before.ticked is None:
            continue
        if now.horizon and before.ticked <= now.horizon < now.ticked:
            what = f"It is made for {now.horizon} ticks, and was ticked {now.ticked} times: its end is behind it."
            yield Hit("scheduler", what, "Make it for as many ticks as there are steps, or end there.")
        steps = _steps(now) - _steps(before)
        if steps > 1 and now.ticked - before.ticked >= 2 * steps * each:
            what = f"It was ticked {now.ticked - before.ticked} times in {steps} steps."
            yield Hit("scheduler", what)


def _epochs(facts: RunFacts) -> Iterator[Hit]:
    for before, now in _pairs(facts):
        for sampler in now.repeated:
            if sampler not in before.repeated:
                yield Hit("loaders", f"A DistributedSampler {sampler}, has given two passes in one order.")


def _rule(name: str, summary: str, check: object, fix: str, severity: Severity, *source: str) -> Rule:
    return Rule(
        id=f"run.drift-{name}",
        summary=summary,
        check=check,  # type: ignore[arg-type]  # each is one
        at=(Moment.DRIFT,),
        needs=(Need.BEFORE, Need.OPTIMIZERS),
        fix=fix,
        severity=severity,
        source=source,
    )


RULES: tuple[Rule, ...] = (
    _rule(
        "zeroed",
        "Moments that have become other than zero stay so.",
        _zeroed,
        "Leave optimizer.state alone in the loop; nothing, where a restart is meant.",
        Severity.WARNING,
    ),
    _rule(
        "counts",
        "An optimizer counts its steps onwards.",
        _counts,
        "Load the state of the optimizer where it was saved; nothing, where a restart is meant.",
        Severity.WARNING,
    ),
    _rule(
        "mode",
        "What trains at one look trains at the next.",
        _mode,
        "Call model.train() after each evaluation.",
        Severity.WARNING,
    ),
    _rule(
        "options",
        "Options of an optimizer stay what they were, unless something moves them all the time.",
        _options,
        "Drop the line that writes into param_groups; nothing, where it is meant.",
        Severity.WARNING,
    ),
    _rule(
        "ticks",
        "A scheduler is ticked as often as the optimizer steps, and not past its end.",
        _ticks,
        "Tick it in one place.",
        Severity.WARNING,
        "pain 15",
    ),
    _rule(
        "epoch",
        "Each pass has an order of its own.",
        _epochs,
        "Call sampler.set_epoch(epoch) before each pass.",
        Severity.WARNING,
        "torch DistributedSampler.set_epoch",
    ),
)
"""Reporting order: numbers that are wrong, then what may be meant."""
