"""A plan on one page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from prepkit import codec
from prepkit.config import BF16, FP8, FP16, FSDP2, AsStored, Clip, ClipNorm, ClipValue, Config, DeepSpeed, NoClip
from prepkit.facts import Env, Facts
from prepkit.findings import Finding
from prepkit.plan import Owners, Plan, Planned
from prepkit.render.layout import aligned, layout_lines
from prepkit.render.memory import memory_lines
from prepkit.render.names import count, in_bytes
from prepkit.render.steps import axes, effect
from prepkit.render.tree import tree_lines

DIGEST = 12
"""Characters shown of a digest."""


def plan_text(plan: Plan) -> str:
    """A plan on one page: what it is for, its steps with their reasons, what every rank will hold, what to mind."""
    sections = (
        tuple(_header(plan)),
        tuple(_steps(plan.steps)),
        tuple(layout_lines(plan)),
        tuple(tree_lines(plan)),
        tuple(memory_lines(plan)),
        tuple(_findings("warnings", plan.warnings)),
        tuple(_findings("overridden (accepted in config.overrides)", plan.overridden)),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _header(plan: Plan) -> Iterator[str]:
    made = plan.provenance
    yield f"{type(plan.config.engine).__name__} plan for {count(plan.world_size, 'rank')}"
    optimizer = _optimizer(plan)
    rows = (
        ("model", _model(plan.facts)),
        ("environment", _environment(plan.facts.env)),
        ("assumed", ", ".join(made.assumed) + " (declared, not seen)" if made.assumed else ""),
        ("mesh", axes(plan.mesh)),
        ("precision", _precision(plan.config)),
        ("optimizer", optimizer),
        *_owners(plan.owners),
        ("digest", f"{_digest(codec.plan_digest(plan))} (config {_digest(made.config)}, facts {_digest(made.facts)})"),
        ("made by", f"prepkit {made.prepkit}"),
    )
    yield from aligned(tuple(row for row in rows if row[1]), indent=2)


def _digest(digest: str) -> str:
    """The first hexadecimal digits, without the name of the algorithm."""
    return digest.rpartition(":")[2][:DIGEST]


def _model(facts: Facts) -> str:
    model = facts.model
    trained = sum(param.requires_grad for param in model.params)
    ties = f", {count(len(model.ties), 'tied group')}" if model.ties else ""
    name = model.classes[model.modules[0].cls].name
    params = f"{count(len(model.params), 'parameter')} ({trained:,} trained)"
    return f"{name}, {count(len(model.modules), 'module')}, {params}{ties}"


def _environment(env: Env) -> str:
    said = (
        env.device,
        f"{env.per_node} per node" if env.per_node else "",
        f"{in_bytes(env.memory)} each" if env.memory else "",
        f"torch {env.torch}" if env.torch else "",
    )
    return ", ".join(part for part in said if part)


def _precision(cfg: Config) -> str:
    match cfg.precision:
        case AsStored():
            return "computes as stored"
        case (
            BF16(reduce_dtype=reduce, output_dtype=output, master_weights=master)
            | FP16(reduce_dtype=reduce, output_dtype=output, master_weights=master)
            | FP8(reduce_dtype=reduce, output_dtype=output, master_weights=master)
        ):
            dtype = "float16" if isinstance(cfg.precision, FP16) else "bfloat16"
            stored = "trained parameters stored in float32" if master else "parameters stored as they are"
            if isinstance(cfg.engine, DeepSpeed):
                stored = f"parameters stored in {dtype}"
            reduced = f" reduces in {reduce}," if isinstance(cfg.engine, FSDP2 | DeepSpeed) else ""
            float8 = f"float8 ({type(cfg.precision.backend).__name__}) and " if isinstance(cfg.precision, FP8) else ""
            return f"computes in {float8}{dtype},{reduced} returns {output}, {stored}"
        case _:
            assert_never(cfg.precision)


def _optimizer(plan: Plan) -> str:
    seen = plan.facts.optimizer
    if seen is not None:
        slots = sum(len(group.slots) for group in seen.groups)
        return f"{seen.name}, {count(slots, 'parameter')} in {count(len(seen.groups), 'group')}"
    spec = plan.config.optimizer
    return f"{type(spec).__name__}, created after the model is prepared" if spec is not None else "none"


def _owners(owners: Owners) -> tuple[tuple[str, str], ...]:
    ticks = f", {count(owners.scheduler_ticks, 'tick')} per step"
    return (
        ("accumulation", f"{owners.accumulation}, {count(owners.accumulation_steps, 'micro-batch')} per step"),
        ("clipping", f"{owners.clipping}{_clip(owners.clip)}"),
        ("scheduler", owners.scheduler + (ticks if owners.scheduler != "nobody" else "")),
        ("master weights", owners.master_weights),
        ("loss scaling", owners.loss_scaling if owners.loss_scaling != "nobody" else ""),
    )


def _clip(clip: Clip) -> str:
    match clip:
        case NoClip():
            return ""
        case ClipNorm(max_norm=most, norm_type=kind):
            return f", joint {kind:g}-norm at most {most:g}"
        case ClipValue(max_value=most):
            return f", every element at most {most:g} in size"
        case _:
            assert_never(clip)


def _steps(steps: tuple[Planned, ...]) -> Iterator[str]:
    yield "steps" if steps else "steps: none"
    digits = len(str(len(steps)))
    width = max((len(type(planned.step).__name__) for planned in steps), default=0)
    for number, planned in enumerate(steps, start=1):
        kind = type(planned.step).__name__.ljust(width)
        rows = f"  [{', '.join(planned.rows)}]" if planned.rows else ""
        yield f"  {number:>{digits}}  {kind}  {effect(planned.step)}"
        yield f"  {'':{digits}}  {'':{width}}  because {planned.reason}{rows}"


def _findings(title: str, findings: tuple[Finding, ...]) -> Iterator[str]:
    if findings:
        yield f"{title}: {len(findings)}"
        for finding in findings:
            yield from (f"  {line}" for line in str(finding).splitlines())
