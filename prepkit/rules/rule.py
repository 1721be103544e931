"""The ``Rule`` value: one invariant, and the moments at which it is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, TypeVar

from attrs import evolve, frozen

from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.findings import Finding, Severity
from prepkit.plan.attestation import Asked
from prepkit.resolve.resolved import Resolved

E = TypeVar("E")


class Moment(StrEnum):
    """When a rule is asked; its value is what a page says of it."""

    PLAN = "before there is a plan"
    PLANNED = "once there is a plan"
    FORWARD = "by build_plan(..., example=...) and pk.foreign_uses"
    APPLY = "after apply"
    LOOP = "at each call of the loop"
    FIRST_STEP = "before the first step"
    STEP = "before each step"
    DUE = "before the steps 1, 2, 4, 8 ... and each 64th"
    SAVE = "before a checkpoint is written"
    FOLDER = "before the folder of a checkpoint is used"
    LOAD = "before a state dict is loaded into a prepared model or optimizer"
    RESUME = "before a checkpoint is read"
    AUDIT = "by pk.audit"
    DRIFT = "by pk.watch and audit.drift()"
    PROVE = "by pk.prove and prepkit audit --prove"
    ACT = "by the steps of a plan, before they act"
    CALL = "by the call that meets it"


class Need(StrEnum):
    """What a rule has to have seen, so that a look gathers only what the rules that are due ask for."""

    OPTIMIZERS = "which parameters the optimizers hold"
    STATE = "the state of the optimizers"
    GRADIENTS = "the gradients that are about to be stepped"
    VALUES = "the values of the weights"
    LOADERS = "the loaders, and how their samples are divided"
    RANKS = "what the other ranks have seen"
    LOOP = "what the loop has done"
    BEFORE = "an earlier look"


@frozen
class Hit:
    """One place where a rule does not hold."""

    where: str
    """Path into what was looked at, such as ``config.mesh.shard`` or ``optimizer.param_groups[0].lr``."""
    what: str
    """What is wrong there, with the values that show it."""
    fix: str = ""
    """What to type; empty: the rule's own ``fix`` says it."""
    milder: bool = False
    """Odd here and no more: a warning, where other hits of the rule are errors; the rule's ``milder`` says when."""


Check = Callable[[Resolved], Iterable[Hit]]
"""What a rule at ``Moment.PLAN`` does: reads the config, the facts and what follows from the two."""
Repair = Callable[[Config, Facts], Config]
"""The config mended. Repairs are chained, so each takes the config that the one before has left."""


@frozen(kw_only=True)
class Rule:
    """A value: what must hold, when that is asked, and what to do when it does not."""

    id: str
    """``subject.what-is-wrong``; never reused."""
    summary: str
    """What holds when the rule is silent."""
    check: Callable[[Any], Iterable[Hit]] = lambda _: ()
    """One hit per place; reads only. The default is for rows that ``told_by`` tells. It is given a ``Resolved`` at
    ``Moment.PLAN``, ``memory.Held`` at ``PLANNED``, ``forward.Use``s at ``FORWARD``, a ``Turn`` of the loop at
    ``LOOP``, ``ProofFacts`` at ``PROVE``, and ``RunFacts`` at the others."""
    fix: str
    """The imperative sentence a user follows."""
    severity: Severity = Severity.ERROR
    at: tuple[Moment, ...] = (Moment.PLAN,)
    """The moments at which it is asked."""
    needs: tuple[Need, ...] = ()
    """What has to have been seen."""
    cost: str = ""
    """What asking it costs beyond reading, such as ``one all-reduce``; empty: nothing."""
    milder: str = ""
    """When a hit is a warning in the place of an error, as a clause; empty: never."""
    overridable: bool = True
    """False where nothing can go on unless the rule holds, such as a mesh that does not multiply to the world size."""
    lawful: str = ""
    """What makes it right in a file of the library that it is about, as a clause; empty: it is wrong there too."""
    stops: str = ""
    """The reason why nothing can go on unless it holds, as a clause; empty: the summary says it."""
    source: tuple[str, ...] = ()
    """Behaviour rows (``DM-1``), pains (``pain 5``) or functions of torch that the rule comes from."""
    told_by: str = ""
    """Calls that tell it by its id (``rules.found``), where no look asks it."""
    repair: Repair | None = None
    """The fix as a function, where config alone can give it: it silences this rule and adds no other error."""

    def found(self, hit: Hit, origin: str = "") -> Finding:
        """Make the finding of one hit; ``origin`` is where an imported setting was read from."""
        severity = Severity.WARNING if hit.milder and self.milder else self.severity
        fix = hit.fix or self.fix
        return Finding(rule=self.id, severity=severity, where=hit.where, what=hit.what, fix=fix, origin=origin)


def under(engine: type, check: Check) -> Check:
    """Ask under one engine alone."""
    return with_engine(engine, lambda resolved, _: check(resolved))


def with_engine(engine: type[E], check: Callable[[Resolved, E], Iterable[Hit]]) -> Check:
    """Ask under one engine alone, and give the check that engine, whose options it reads."""

    def asked(resolved: Resolved) -> Iterable[Hit]:
        return check(resolved, resolved.cfg.engine) if isinstance(resolved.cfg.engine, engine) else ()

    return asked


def options(engine: type, **changes: Any) -> Repair:
    """Repair a config by other options of its engine; one of another engine stays as it is."""

    def repaired(cfg: Config, _: Facts) -> Config:
        return evolve(cfg, engine=evolve(cfg.engine, **changes)) if isinstance(cfg.engine, engine) else cfg

    return repaired


def answers(rules: Iterable[Rule], moment: Moment, subject: Any) -> tuple[Asked, ...]:
    """Return what each of these rules finds about one subject, for an attestation. Pure."""
    return tuple(Asked(rule=rule.id, moment=moment.value, found=findings_of((rule,), subject)) for rule in rules)


def findings_of(rules: Iterable[Rule], subject: Any) -> tuple[Finding, ...]:
    """Every finding of these rules about one subject, in the order of the rules. Pure."""
    return tuple(rule.found(hit) for rule in rules for hit in rule.check(subject))
