"""A plan on one page."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.codec import plan_digest
from prepkit.plan import Plan
from prepkit.plan.summary import about, about_lines, finding_lines, origin_lines, step_lines, title
from prepkit.render.layout import layout_lines
from prepkit.render.memory import memory_lines
from prepkit.render.tree import tree_lines

DIGEST = 12
"""Characters shown of a digest."""


def plan_text(plan: Plan) -> str:
    """A plan on one page: what it is for, its steps with their reasons, what every rank will hold, what to mind."""
    sections = (
        tuple(_header(plan)),
        tuple(origin_lines(plan.config)),
        tuple(step_lines(plan.steps)),
        tuple(layout_lines(plan)),
        (tables(plan),),
        tuple(finding_lines("warnings", plan.warnings)),
        tuple(finding_lines("overridden (accepted in config.overrides)", plan.overridden)),
    )
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def tables(plan: Plan) -> str:
    """Structure, memory and traffic of a plan, and what they mean."""
    return "\n\n".join("\n".join(lines) for lines in (tuple(tree_lines(plan)), tuple(memory_lines(plan))) if lines)


def _header(plan: Plan) -> Iterator[str]:
    provenance = plan.provenance
    sources = f"config {_digest(provenance.config)}, facts {_digest(provenance.facts)}"
    yield title(plan.config, plan.facts)
    yield from about_lines(
        (
            *about(plan.config, plan.facts, plan.mesh, plan.owners, provenance.assumed),
            ("digest", f"{_digest(plan_digest(plan))} ({sources})"),
            ("made by", f"prepkit {provenance.prepkit}"),
        )
    )


def _digest(digest: str) -> str:
    """The first hexadecimal digits, without the name of the algorithm."""
    return digest.rpartition(":")[2][:DIGEST]
