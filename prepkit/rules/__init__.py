"""What has to hold between config and facts before there is a plan."""

from __future__ import annotations

from prepkit.config import Config
from prepkit.config.origin import origin_of
from prepkit.facts import Facts
from prepkit.findings import Finding, Severity
from prepkit.resolve.resolved import Resolved
from prepkit.rules import (
    already_sharded,
    blocks,
    checkpointing,
    compile,  # noqa: A004  # the subject is called what the config calls it
    ddp,
    deepspeed,
    deepspeed_environment,
    deepspeed_modules,
    deepspeed_tools,
    entry_points,
    environment,
    fp8,
    fp8_engine,
    fsdp1,
    fsdp1_mesh,
    fsdp_units,
    global_batch,
    ignored,
    launcher_flags,
    loaders,
    mesh,
    model,
    optimizer,
    optimizer_engines,
    optimizer_specs,
    overrides,
    params,
    precision,
    quantised,
    reshard,
    scheduler,
    tensor_parallel,
    ties,
    unknown_torch,
    unused,
    values,
    weights,
    wrap,
    xla,
)
from prepkit.rules.first_step import FIRST_STEP_RULES
from prepkit.rules.forward import FORWARD_RULES
from prepkit.rules.memory import PLAN_RULES
from prepkit.rules.rule import Hit, Rule

_OF_ONE_SUBJECT: tuple[Rule, ...] = (
    *environment.RULES,
    *launcher_flags.RULES,
    *mesh.RULES,
    *fsdp1_mesh.RULES,
    *model.RULES,
    *already_sharded.RULES,
    *quantised.RULES,
    *wrap.RULES,
    *blocks.RULES,
    *reshard.RULES,
    *ties.RULES,
    *tensor_parallel.RULES,
    *fsdp_units.RULES,
    *unused.RULES,
    *optimizer_engines.RULES,
    *scheduler.RULES,
    *optimizer_specs.RULES,
    *params.RULES,
    *optimizer.RULES,
    *precision.RULES,
    *fp8.RULES,
    *fp8_engine.RULES,
    *ddp.RULES,
    *fsdp1.RULES,
    *ignored.RULES,
    *xla.RULES,
    *deepspeed.RULES,
    *deepspeed_environment.RULES,
    *deepspeed_modules.RULES,
    *deepspeed_tools.RULES,
    *compile.RULES,
    *checkpointing.RULES,
    *entry_points.RULES,
    *loaders.RULES,
    *global_batch.RULES,
    *weights.RULES,
    *values.RULES,
)

_SUBJECTS: tuple[Rule, ...] = (*_OF_ONE_SUBJECT, unknown_torch.about_unknown_torch(_OF_ONE_SUBJECT))

LATE_RULES: tuple[Rule, ...] = (*PLAN_RULES, *FORWARD_RULES, *FIRST_STEP_RULES)
"""Rules that are asked once there is a plan, or gradients; a config may override them as any other."""

RULES: tuple[Rule, ...] = (*_SUBJECTS, overrides.about_overrides(_SUBJECTS))
"""Every rule in reporting order: what a run stands on, the model, who holds what, the optimizer, then single values."""


def check(cfg: Config, facts: Facts, rules: tuple[Rule, ...] = RULES) -> tuple[Finding, ...]:
    """Every finding in the order of the rules, those that the config overrides included; see ``split``.

    Pure, and linear in the size of the model. Rules of your own go behind ours: ``check(cfg, facts, (*RULES, mine))``.
    """
    return findings_of(Resolved(cfg=cfg, facts=facts), rules)


def findings_of(resolved: Resolved, rules: tuple[Rule, ...] = RULES) -> tuple[Finding, ...]:
    """The same of a config and facts that the planner goes on with, so that nothing is worked out twice."""
    known = tuple(
        overrides.about_overrides((*rules, *LATE_RULES)) if rule.id == overrides.ID else rule for rule in rules
    )
    return tuple(_finding(resolved.cfg, rule, hit) for rule in known for hit in rule.check(resolved))


def _finding(cfg: Config, rule: Rule, hit: Hit) -> Finding:
    origin = origin_of(cfg.origins, hit.where, hit.what) if cfg.origins else None
    return Finding(
        rule=rule.id,
        severity=rule.severity,
        where=hit.where,
        what=hit.what,
        fix=hit.fix or rule.fix,
        origin=str(origin or ""),
    )


def split(
    cfg: Config, findings: tuple[Finding, ...], rules: tuple[Rule, ...] = RULES
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Findings that stand, and errors that ``cfg.overrides`` accepts; together all ``findings``, each in its order.

    Only errors of rules that can be overridden are accepted; a warning refuses nothing and always stands.
    """
    able = {rule.id for rule in (*rules, *LATE_RULES) if rule.overridable}.intersection(cfg.overrides)
    accepted = tuple(f.severity is Severity.ERROR and f.rule in able for f in findings)
    return (
        tuple(f for f, yes in zip(findings, accepted, strict=True) if not yes),
        tuple(f for f, yes in zip(findings, accepted, strict=True) if yes),
    )
