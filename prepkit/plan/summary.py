"""A plan in words, from its own fields alone: what it is for, its steps with their reasons, its warnings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, assert_never

from attrs import frozen

from prepkit.config import FP8, FSDP2, Clip, ClipNorm, ClipValue, Config, DeepSpeed, Intent, Mixed
from prepkit.config.optimizer import specs
from prepkit.config.precision import PRECISIONS
from prepkit.facts import Env, Facts
from prepkit.findings import Finding
from prepkit.findings.text import aligned, count, in_bytes
from prepkit.plan.step_text import axes, effect
from prepkit.steps import Axis, Step


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


# --- steps -----------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Planned:
    """A step of a plan, and the reason for it."""

    step: Step
    reason: str
    """One clause, read after the step; never read by the interpreter."""
    behaviour_ids: tuple[str, ...] = ()
    """Ids of the behaviour reference that the step answers, such as ``DDP-5``."""


def because(step: Step, reason: str, *behaviour_ids: str) -> tuple[Planned, ...]:
    """A piece of a plan: one step with its reason and its behaviour ids. Pieces add as tuples do."""
    return (Planned(step=step, reason=reason, behaviour_ids=behaviour_ids),)


# --- duties between two steps ----------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Owners:
    """``prepkit``, ``DeepSpeed`` or ``nobody`` for each duty; the same fields for every engine, so plans compare."""

    accumulation: str
    """Who counts micro-batches, and so decides which one ends with an optimizer step."""
    accumulation_steps: int
    """Micro-batches per optimizer step."""
    clipping: str
    """Who clips gradients just before the optimizer steps."""
    clip: Clip
    """How they are clipped."""
    scheduler: str
    """Who steps the learning-rate scheduler."""
    scheduler_ticks: int
    """Scheduler steps per optimizer step."""
    master_weights: str
    """Where the float32 copy of low-precision trainable parameters lives, or why there is none."""
    loss_scaling: str = "nobody"
    """Who scales the loss, unscales the gradients and skips steps that overflowed."""
    global_batch: int | None = None
    """Samples per optimizer step over all data ranks; None: nobody says how many a rank reads at once."""


Collectives = Literal["none", "torch", "xla"]
"""``torch``: ``torch.distributed`` does them; ``xla``: torch_xla, and torch has no group; ``none``: one rank."""


# --- the run ----------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class RunSettings:
    """Settings of a run, and its engine's ways with parameters and gradients; every engine has the same fields."""

    # --- asked for -------------------------------------------------------------------------------------------------

    intent: Intent
    """Purpose of the prepared model: training or inference."""
    timeout_s: float
    """Time-out of every collective, in seconds."""
    accepted: tuple[str, ...]
    """Ids of rules whose errors are accepted."""
    average_each: bool
    """prepkit averages gradients after every micro-batch, not only after the last of a window."""
    divides_loaders: bool
    """Loaders are divided over the data ranks, those included that are made later."""
    global_batch: int | None
    """Samples per optimizer step that were asked for; None: the number follows from micro-batches and ranks."""
    total_steps: int | None
    """Optimizer steps of the whole run; None: not known."""

    # --- the engine's ways -----------------------------------------------------------------------------------------

    engine: str
    """Name of the engine, for messages and checkpoints; nothing branches on it."""
    precision: str
    """Name of the precision, for messages."""
    collectives: Collectives
    """Library whose collectives the ranks use."""
    engine_steps: bool
    """The engine itself runs backward, clipping and the optimizer; ``loss.backward()`` alone is not enough."""
    shards_params: bool
    """A rank holds parts of parameters, and gathers them for a forward."""
    shows_gradients: bool
    """Gradients are in ``.grad`` between the micro-batches of a window."""
    averages_known_params: bool
    """Only parameters that were trained at apply are averaged over ranks, as DDP's buckets are filled then."""
    follows_new_params: bool
    """A parameter that enters the model after apply is trained as soon as an optimizer has it."""
    follows_unfrozen: bool
    """A parameter that is unfrozen after apply is trained as soon as an optimizer has it."""
    steps_frozen: bool
    """A parameter that is frozen after apply is still trained, as part of a flat parameter."""
    master_weights_in_place: bool
    """Trained parameters are float32, and thereby their own master weights, while the forward computes in less."""
