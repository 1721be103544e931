"""Numbers that have to lie in a range whatever the model is."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isfinite, isinf, isnan
from typing import assert_never

from attrs import evolve

from prepkit.config import SGD, ClipNorm, ClipValue, Config
from prepkit.config.optimizer import OPTIMIZERS, Group, OptimizerSpec, OptimizerTraits, options, specs
from prepkit.facts import Facts
from prepkit.findings.text import count
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


def _accumulation(resolved: Resolved) -> Iterator[Hit]:
    asked = resolved.cfg.accumulation
    if asked is not None and asked < 1:
        yield Hit("config.accumulation", f"{asked} micro-batches make no optimizer step.")


def _global_batch(resolved: Resolved) -> Iterator[Hit]:
    asked = resolved.cfg.global_batch
    if asked is not None and asked < 1:
        yield Hit("config.global_batch", f"{count(asked, 'sample')} make no optimizer step.")


def _average_each(resolved: Resolved) -> Iterator[Hit]:
    stage = resolved.zero_stage
    if resolved.cfg.average_each and stage is not None and stage < 2:
        yield Hit("config.average_each", f"DeepSpeed averages at the end of a window at ZeRO stage {stage}.")
    if resolved.cfg.average_each and resolved.engine_traits.device == "xla" and resolved.facts.env.world_size > 1:
        what = (
            "XLA() averages whole gradients once, before the optimizer steps; in each micro-batch would save nothing."
        )
        yield Hit("config.average_each", what, "Write average_each=False.")


def _in_the_last(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, average_each=False)


def _clip(resolved: Resolved) -> Iterator[Hit]:
    match resolved.cfg.clip:
        case ClipNorm(max_norm=limit):
            where = "config.clip.max_norm"
        case ClipValue(max_value=limit):
            where = "config.clip.max_value"
        case None:
            return
        case _:
            assert_never(resolved.cfg.clip)
    if not limit > 0:
        yield Hit(where, f"A limit of {limit} would make every gradient 0 or turn it round.")
    elif isinf(limit):
        fix = "Leave clip out; or write a limit that is never reached, such as ClipNorm(1e9), for the norm alone."
        yield Hit(where, "A limit of inf clips nothing, and no file of a plan can say it.", fix)


def _norm_type(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if isinstance(cfg.clip, ClipNorm) and not cfg.clip.norm_type > 0:
        yield Hit("config.clip.norm_type", f"There is no {cfg.clip.norm_type}-norm.")


def _ticks(resolved: Resolved) -> Iterator[Hit]:
    if resolved.cfg.scheduler_ticks < 0:
        yield Hit("config.scheduler_ticks", f"{resolved.cfg.scheduler_ticks}: a scheduler cannot step backwards.")


def _total(resolved: Resolved) -> Iterator[Hit]:
    total = resolved.cfg.total_steps
    if total is not None and total < 1:
        yield Hit("config.total_steps", f"{total} optimizer steps are no training.")


def _timeout(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if not (cfg.timeout_s > 0 and isfinite(cfg.timeout_s)):
        yield Hit("config.timeout_s", f"{cfg.timeout_s} seconds is no time to wait for the other ranks.")


Bounds = tuple[float, float, str]
"""Least, first that is too much, and the two in words."""


def _ranges(of: OptimizerSpec | Group, traits: OptimizerTraits) -> Iterator[tuple[str, float, Bounds]]:
    """Field, value and range; one for each number of a pair."""
    for name, value in options(of).items():
        known = (
            (0.0, 1.0, "at least 0 and below 1") if name in traits.below_one else (0.0, inf, "at least 0 and finite")
        )
        known = (-inf, 5e-324, "at most 0 and finite") if name in traits.up_to_zero else known
        known = (1.0, inf, "at least 1 and finite") if name in traits.from_one else known
        if isinstance(value, tuple):
            yield from ((f"{name}[{index}]", number, known) for index, number in enumerate(value))
        elif not isinstance(value, bool | str):
            yield name, value, known


def _optimizer(resolved: Resolved) -> Iterator[Hit]:
    for made in resolved.created_optimizers:
        traits = OPTIMIZERS[type(made.spec)]
        places = ((made.where, made.spec), *((f"{made.where}.groups[{i}]", g) for i, g in enumerate(made.spec.groups)))
        for where, of in places:
            for name, value, (least, below, words) in _ranges(of, traits):
                if isnan(value) or isinf(value) or not least <= value < below:
                    yield Hit(f"{where}.{name}", f"{name}={value:g} has to be {words}.")


def _nesterov(resolved: Resolved) -> Iterator[Hit]:
    for made in resolved.created_optimizers:
        spec = made.spec
        if isinstance(spec, SGD) and spec.nesterov and not spec.momentum > 0:
            yield Hit(f"{made.where}.nesterov", f"nesterov=True with momentum={spec.momentum:g}.")


def _once(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, accumulation=1, global_batch=None)  # which of the two was meant nobody can tell


def _no_global_batch(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, global_batch=None)


def _no_clip(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, clip=None)


def _two_norm(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, clip=evolve(cfg.clip, norm_type=2.0)) if isinstance(cfg.clip, ClipNorm) else cfg


def _one_tick(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, scheduler_ticks=1)


def _no_total(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, total_steps=None)


def _ten_minutes(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, timeout_s=600.0)


def _plain_momentum(cfg: Config, _: Facts) -> Config:
    asked = tuple(evolve(s, nesterov=False) if isinstance(s, SGD) else s for s in specs(cfg.optimizer))
    return evolve(cfg, optimizer=asked if isinstance(cfg.optimizer, tuple) else asked[0])


RULES: tuple[Rule, ...] = (
    Rule(
        id="values.accumulation",
        summary="An optimizer step takes at least one micro-batch.",
        check=_accumulation,
        fix="Write accumulation=1 or more.",
        source=("pain 16", "ST-49"),
        repair=_once,
    ),
    Rule(
        id="values.global-batch",
        summary="An optimizer step takes at least one sample.",
        check=_global_batch,
        fix="Write global_batch=1 or more, or leave it out.",
        source=("pain 4",),
        repair=_no_global_batch,
    ),
    Rule(
        id="values.average-each",
        summary="Averaging in every micro-batch is asked of an engine that can.",
        check=_average_each,
        fix="Write stage=2 or 3, which average in every micro-batch, or average_each=False.",
        source=("W-31", "K-H9"),
        repair=_in_the_last,
    ),
    Rule(
        id="values.clip",
        summary="Gradients are clipped to a limit above 0.",
        check=_clip,
        fix="Write a limit above 0, such as ClipNorm(1.0), or clip=None.",
        source=("pain 27",),
        repair=_no_clip,
    ),
    Rule(
        id="values.norm-type",
        summary="The p of a p-norm is above 0.",
        check=_norm_type,
        fix='Write norm_type=2.0, or float("inf") for the largest element.',
        source=("pain 27",),
        repair=_two_norm,
    ),
    Rule(
        id="values.scheduler-ticks",
        summary="The scheduler steps forwards.",
        check=_ticks,
        fix="Write scheduler_ticks=1, or 0 if you step the scheduler yourself.",
        source=("pain 15", "W-16"),
        repair=_one_tick,
    ),
    Rule(
        id="values.total-steps",
        summary="At least one optimizer step is planned.",
        check=_total,
        fix="Write total_steps=1 or more, or leave it out.",
        source=("pain 15",),
        repair=_no_total,
    ),
    Rule(
        id="values.timeout",
        summary="Collectives wait for a finite time above 0.",
        check=_timeout,
        fix="Write a number of seconds, such as timeout_s=600.0.",
        source=("pain 11",),
        repair=_ten_minutes,
    ),
    Rule(
        id="values.optimizer",
        summary="The numbers of the optimizer lie where torch takes them.",
        check=_optimizer,
        fix="Write a number in that range.",
        source=("torch.optim.AdamW", "torch.optim.SGD"),
    ),
    Rule(
        id="values.nesterov",
        summary="Nesterov momentum comes with momentum.",
        check=_nesterov,
        fix="Write momentum=0.9, or nesterov=False.",
        source=("torch.optim.SGD",),
        repair=_plain_momentum,
    ),
)
"""Reporting order: that of the config's fields."""
