"""What a prepared model costs and which config it is, told with the tables of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from prepkit import planner
from prepkit.auditing.reconstruction import Reconstruction, reconstruct
from prepkit.config import Config
from prepkit.facts.run import RunFacts
from prepkit.findings import Finding, PlanRejected
from prepkit.findings.text import aligned, in_bytes
from prepkit.formats.exporters.exported import config_text
from prepkit.plan import Plan
from prepkit.render.plan import tables


def config_of(facts: RunFacts) -> Config:
    """The config that would have made what stands there. Raises ``PlanRejected`` with every reason against one."""
    return _told(facts).config


def plan_of(facts: RunFacts) -> Plan:
    """Its plan, for the model as it was before. Raises ``PlanRejected`` where there is no config, or no plan for it."""
    return _planned(_told(facts))


def explained(facts: RunFacts) -> str:
    """What this rank holds now; then structure, memory and traffic as on the page of the nearest config's plan."""
    found = reconstruct(facts)
    try:
        costs = tables(_planned(found))
    except PlanRejected as refused:
        costs = "\n".join(("no tables, because prepkit has no plan for it", *map(str, refused.findings)))
    return "\n\n".join(("\n".join(_held(facts)), "\n".join(_which(found)), costs))


def _held(facts: RunFacts) -> Iterator[str]:
    yield f"rank {facts.rank} of {facts.world_size} holds now"
    held = facts.preparation.held if facts.preparation else ()
    rows = tuple((one.what, in_bytes(one.bytes), one.device) for one in held)
    yield from aligned(rows, indent=2)


def _which(found: Reconstruction) -> Iterator[str]:
    if not found.reasons:
        yield f"prepared as by this config, with the engine {type(found.config.engine).__name__}"
        yield from (f"  {line}" for line in config_text(found.config, "config.yaml").splitlines())
        return
    yield "no config of prepkit asks for it; the tables are those of the nearest one, which does not say that"
    yield from (f"  {reason.where}: {reason.what}" for reason in found.reasons)


def _told(facts: RunFacts) -> Reconstruction:
    found = reconstruct(facts)
    if found.reasons:
        raise PlanRejected(found.reasons)
    return found


def _planned(found: Reconstruction) -> Plan:
    return planner.plan(found.config, found.facts).lash(_reject).unwrap()


def _reject(findings: tuple[Finding, ...]) -> NoReturn:
    raise PlanRejected(findings)
