"""Config and facts to a plan, or to every reason against one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attrs import evolve
from returns.result import Failure, Result, Success

from prepkit.codec import digest
from prepkit.config import (
    DDP,
    FP8,
    FSDP1,
    FSDP2,
    MSAMP,
    XLA,
    Config,
    DeepSpeed,
    Mixed,
    ShardLoaders,
    Single,
    TensorParallel,
)
from prepkit.config.precision import PRECISIONS
from prepkit.facts import Facts
from prepkit.findings import Finding, errors
from prepkit.plan import Owners, Plan, Provenance, RunSettings
from prepkit.plan.layout import ParamLayout
from prepkit.plan.summary import Collectives
from prepkit.planner import budget
from prepkit.planner.deepspeed import plan_deepspeed
from prepkit.planner.fsdp1 import plan_fsdp1
from prepkit.planner.fsdp2 import plan_fsdp2, plan_tensor_parallel
from prepkit.planner.pieces import Piece
from prepkit.planner.replicated import plan_ddp, plan_single, plan_xla
from prepkit.resolve.resolved import Resolved
from prepkit.rules import RULES, findings_of, found, split
from prepkit.rules.rule import Rule
from prepkit.version import VERSION

PLANNERS: dict[type, Callable[[Resolved], Piece]] = {
    Single: plan_single,
    DDP: plan_ddp,
    FSDP2: plan_fsdp2,
    FSDP1: plan_fsdp1,
    TensorParallel: plan_tensor_parallel,
    XLA: plan_xla,
    DeepSpeed: plan_deepspeed,
}
"""Engine to the function that gives its steps."""


def plan(cfg: Config, facts: Facts, rules: tuple[Rule, ...] = RULES) -> Result[Plan, tuple[Finding, ...]]:
    """The plan, or every finding when one of them is an error that is not overridden.

    Pure: equal inputs give equal plans, byte for byte.
    """
    return _drafted(cfg, facts, rules).bind(lambda drafted: _within_budget(drafted, rules))


def fits(plan: Plan, memory: int, activations: int | None = None) -> budget.Fit:
    """Return whether what a rank of the plan holds fits into a device's memory, and which changes would make it fit."""
    return budget.fits(plan, memory, lambda cfg: _drafted(cfg, plan.facts, RULES), activations)


def costs(plan: Plan) -> budget.Costs | None:
    """Memory and traffic of the plan, and its dearest settings; None where they are not predicted."""
    return budget.costs(plan, lambda cfg: _drafted(cfg, plan.facts, RULES))


def over_budget(cfg: Config, facts: Facts, rules: tuple[Rule, ...] = RULES) -> tuple[Finding, ...]:
    """Return what the rules about memory say, also where the config accepts it; nothing where there is no plan."""
    again = partial(_drafted, facts=facts, rules=rules)
    return again(cfg).map(lambda drafted: budget.findings(drafted, again)).value_or(())


def since(plan: Plan, now: Facts) -> tuple[Finding, ...]:
    """What the rules say of today's facts, and did not say of those that the plan was made from; see its module."""
    return todays_findings(plan, now, partial(_drafted, facts=now, rules=RULES))


def _within_budget(drafted: Plan, rules: tuple[Rule, ...]) -> Result[Plan, tuple[Finding, ...]]:
    """The plan with what the rules about memory say of it, or a refusal: bytes are known once there is a plan."""
    findings = budget.findings(drafted, lambda cfg: _drafted(cfg, drafted.facts, rules))
    standing, overridden = split(drafted.config, findings, rules)
    if errors(standing):
        return Failure((*drafted.warnings, *standing))
    warnings, accepted = (*drafted.warnings, *standing), (*drafted.overridden, *overridden)
    return Success(evolve(drafted, warnings=warnings, overridden=accepted) if findings else drafted)


def _drafted(cfg: Config, facts: Facts, rules: tuple[Rule, ...]) -> Result[Plan, tuple[Finding, ...]]:
    """The plan before anybody asked whether it fits."""
    resolved = Resolved(cfg=cfg, facts=facts)
    standing, overridden = split(cfg, findings_of(resolved, rules), rules)
    if errors(standing):
        return Failure(standing)
    return Success(
        Plan(
            config=cfg,
            facts=facts,
            mesh=resolved.planned_mesh,
            steps=PLANNERS[type(cfg.engine)](resolved),
            layout=resolved.layout,
            owners=owners(resolved),
            run=run_settings(resolved),
            provenance=Provenance(prepkit=VERSION, config=digest(cfg), facts=digest(facts), assumed=facts.env.assumed),
            warnings=standing,
            overridden=overridden,
        )
    )


# --- findings of today -----------------------------------------------------------------------------------------------


def todays_findings(plan: Plan, now: Facts, again: budget.Again) -> tuple[Finding, ...]:
    """Errors that the config does not override, and warnings, that are new since the plan was made.

    What the rules said of the plan's own facts was known then: refused, overridden or told. That includes rules that
    the plan was made without. ``again`` drafts other plans for today's facts, as in ``budget.findings``.
    """
    today = evolve(now, checkpoint=plan.facts.checkpoint)  # the files are read once, when the plan is made
    if today == plan.facts:
        return ()
    resolved = Resolved(cfg=plan.config, facts=today)
    standing, _ = split(plan.config, findings_of(resolved))
    new = _new(standing, lambda: findings_of(Resolved(cfg=plan.config, facts=plan.facts)))
    return (*new, *_mesh(plan, resolved), *_memory(plan, today, again))


