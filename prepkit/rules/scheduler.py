"""The learning-rate scheduler against the steps that are planned, and what it wants to know at each of them."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import Config, ShardLoaders
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.findings.text import count
from prepkit.resolve import loaders
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


def _planned(resolved: Resolved) -> tuple[str, int, int] | None:
    """Name of the scheduler, ticks that it is made for, and ticks that are planned; None where one is not known."""
    cfg, scheduler = resolved.cfg, resolved.facts.scheduler
    ticks = 1 if cfg.scheduler_ticks < 0 else cfg.scheduler_ticks  # values.scheduler-ticks says so
    if cfg.total_steps is None or cfg.total_steps < 1 or not ticks:
        return None
    if scheduler is not None and scheduler.horizon is not None:
        return scheduler.name, scheduler.horizon, cfg.total_steps * ticks
    if scheduler is None and (made := _of_section(resolved)) is not None:
        return "the schedule of config.engine", made, cfg.total_steps
    return None


def _of_section(resolved: Resolved) -> int | None:
    """Optimizer steps that DeepSpeed's own scheduler is made for; ``WarmupLR`` is made for none."""
    if not resolved.engine_traits.own_layout:
        return None
    said = {setting.path: setting.value for setting in resolved.deepspeed.settings}
    value = said.get(("scheduler", "params", "total_num_steps"), "")
    return int(value) if value.isdigit() else None


def _told(resolved: Resolved, name: str, made: int, ticks: int) -> str:
    cfg = resolved.cfg
    said = name if " " in name else f"`{name}`"
    per = f" of {count(cfg.scheduler_ticks, 'tick')}" if ticks != cfg.total_steps else ""
    return f"{said} is made for {count(made, 'tick')}, and {cfg.total_steps} optimizer steps{per} are planned"


def _runs_out(resolved: Resolved) -> Iterator[Hit]:
    found = _planned(resolved)
    if found is None:
        return
    name, made, ticks = found
    raises = name == "OneCycleLR"
    if made < ticks - (0 if raises else max(1, ticks // 100)):
        last = made // (ticks // (resolved.cfg.total_steps or 1))
        then = "it raises ValueError" if raises else "the rate is at its end, or begins anew"
        fix = f"Make it for {ticks} ticks, or write total_steps={last}."
        yield Hit("scheduler", f"{_told(resolved, name, made, ticks)}: after step {last} {then}.", fix)


def _never_ends(resolved: Resolved) -> Iterator[Hit]:
    found = _planned(resolved)
    if found is None:
        return
    name, made, ticks = found
    if made > ticks + max(1, ticks // 100):
        fix = f"Make it for {ticks} ticks, or write the total_steps that you mean."
        yield Hit("scheduler", f"{_told(resolved, name, made, ticks)}: it stops at {ticks / made:.0%} of its way.", fix)


def _undivided(resolved: Resolved) -> Iterator[Hit]:
    """Silent where loaders are divided as accelerate does, whose scripts count by the loader that they gave."""
    cfg, scheduler = resolved.cfg, resolved.facts.scheduler
    if scheduler is None or not scheduler.horizon or cfg.total_steps is not None or cfg.scheduler_ticks != 1:
        return
    choices = ((loaders.choice(cfg, index), index) for index in range(len(resolved.facts.loaders)))
    how, index = next((one for one in choices if one[0].purpose == "training"), (None, 0))
    if not isinstance(how, ShardLoaders) or how.whole_batches:
        return
    loader, made = resolved.facts.loaders[index], scheduler.horizon
    given, parts = loaders.batches(loader), resolved.data_parallel_size
    here, window = loaders.rounds(how, loader, parts), max(1, resolved.accumulation)
    if not given or not here or made % given or made // given > given:  # a round number divides by many
        return
    steps = -(-here // window) if how.ends_window else here // window
    if 0 < steps < given:
        passes = made // given
        over = [count(parts, "rank")] * (parts > 1) + [f"accumulation={window}"] * (window > 1)
        of_loader = f"{count(passes, 'pass')} of the {given} batches of loaders[{index}]"
        what = (
            f"`{scheduler.name}` is made for {count(made, 'tick')}, {of_loader} as it was given. "
            f"With {' and '.join(over)} a pass has {count(steps, 'step')}: after {passes * steps} it is not at its end."
        )
        fix = f"Make it for {passes * steps} ticks; or write Config(total_steps={made}), where so many steps are meant."
        yield Hit("scheduler", what, fix)


def _metric(resolved: Resolved) -> Iterator[Hit]:
    scheduler = resolved.facts.scheduler
    if scheduler is not None and scheduler.needs_metric and resolved.cfg.scheduler_ticks:
        ticks = count(resolved.cfg.scheduler_ticks, "time")
        what = f"`{scheduler.name}` steps on a metric, and ready.step() would step it {ticks} without one."
        yield Hit("config.scheduler_ticks", what)


def _no_ticks(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, scheduler_ticks=0)


RULES: tuple[Rule, ...] = (
    Rule(
        id="scheduler.metric",
        summary="A scheduler that steps on a metric is stepped by the user.",
        check=_metric,
        fix="Write scheduler_ticks=0, and call ready.scheduler.step(metric) with a metric that is equal on every rank.",
        overridable=False,
        source=("torch.optim.lr_scheduler.ReduceLROnPlateau.step",),
        repair=_no_ticks,
    ),
    Rule(
        id="scheduler.runs-out",
        summary="The scheduler lasts for the steps that are planned.",
        check=_runs_out,
        fix="Make it for as many ticks as there are steps.",
        source=("pain 15", "W-16"),
    ),
    Rule(
        id="scheduler.never-ends",
        summary="The scheduler comes to its end within the steps that are planned.",
        check=_never_ends,
        fix="Make it for as many ticks as there are steps.",
        severity=Severity.WARNING,
        source=("pain 15",),
    ),
    Rule(
        id="scheduler.undivided",
        summary="The scheduler is made for steps, and not for the batches of a loader before it is divided.",
        check=_undivided,
        fix="Make it for as many ticks as there are steps, or write Config(total_steps=...).",
        severity=Severity.NOTE,
        source=("pain 15",),
    ),
)
"""Reporting order: what would raise, then what would train otherwise."""
