"""What has to hold between config and facts before there is a plan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from attrs import evolve

from prepkit.config import Config
from prepkit.config.origin import origin_of
from prepkit.facts import Facts
from prepkit.findings import Finding, Severity
from prepkit.findings.text import did_you_mean
from prepkit.resolve.resolved import Resolved
from prepkit.rules import (
    already_sharded,
    checkpointing,
    compile,  # noqa: A004  # the module of that name
    ddp,
    deepspeed,
    deepspeed_environment,
    entry_points,
    environment,
    fp8,
    fsdp1,
    fsdp_units,
    ignored,
    launcher_flags,
    loaders,
    mesh,
    model,
    optimizer,
    precision,
    quantised,
    scheduler,
    tensor_parallel,
    values,
    weights,
    wrap,
    xla,
)
from prepkit.rules.forward import FORWARD_RULES
from prepkit.rules.memory import PLANNED_RULES
from prepkit.rules.refusals import REFUSALS
from prepkit.rules.rule import Hit, Moment, Rule
from prepkit.rules.run import AUDIT_RULES
from prepkit.rules.run.applied import ACTS
from prepkit.rules.run.loop import RULES as LOOP_RULES
from prepkit.rules.run.proving import RULES as PROOF_RULES
from prepkit.rules.run.saving import RULES as SAVING_RULES

_OVERRIDES = "overrides.unknown"
RENAMED = {
    "first-step.no-gradient": "run.without-gradient",
    "first-step.not-finite": "run.gradients-not-finite",
    "first-step.replicas-differ": "run.gradients-part",
    "first-step.misplaced": "run.gradients-misplaced",
}
"""Ids that rules once had, to those that they have."""


def about_overrides(rules: tuple[Rule, ...]) -> Rule:
    """The rule that has to know all the others: every override names one of them that can be overridden."""
    able = {rule.id: rule.overridable for rule in rules} | {_OVERRIDES: False}

    def check(resolved: Resolved) -> Iterator[Hit]:
        for name in dict.fromkeys(resolved.cfg.overrides):
            if name not in able:
                now = RENAMED.get(name)
                hint = f" It is called `{now}` now." if now else did_you_mean(name, able)
                yield Hit("config.overrides", f"There is no rule `{name}`.", f"Leave it out.{hint}")
            elif not able[name]:
                what = f"`{name}` cannot be overridden: nothing can go on without it."
                yield Hit("config.overrides", what, "Leave it out, and mend what the rule finds.")

    def repair(cfg: Config, _: Facts) -> Config:
        return evolve(cfg, overrides=tuple(name for name in cfg.overrides if able.get(name)))

    return Rule(
        id=_OVERRIDES,
        summary="Every override names a rule that can be overridden.",
        check=check,
        fix="Leave it out.",
        overridable=False,
        source=("pain 24",),
        repair=repair,
    )


_OF_ONE_SUBJECT: tuple[Rule, ...] = (
    *environment.RULES,
    *launcher_flags.RULES,
    *mesh.RULES,
    *model.RULES,
    *already_sharded.RULES,
    *quantised.RULES,
    *wrap.RULES,
    *tensor_parallel.RULES,
    *fsdp_units.RULES,
    *scheduler.RULES,
    *optimizer.RULES,
    *precision.RULES,
    *fp8.RULES,
    *ddp.RULES,
    *fsdp1.RULES,
    *ignored.RULES,
    *xla.RULES,
    *deepspeed.RULES,
    *deepspeed_environment.RULES,
    *compile.RULES,
    *checkpointing.RULES,
    *entry_points.RULES,
    *loaders.RULES,
    *weights.RULES,
    *values.RULES,
)

_SUBJECTS: tuple[Rule, ...] = (*_OF_ONE_SUBJECT, environment.about_unknown_torch(_OF_ONE_SUBJECT))

RULES: tuple[Rule, ...] = (*_SUBJECTS, about_overrides(_SUBJECTS))
"""Every rule in reporting order: what a run stands on, the model, who holds what, the optimizer, then single values."""

LAW: tuple[Rule, ...] = (
    *RULES,
    *PLANNED_RULES,
    *FORWARD_RULES,
    *LOOP_RULES,
    *SAVING_RULES,
    *AUDIT_RULES,
    *PROOF_RULES,
    *ACTS,
    *REFUSALS,
)
"""The law book: every rule of every moment. A config may override an error of any of them by its id."""


@cache
def due(moment: Moment) -> tuple[Rule, ...]:
    """The rules that are asked at this moment, in reporting order."""
    return tuple(rule for rule in LAW if moment in rule.at)


@cache
def by_id() -> dict[str, Rule]:
    """Id to rule, of the whole law book."""
    return {rule.id: rule for rule in LAW}


def found(rule: str, where: str, what: str, fix: str = "", *, milder: bool = False) -> Finding:
    """Make the finding of a row by its id, for the call that has met it; ``fix`` replaces the row's."""
    return by_id()[rule].found(Hit(where, what, fix, milder))


def check(cfg: Config, facts: Facts, rules: tuple[Rule, ...] = RULES) -> tuple[Finding, ...]:
    """Every finding in the order of the rules, those that the config overrides included; see ``split``.

    Pure, and linear in the size of the model. Rules of your own go behind ours: ``check(cfg, facts, (*RULES, mine))``.
    """
    return findings_of(Resolved(cfg=cfg, facts=facts), rules)


def findings_of(resolved: Resolved, rules: tuple[Rule, ...] = RULES) -> tuple[Finding, ...]:
    """The same of a config and facts that the planner goes on with, so that nothing is worked out twice."""
    if resolved.cfg.overrides:  # the rule about them has to know all the others
        rules = tuple(about_overrides((*rules, *LAW)) if rule.id == _OVERRIDES else rule for rule in rules)
    return tuple(finding_of(resolved.cfg, rule, hit) for rule in rules for hit in rule.check(resolved))


def finding_of(cfg: Config, rule: Rule, hit: Hit) -> Finding:
    """One hit as a finding, with the place that the setting was written at."""
    origin = origin_of(cfg.origins, hit.where, hit.what) if cfg.origins else None
    return rule.found(hit, str(origin or ""))


def split(
    cfg: Config, findings: tuple[Finding, ...], rules: tuple[Rule, ...] = RULES
) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Findings that stand, and errors that ``cfg.overrides`` accepts; together all ``findings``, each in its order.

    Only errors of rules that can be overridden are accepted; a warning refuses nothing and always stands.
    """
    if not cfg.overrides:
        return findings, ()
    able = {rule.id for rule in (*rules, *LAW) if rule.overridable}.intersection(cfg.overrides)
    accepted = tuple(f.severity is Severity.ERROR and f.rule in able for f in findings)
    return (
        tuple(f for f, yes in zip(findings, accepted, strict=True) if not yes),
        tuple(f for f, yes in zip(findings, accepted, strict=True) if yes),
    )
