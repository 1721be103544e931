"""How a program's loop stands to its schedules, wrappers and collectives."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.loops import TurnFacts
from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.rules.rule import Hit, Moment, Rule


def _turns(facts: RunFacts) -> TurnFacts:
    return facts.window.turns if facts.window is not None else TurnFacts()


def _idle(facts: RunFacts) -> Iterator[Hit]:
    name, line = _turns(facts).idle
    if name:
        made = f", made in {line}," if line else ""
        yield Hit(name, f"It drives the optimizer that steps{made} and no line of the program calls its step().")


def _by_pass(facts: RunFacts) -> Iterator[Hit]:
    one = _turns(facts).by_pass
    if one is not None and one.micros:
        what = f"It is made for {one.ticks} ticks, and for {one.line} accelerate ticks it once in {one.micros} batches:"
        fix = f"Make it for the steps of the optimizer: divide by gradient_accumulation_steps={one.micros}."
        yield Hit(one.scheduler, f"{what} it never gets to its end.", fix)
    elif one is not None:
        what = f"It is made for {one.ticks} ticks, and {one.line} ticks it once in each of {one.passes} passes:"
        yield Hit(one.scheduler, f"{what} it never gets to its end.")


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
)
"""Reporting order."""
