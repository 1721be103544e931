"""Schedulers, and what two keep count of: a DeepSpeed engine and whoever stands around it."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import count
from prepkit.rules.rule import Hit, Moment, Need, Rule


def _elsewhere(facts: RunFacts) -> Iterator[Hit]:
    scheduler = facts.scheduler
    if (
        scheduler is not None
        and facts.optimizers
        and not scheduler.drives_optimizer
        and (facts.applied or not facts.running)
    ):
        yield Hit("scheduler", f"`{scheduler.name}` changes the learning rate of an optimizer that was not given.")
    for one in facts.window.phases.outlived if facts.window is not None else ():
        made = f" ({one.made})" if one.made else ""
        what = f"{one.line} ticks a `{one.scheduler}` of an optimizer that steps no more. `{one.optimizer}`{made} steps"
        fix = "Make a scheduler of the new optimizer where that is made, and tick that one."
        yield Hit("scheduler", f"{what} in its place, and its learning rate stays as it is.", fix, milder=True)


def _early(facts: RunFacts) -> Iterator[Hit]:
    scheduler = facts.scheduler
    horizon = None if scheduler is None else scheduler.horizon or scheduler.end
    if scheduler is None or not horizon or not facts.loaders or not facts.loaders[0].batches:
        return
    steps = -(-facts.loaders[0].batches // (facts.accumulation or 1))
    ticks = scheduler.ticks
    passes, rest = divmod(horizon, steps)
    inside_first = horizon >= steps > horizon // ticks  # whoever wants less than a pass makes it for less
    if ticks > 1 and ((not rest and passes % ticks) or inside_first):
        made_for = f"{count(passes, 'pass')} of {steps} steps" if not rest else f"more than a pass of {steps} steps"
        what = (
            f"`{scheduler.name}` is made for {horizon} ticks, {made_for}, and accelerate "
            f"ticks it {ticks} times a step: it is at its end after {horizon // ticks} steps."
        )
        fix = (
            f"Make it for {horizon * ticks} ticks, or prepare it with Accelerator(step_scheduler_with_optimizer=False)."
        )
        yield Hit("scheduler", what, fix)
    elif ticks == 1 and horizon < steps and (scheduler.by_batch or _by_batch(facts)):
        yield Hit("scheduler", f"`{scheduler.name}` is made for {horizon} ticks, and a pass has {steps} steps.")


def _by_batch(facts: RunFacts) -> bool:
    """Return whether the program ticks it in the loop in which it steps."""
    return facts.window is not None and facts.window.by_batch


REFUSED = 16
"""Steps that a ``GradScaler`` may refuse until its scale fits, behind which a scheduler ticks."""


def _ticked(facts: RunFacts) -> Iterator[Hit]:
    scheduler = facts.scheduler
    if scheduler is None or not facts.optimizers or not scheduler.drives_optimizer:
        return
    name, seen = facts.optimizers[0].name, facts.window
    skips = seen is not None and seen.scaled  # its first steps, behind which a scheduler ticks
    heard = seen.ticked if seen is not None else 0
    ticks = max(heard, scheduler.early if all(one.fresh for one in facts.optimizers) else 0)
    if ticks and not skips:
        what = f"`{scheduler.name}` has {count(ticks, 'tick')}, and `{name}` has not stepped"
        yield Hit("scheduler", f"{what}: the first rates are left out, or the optimizer's state was not loaded.")
    steps = max((one.counted or 0 for one in facts.optimizers), default=0)
    ticks = min(scheduler.early, scheduler.ticked or 0)
    if seen is None and facts.accumulation is None and steps and ticks >= 2 * steps and ticks - steps > REFUSED:
        what = f"`{scheduler.name}` has {count(ticks, 'tick')}, and `{name}` {count(steps, 'step')}: it ends early."
        fix = "Call scheduler.step() once for each optimizer.step(), and for no micro-batch; nothing, where the state "
        yield Hit("scheduler", what, f"{fix}of the optimizer was cleared on purpose.")
    if seen is not None and steps and scheduler.by_batch and not (scheduler.ticked or scheduler.early):
        what = f"`{name}` goes on after {count(steps, 'step')}, and `{scheduler.name}` has not been ticked"
        fix = "Load the state of both, scheduler.load_state_dict too; nothing, where a new schedule is meant to begin."
        yield Hit("scheduler", f"{what}: its rates begin anew.", fix)


def _squared(facts: RunFacts) -> Iterator[Hit]:
    scheduler = facts.scheduler
    if scheduler is None or scheduler.factor is None:
        return
    rate, most = scheduler.factor
    if 0 < most < LITTLE and 0 < rate < LITTLE and NEAR * rate < most < rate / NEAR:
        what = f"Its function gives {most:.2g} at most, by which it multiplies {rate:.2g}"
        yield Hit("scheduler", f"{what}: rates are {rate * most:.2g} at most.")


LITTLE = 0.05
"""Rates and factors below it are alike."""
NEAR = 0.1
"""A factor that is no less than this part of a rate, nor more times as much, is a rate."""


def _two(facts: RunFacts) -> Iterator[Hit]:
    engine, scheduler = facts.engine, facts.scheduler
    if engine is not None and engine.scheduler and scheduler is not None and engine.scheduler != scheduler.name:
        what = (
            f"The engine ticks `{engine.scheduler}` in each step, and `{scheduler.name}` drives the same learning rate."
        )
        yield Hit("scheduler", what)


def _micro_batch(facts: RunFacts) -> Iterator[Hit]:
    engine = facts.engine
    for index, loader in enumerate(facts.loaders):
        size = loader.seen.batch_size
        if engine is not None and engine.micro_batch and size is not None and size != engine.micro_batch:
            what = f"It gives {size} samples, and train_micro_batch_size_per_gpu is {engine.micro_batch}."
            fix = f"Write batch_size={engine.micro_batch}, or train_micro_batch_size_per_gpu: {size}."
            yield Hit(f"loaders[{index}]", what, fix)


def _past(facts: RunFacts) -> Iterator[Hit]:
    if facts.engine is not None and facts.engine.past:
        name = facts.optimizers[0].name if facts.optimizers else "optimizer"
        what = f"`{name}` is called past the engine, and steps master weights without gradients: the model stays as is."
        yield Hit("optimizer", what)
    for index, optimizer in enumerate(facts.optimizers):
        if facts.engine is not None and not optimizer.engine and optimizer.held:
            what = f"`{optimizer.name}` steps {count(len(optimizer.held), 'parameter')} of the engine past the engine."
            yield Hit("optimizer" if len(facts.optimizers) == 1 else f"optimizer[{index}]", what)


def _accumulate(facts: RunFacts) -> Iterator[Hit]:
    engine, other = facts.engine, facts.accumulation
    if engine is not None and other is not None and other not in (1, engine.accumulation):
        what = f"accelerate counts {other} micro-batches per step, and the engine {engine.accumulation}."
        yield Hit("model", what, f"Write gradient_accumulation_steps: {other} in DeepSpeed's JSON as well.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.scheduler-elsewhere",
        summary="The scheduler drives the optimizer that steps.",
        check=_elsewhere,
        at=(Moment.APPLY, Moment.AUDIT, Moment.DRIFT),
        needs=(Need.OPTIMIZERS,),
        fix="Make the scheduler from the optimizer that is stepped, and prepare both in one call.",
        source=("pain 15",),
        milder="for one that was right at first, and whose optimizer another has replaced since",
    ),
    Rule(
        id="run.rate-squared",
        summary="The function of a LambdaLR gives factors, and no rates.",
        check=_squared,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Divide what it gives by the optimizer's lr, or make the optimizer with lr=1.0.",
        severity=Severity.WARNING,
        source=("torch LambdaLR",),
    ),
    Rule(
        id="run.scheduler-early",
        summary="The scheduler lasts for the steps that it was made for.",
        check=_early,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS, Need.LOADERS),
        fix="Make it for as many ticks as there are steps.",
        severity=Severity.WARNING,
        source=("pain 15",),
    ),
    Rule(
        id="run.ticked-early",
        summary="A scheduler is ticked after the steps of its optimizer.",
        check=_ticked,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call scheduler.step() behind optimizer.step(), once for each and for no micro-batch; after a restart "
        "load the state of both.",
        severity=Severity.WARNING,
        source=("torch LRScheduler.step",),
    ),
    Rule(
        id="run.two-schedulers",
        summary="One scheduler drives a learning rate.",
        check=_two,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Give it to deepspeed.initialize(lr_scheduler=...), and take `scheduler` out of the JSON.",
        source=("pain 15", "pain 3"),
    ),
    Rule(
        id="run.past-engine",
        summary="An engine's parameters are stepped by the engine.",
        check=_past,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call engine.backward(loss) and engine.step(), with the optimizer that deepspeed.initialize has returned.",
        source=("pain 2",),
    ),
    Rule(
        id="run.two-accumulate",
        summary="One count of micro-batches rules a step.",
        check=_accumulate,
        at=(Moment.AUDIT,),
        fix="Write one number in both places.",
        source=("pain 16",),
    ),
    Rule(
        id="run.micro-batch",
        summary="Loaders give micro-batches of the size that the engine counts with.",
        check=_micro_batch,
        at=(Moment.AUDIT,),
        needs=(Need.LOADERS,),
        fix="Write one size in both places.",
        severity=Severity.WARNING,
        source=("pain 4",),
    ),
)
"""Reporting order: who drives the rate, then who steps, then who counts."""
