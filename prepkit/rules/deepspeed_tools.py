"""DeepSpeed against the optimizer and the scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.config import DeepSpeed, Mixed
from prepkit.findings.text import count
from prepkit.resolve.deepspeed.data import stage
from prepkit.resolve.resolved import Resolved
from prepkit.rules.deepspeed import flaws
from prepkit.rules.rule import Hit, Rule


def _state(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    optimizer = resolved.facts.optimizer
    if optimizer is None or optimizer.initial_state or not optimizer.stateful:
        return
    if isinstance(cfg.engine, DeepSpeed) and (stage(cfg.engine) or isinstance(cfg.precision, Mixed)):
        params = count(len(optimizer.stateful), "parameter")
        what = f"It has state for {params}, which DeepSpeed would drop: it steps shards of its own."
        yield Hit("optimizer", what)


def _adagrad(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    optimizer = facts.optimizer
    if not isinstance(resolved.cfg.engine, DeepSpeed) or optimizer is None or not stage(resolved.cfg.engine):
        return
    torchs = optimizer.name == "Adagrad" and optimizer.module.startswith("torch") and resolved.deepspeed.convert is None
    if torchs and (facts.scheduler is not None or len(optimizer.groups) > 1):
        lost = "the scheduler would go on with the old one" if facts.scheduler else "its groups would get one rate"
        yield Hit("optimizer", f"ZeRO makes torch's Adagrad anew from the options it was made with, and {lost}.")


def _factory(resolved: Resolved) -> Iterator[Hit]:
    cfg, facts = resolved.cfg, resolved.facts
    if facts.scheduler and facts.scheduler.factory and not isinstance(cfg.engine, DeepSpeed):
        what = (
            f"`{facts.scheduler.name}` makes a scheduler, and {type(cfg.engine).__name__} wants the scheduler itself."
        )
        yield Hit("scheduler", what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="deepspeed.needs-optimizer",
        summary="ZeRO stages 1 and 2 have an optimizer whose state they shard.",
        check=flaws("needs-optimizer"),
        fix="Pass an optimizer, or write stage=0 or 3.",
        overridable=False,
        source=("DS-17", "DS-50", "G-39"),
    ),
    Rule(
        id="deepspeed.two-optimizers",
        summary="One place says which optimizer DeepSpeed steps.",
        check=flaws("two-optimizers"),
        fix="Leave one of them out.",
        overridable=False,
        source=("DS-70", "DS-77"),
    ),
    Rule(
        id="deepspeed.two-schedulers",
        summary="One place says which scheduler is stepped.",
        check=flaws("two-schedulers"),
        fix="Leave one of them out.",
        overridable=False,
        source=("DS-60", "DS-64", "DS-76", "DS-62", "DS-66", "DS-80"),
    ),
    Rule(
        id="deepspeed.unknown-type",
        summary="The optimizer and scheduler sections name types that DeepSpeed knows.",
        check=flaws("unknown-type"),
        fix="Write a type that it knows.",
        overridable=False,
        source=("deepspeed/runtime/engine.py _configure_basic_optimizer", "pain 24"),
    ),
    Rule(
        id="deepspeed.schedule-alone",
        summary="A schedule has a section that it fills in, and an optimizer whose rate it sets.",
        check=flaws("schedule-alone"),
        fix="Add what is missing, or leave the schedule out.",
        overridable=False,
        source=("DS-52", "DS-55", "DS-69", "DS-73", "G-39"),
    ),
    Rule(
        id="deepspeed.scheduler-ticks",
        summary="A scheduler that DeepSpeed steps is stepped once per optimizer step.",
        check=flaws("scheduler-ticks"),
        fix="Write scheduler_ticks=1.",
        overridable=False,
        source=("W-16", "W-22", "pain 15"),
    ),
    Rule(
        id="deepspeed.untested-optimizer",
        summary="An optimizer that ZeRO was not tested with is allowed by nobody's false.",
        check=flaws("untested-optimizer"),
        fix="Write true, or use AdamW.",
        overridable=False,
        source=("DS-16",),
    ),
    Rule(
        id="deepspeed.optimizer-state",
        summary="An optimizer that is handed to ZeRO has no state yet.",
        check=_state,
        fix="Pass a fresh optimizer, and load a checkpoint with the engine's load_checkpoint().",
        source=("G-4", "DS-25"),
    ),
    Rule(
        id="deepspeed.adagrad",
        summary="Under ZeRO torch's Adagrad has one group and no scheduler.",
        check=_adagrad,
        fix="Use AdamW, or write stage=0.",
        source=("deepspeed/runtime/zero/stage_1_and_2.py initialize_optimizer_states", "pain 1"),
    ),
    Rule(
        id="scheduler.factory",
        summary="Outside DeepSpeed a scheduler is given, not a function that makes one.",
        check=_factory,
        fix="Make the scheduler from the optimizer that you pass, or write engine=DeepSpeed().",
        overridable=False,
        source=("DS-74", "G-38"),
    ),
)
"""Reporting order: the optimizer, the scheduler."""
