"""Numbers that have to lie in a range whatever the model is."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, isfinite, isnan
from typing import assert_never

from attrs import asdict, evolve

from prepkit.config import SGD, ClipNorm, ClipValue, Config, NoClip, OptimizerSpec
from prepkit.config.optimizer import OPTIMIZERS
from prepkit.facts import Facts
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


def _accumulation(resolved: Resolved) -> Iterator[Hit]:
    if resolved.cfg.accumulation < 1:
        yield Hit("config.accumulation", f"{resolved.cfg.accumulation} micro-batches make no optimizer step.")


def _clip(resolved: Resolved) -> Iterator[Hit]:
    match resolved.cfg.clip:
        case ClipNorm(max_norm=limit):
            where = "config.clip.max_norm"
        case ClipValue(max_value=limit):
            where = "config.clip.max_value"
        case NoClip():
            return
        case _:
            assert_never(resolved.cfg.clip)
    if not limit > 0:
        yield Hit(where, f"A limit of {limit} would make every gradient 0 or turn it round.")


def _norm_type(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if isinstance(cfg.clip, ClipNorm) and not cfg.clip.norm_type > 0:
        yield Hit("config.clip.norm_type", f"There is no {cfg.clip.norm_type}-norm.")


def _ticks(resolved: Resolved) -> Iterator[Hit]:
    if resolved.cfg.scheduler_ticks < 0:
        yield Hit("config.scheduler_ticks", f"{resolved.cfg.scheduler_ticks}: a scheduler cannot step backwards.")


def _timeout(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if not (cfg.timeout_s > 0 and isfinite(cfg.timeout_s)):
        yield Hit("config.timeout_s", f"{cfg.timeout_s} seconds is no time to wait for the other ranks.")


def _ranges(spec: OptimizerSpec) -> Iterator[tuple[str, float, float]]:
    """Field of the spec, its value, and the bound that it stays below; one for each number of a pair."""
    below_one = OPTIMIZERS[type(spec)].below_one
    for name, value in asdict(spec).items():
        bound = 1 if name in below_one else inf
        if isinstance(value, tuple):
            yield from ((f"{name}[{index}]", number, bound) for index, number in enumerate(value))
        elif not isinstance(value, bool):
            yield name, value, bound


def _optimizer(resolved: Resolved) -> Iterator[Hit]:
    spec = resolved.cfg.optimizer
    for name, value, bound in () if spec is None else _ranges(spec):
        if isnan(value) or not 0 <= value < bound:
            upper = f" and below {bound:g}" if isfinite(bound) else " and finite"
            yield Hit(f"config.optimizer.{name}", f"{name}={value:g} has to be at least 0{upper}.")


def _nesterov(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if isinstance(cfg.optimizer, SGD) and cfg.optimizer.nesterov and not cfg.optimizer.momentum > 0:
        yield Hit("config.optimizer.nesterov", f"nesterov=True with momentum={cfg.optimizer.momentum:g}.")


def _once(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, accumulation=1)


def _no_clip(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, clip=NoClip())


def _two_norm(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, clip=evolve(cfg.clip, norm_type=2.0)) if isinstance(cfg.clip, ClipNorm) else cfg


def _one_tick(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, scheduler_ticks=1)


def _ten_minutes(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, timeout_s=600.0)


def _plain_momentum(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, optimizer=evolve(cfg.optimizer, nesterov=False)) if isinstance(cfg.optimizer, SGD) else cfg


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
        id="values.clip",
        summary="Gradients are clipped to a limit above 0.",
        check=_clip,
        fix="Write a limit above 0, such as ClipNorm(1.0), or NoClip().",
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
