"""How a loop stands to its schedules, and how long these last."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.loops import TurnFacts
from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import count
from prepkit.rules.rule import Hit, Moment, Need, Rule


def _turns(facts: RunFacts) -> TurnFacts:
    return facts.window.turns if facts.window is not None else TurnFacts()


def _idle(facts: RunFacts) -> Iterator[Hit]:
    name, line = _turns(facts).idle
    if name:
        made = f", made in {line}," if line else ""
        yield Hit(name, f"It drives the optimizer that steps{made} and no line of the program calls its step().")


def _by_pass(facts: RunFacts) -> Iterator[Hit]:
    one = _turns(facts).by_pass
    if one is not None and one.often:
        made = f"It is made for {one.ticks} ticks, and for {one.line} accelerate ticks it {one.often} times a step"
        ends = f"one for each process: it is at its end after {one.ticks // one.often} steps."
        fix = f"Make it for {one.ticks * one.often} ticks, or prepare it with step_scheduler_with_optimizer=False."
        yield Hit(one.scheduler, f"{made}, {ends}", fix)
    elif one is not None and one.micros:
        what = f"It is made for {one.ticks} ticks, and for {one.line} accelerate ticks it once in {one.micros} batches:"
        fix = f"Make it for the steps of the optimizer: divide by gradient_accumulation_steps={one.micros}."
        yield Hit(one.scheduler, f"{what} it never gets to its end.", fix)
    elif one is not None:
        what = f"It is made for {one.ticks} ticks, and {one.line} ticks it once in each of {one.passes} passes:"
        yield Hit(one.scheduler, f"{what} it never gets to its end.")


def _ends(facts: RunFacts) -> Iterator[Hit]:
    seen, scheduler = facts.window, facts.scheduler
    if seen is None or scheduler is None or not seen.steps or not seen.ticks:
        return
    end = scheduler.end if scheduler.end is not None and seen.ticks < scheduler.end <= seen.steps else None
    horizon = scheduler.horizon or end
    if seen.ticks < seen.steps and seen.ticks * scheduler.ticks <= scheduler.warm <= seen.steps:
        what = f"`{scheduler.name}` warms up for more than {count(scheduler.warm, 'tick')}, and {seen.trainer} ticks it"
        fix = "Tick it with each step: {'scheduler': ..., 'interval': 'step'}."
        yield Hit("scheduler", f"{what} {count(seen.ticks, 'time')} in {seen.steps} steps: it never gets warm.", fix)
        return
    if not horizon:
        return
    made = f"`{scheduler.name}` is made for {horizon} ticks"
    if horizon < seen.ticks:
        what = f"{seen.trainer} takes {seen.steps} steps and ticks it {seen.ticks} times: it is at its end before."
        yield Hit("scheduler", f"{made}, and {what}", f"Make it for {seen.ticks} ticks.")
    elif seen.ticks * scheduler.ticks * 2 <= horizon:
        ticks = f"{seen.trainer} ticks it {count(seen.ticks, 'time')} in {seen.steps} steps"
        if seen.ticks < seen.steps and horizon <= seen.steps:
            fix = "Tick it with each step: {'scheduler': ..., 'interval': 'step'}."
            yield Hit("scheduler", f"{made}, and {ticks}: it hardly begins.", fix)
        else:
            fix = f"Make it for {seen.ticks} ticks; nothing, where training is to end before it does, as in a trial."
            yield Hit("scheduler", f"{made}, and {ticks}: most of it is left out.", fix)


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.schedule-idle",
        summary="A scheduler is ticked somewhere.",
        check=_idle,
        at=(Moment.AUDIT,),
        fix="Call scheduler.step() behind optimizer.step(), or once behind each pass; in Lightning with "
        "automatic_optimization=False call self.lr_schedulers().step().",
        severity=Severity.WARNING,
        source=("torch LRScheduler.step",),
    ),
    Rule(
        id="run.ticked-by-pass",
        summary="A schedule that is made for steps is ticked at each step.",
        check=_by_pass,
        at=(Moment.AUDIT,),
        fix="Move scheduler.step() into the inner loop, behind optimizer.step(), or make it for as many ticks as "
        "there are passes.",
        severity=Severity.WARNING,
        source=("torch LRScheduler.step",),
    ),
    Rule(
        id="run.trainer-schedule",
        summary="A schedule lasts as long as the Trainer that ticks it.",
        check=_ends,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Make it for as many ticks as the Trainer makes.",
        severity=Severity.WARNING,
        source=("pain 15",),
    ),
)
"""Reporting order."""