def _new(standing: tuple[Finding, ...], before: Callable[[], tuple[Finding, ...]]) -> tuple[Finding, ...]:
    if not standing:
        return ()
    known = {(finding.rule, finding.where) for finding in before()}
    return tuple(finding for finding in standing if (finding.rule, finding.where) not in known)


def _mesh(plan: Plan, today: Resolved) -> tuple[Finding, ...]:
    """A mesh that was laid out by the size of a node is another one where nodes have another size."""
    planned, now = plan.facts.env.per_node, today.facts.env.per_node
    if today.mesh is None or now is None or today.mesh == plan.mesh:
        return ()
    planned_sizes, sizes = (" x ".join(f"{axis.name} {axis.size}" for axis in mesh) for mesh in (plan.mesh, today.mesh))
    what = f"planned {planned or 'unknown'}, which gave the mesh {planned_sizes}; now {now}, which gives {sizes}"
    fix = (
        "start as many processes on each node as planned, write the mesh into the config, or plan again for this launch"
    )
    return (found("plan.other-environment", "env.per_node", what, fix),)


def _memory(plan: Plan, today: Facts, again: budget.Again) -> tuple[Finding, ...]:
    planned, now = plan.facts.env, today.env
    if not (_shrank(planned.memory, now.memory) or _shrank(planned.host_memory, now.host_memory)):
        return ()
    standing, _ = split(plan.config, budget.findings(evolve(plan, facts=today), again))
    return _new(standing, lambda: (*plan.warnings, *plan.overridden))


def _shrank(planned: int | None, now: int | None) -> bool:
    """Return whether there are fewer bytes than planned, or bytes are known only now."""
    return now is not None and (planned is None or now < planned)


# --- duties and settings of the run ----------------------------------------------------------------------------------


def owners(resolved: Resolved) -> Owners:
    """Prepkit owns all of it for the engines of torch itself; DeepSpeed does its own."""
    cfg, facts = resolved.cfg, resolved.facts
    zero = resolved.engine_traits.engine_steps
    owner = "DeepSpeed" if zero else "prepkit"
    ticks = "prepkit" if facts.scheduler is not None else "nobody"
    if zero and resolved.deepspeed.scheduler != "outside":
        ticks = "DeepSpeed"
    scales = PRECISIONS[type(cfg.precision)].scales_loss and resolved.trains
    return Owners(
        accumulation=owner,
        accumulation_steps=resolved.accumulation,
        global_batch=resolved.samples_per_step,
        clipping="nobody" if cfg.clip is None else owner,
        clip=cfg.clip,
        scheduler=ticks,
        scheduler_ticks=cfg.scheduler_ticks,
        master_weights=_master_weights(resolved),
        loss_scaling=owner if scales else "nobody",
    )


def run_settings(resolved: Resolved) -> RunSettings:
    """Settings of the run: those of the config, and the traits of its engine."""
    cfg, row = resolved.cfg, resolved.engine_traits
    collectives: Collectives = "none" if resolved.facts.env.world_size == 1 else "torch"
    if not row.starts_group and row.main_axis is not None:
        collectives = "xla"
    return RunSettings(
        intent=cfg.intent,
        timeout_s=cfg.timeout_s,
        accepted=cfg.overrides,
        average_each=cfg.average_each and not row.engine_steps,
        divides_loaders=isinstance(cfg.loaders, ShardLoaders),
        global_batch=cfg.global_batch,
        total_steps=cfg.total_steps,
        engine=type(cfg.engine).__name__,
        precision="None" if cfg.precision is None else type(cfg.precision).__name__,
        collectives=collectives,
        engine_steps=row.engine_steps,
        shards_params=any(map(_divided, resolved.layout)),
        shows_gradients=row.shows_gradients,
        averages_known_params=row.averages_known_params,
        follows_new_params=row.follows_new_params,
        follows_unfrozen=row.follows_unfrozen,
        steps_frozen=row.steps_frozen,
        master_weights_in_place=_masters_in_place(resolved),
    )


def _divided(layout: ParamLayout) -> bool:
    flat = layout.flat is not None and layout.flat.shards > 1
    return flat or any(placement not in ("replicate", "off-mesh") for placement in layout.placements)


def _masters_in_place(resolved: Resolved) -> bool:
    precision = resolved.cfg.precision
    asked = isinstance(precision, Mixed) and precision.master_weights
    return asked and resolved.trains and not resolved.engine_traits.copies_masters


def _master_weights(resolved: Resolved) -> str:
    """Return where the float32 values are that small updates are added to, or why there are none."""
    precision, dtypes = resolved.cfg.precision, resolved.compute_dtypes
    if not resolved.trains:
        return "none: nothing is trained"
    if isinstance(precision, FP8) and isinstance(precision.backend, MSAMP):
        return "none: MS-AMP keeps scaled float16 weights"
    keeps = isinstance(precision, Mixed) and precision.master_weights
    if resolved.engine_traits.copies_masters and dtypes is not None:
        if keeps:
            return f"DeepSpeed's float32 copies, made from the {dtypes.param} parameters"
        return f"none: everything is stepped in {dtypes.param}"
    if keeps:
        return "the parameters themselves, stored in float32"
    low = resolved.low_precision_params
    if low and not resolved.engine_traits.copies_masters:
        return f"none: {len(low)} trainable parameters are stepped in {low[0].dtype}"
    return "the parameters themselves, as they are stored"
