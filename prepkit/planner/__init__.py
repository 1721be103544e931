"""Config and facts to a plan, or to every reason against one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attrs import evolve
from returns.result import Failure, Result, Success

from prepkit.codec import digest
from prepkit.config import DDP, FSDP1, FSDP2, XLA, Config, DeepSpeed, Single, TensorParallel
from prepkit.facts import Facts
from prepkit.findings import Finding, errors
from prepkit.plan import Plan, Provenance
from prepkit.planner import budget
from prepkit.planner.ddp import plan_ddp
from prepkit.planner.deepspeed import plan_deepspeed
from prepkit.planner.fsdp1 import plan_fsdp1
from prepkit.planner.fsdp2 import plan_fsdp2
from prepkit.planner.owners import owners
from prepkit.planner.pieces import Piece
from prepkit.planner.single import plan_single
from prepkit.planner.tensor_parallel import plan_tensor_parallel
from prepkit.planner.todays_findings import todays_findings
from prepkit.planner.xla import plan_xla
from prepkit.resolve.resolved import Resolved
from prepkit.rules import RULES, findings_of, split
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
    """Whether what a rank of the plan holds fits into a device's memory, and which changes would make it fit."""
    return budget.fits(plan, memory, lambda cfg: _drafted(cfg, plan.facts, RULES), activations)


def over_budget(cfg: Config, facts: Facts, rules: tuple[Rule, ...] = RULES) -> tuple[Finding, ...]:
    """What the rules about memory say, also where the config accepts it; nothing where there is no plan."""
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
            provenance=Provenance(prepkit=VERSION, config=digest(cfg), facts=digest(facts), assumed=facts.env.assumed),
            warnings=standing,
            overridden=overridden,
        )
    )
