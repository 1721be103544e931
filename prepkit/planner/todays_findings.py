"""What the rules say of the facts that a plan meets, and did not say of those that it was made from.

A plan may be made where a fact is open or declared: the version of torch, the memory of a device, which libraries are
installed. A rule that could not know then is asked again with what is there now.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from prepkit.facts import Facts
from prepkit.findings import Finding, Severity
from prepkit.plan import Plan
from prepkit.planner import budget
from prepkit.resolve.resolved import Resolved
from prepkit.rules import findings_of, split


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
    return (Finding(rule="plan.other-environment", severity=Severity.ERROR, where="env.per_node", what=what, fix=fix),)


def _memory(plan: Plan, today: Facts, again: budget.Again) -> tuple[Finding, ...]:
    planned, now = plan.facts.env.memory, today.env.memory
    if now is None or (planned is not None and planned <= now):
        return ()
    standing, _ = split(plan.config, budget.findings(evolve(plan, facts=today), again))
    return _new(standing, lambda: (*plan.warnings, *plan.overridden))
