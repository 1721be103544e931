"""A plan in words, from its own fields alone: what it is for, its steps with their reasons, its warnings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from prepkit.config import FP8, FSDP2, Clip, ClipNorm, ClipValue, Config, DeepSpeed, Mixed
from prepkit.config.optimizer import specs
from prepkit.config.precision import PRECISIONS
from prepkit.facts import Env, Facts
from prepkit.findings import Finding
from prepkit.findings.text import aligned, count, in_bytes
from prepkit.plan.parts import Owners, Planned
from prepkit.plan.step_text import axes, effect
from prepkit.steps import Axis


def title(cfg: Config, facts: Facts) -> str:
    """First line of a plan's text: which engine, for how many ranks."""
    return f"{type(cfg.engine).__name__} plan for {count(facts.env.world_size, 'rank')}"


def about(
    cfg: Config, facts: Facts, mesh: tuple[Axis, ...], owners: Owners, assumed: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Label and text of all that a plan is for and leads to; an empty text has nothing to say."""
    return (
        ("model", _model(facts)),
        ("environment", _environment(facts.env)),
        ("assumed", ", ".join(assumed) + " (declared, not seen)" if assumed else ""),
        ("mesh", axes(mesh)),
        ("precision", _precision(cfg)),
        ("optimizer", _optimizer(cfg, facts)),
        *_owners(owners),
    )


def about_lines(rows: tuple[tuple[str, str], ...]) -> Iterator[str]:
    """The rows that have something to say, in two columns."""
    yield from aligned(tuple(row for row in rows if row[1]), indent=2)


def _model(facts: Facts) -> str:
    model = facts.model
    trained = sum(param.requires_grad for param in model.params)
    ties = f", {count(len(model.ties), 'tied group')}" if model.ties else ""
    name = model.classes[model.modules[0].cls].name
    params = f"{count(len(model.params), 'parameter')} ({trained:,} trained)"
    return f"{name}, {count(len(model.modules), 'module')}, {params}{ties}"


def _environment(env: Env) -> str:
    parts = (
        env.device,
        f"{env.per_node} per node" if env.per_node else "",
        f"{in_bytes(env.memory)} each" if env.memory else "",
        f"torch {env.torch}" if env.torch else "",
    )
    return ", ".join(part for part in parts if part)


def _precision(cfg: Config) -> str:
    precision = cfg.precision
    if not isinstance(precision, Mixed):
        return "computes as stored"
    dtype = PRECISIONS[type(precision)].compute_dtype
    stored = "trained parameters stored in float32" if precision.master_weights else "parameters stored as they are"
    if isinstance(cfg.engine, DeepSpeed):
        stored = f"parameters stored in {dtype}"
    reduced = f" reduces in {precision.reduce_dtype}," if isinstance(cfg.engine, FSDP2 | DeepSpeed) else ""
    float8 = f"float8 ({type(precision.backend).__name__}) and " if isinstance(precision, FP8) else ""
    return f"computes in {float8}{dtype},{reduced} returns {precision.output_dtype}, {stored}"


def _optimizer(cfg: Config, facts: Facts) -> str:
    optimizer = facts.optimizer
    if optimizer is not None:
        slots = sum(len(group.slots) for group in optimizer.groups)
        return f"{optimizer.name}, {count(slots, 'parameter')} in {count(len(optimizer.groups), 'group')}"
    asked = " and ".join(type(spec).__name__ for spec in specs(cfg.optimizer))
    return f"{asked}, created after the model is prepared" if asked else "none"


def _owners(owners: Owners) -> tuple[tuple[str, str], ...]:
    ticks = f", {count(owners.scheduler_ticks, 'tick')} per step"
    return (
        ("accumulation", f"{owners.accumulation}, {count(owners.accumulation_steps, 'micro-batch')} per step"),
        ("global batch", f"{count(owners.global_batch, 'sample')} per step" if owners.global_batch else ""),
        ("clipping", f"{owners.clipping}{_clip(owners.clip)}"),
        ("scheduler", owners.scheduler + (ticks if owners.scheduler != "nobody" else "")),
        ("master weights", owners.master_weights),
        ("loss scaling", owners.loss_scaling if owners.loss_scaling != "nobody" else ""),
    )


def _clip(clip: Clip) -> str:
    match clip:
        case None:
            return ""
        case ClipNorm(max_norm=most, norm_type=kind):
            return f", joint {kind:g}-norm at most {most:g}"
        case ClipValue(max_value=most):
            return f", every element at most {most:g} in size"
        case _:
            assert_never(clip)


def step_lines(steps: tuple[Planned, ...], *, sources: bool = False) -> Iterator[str]:
    """Number every step, with what it does and its reason.

    ``sources`` adds the ids of the behaviour reference (``docs/reference/behaviour.md``) that a step answers.
    """
    yield "steps" if steps else "steps: none"
    digits = len(str(len(steps)))
    width = max((len(type(planned.step).__name__) for planned in steps), default=0)
    for number, planned in enumerate(steps, start=1):
        kind = type(planned.step).__name__.ljust(width)
        rows = f"  [{', '.join(planned.behaviour_ids)}]" if sources and planned.behaviour_ids else ""
        yield f"  {number:>{digits}}  {kind}  {effect(planned.step)}"
        yield f"  {'':{digits}}  {'':{width}}  because {planned.reason}{rows}"


def origin_lines(cfg: Config) -> Iterator[str]:
    """Each imported setting, and the key and line that it was read from; nothing for a config of prepkit's own."""
    if cfg.origins:
        yield "imported settings"
        yield from aligned(tuple((origin.setting, str(origin)) for origin in cfg.origins), indent=2)


def finding_lines(title: str, findings: tuple[Finding, ...]) -> Iterator[str]:
    """The findings under a title that counts them; nothing where there are none."""
    if findings:
        yield f"{title}: {len(findings)}"
        for finding in findings:
            yield from (f"  {line}" for line in str(finding).splitlines())
