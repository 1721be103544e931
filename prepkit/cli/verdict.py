"""What rules and planner say of one config at several world sizes, every finding once."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from returns.result import Success

from prepkit import codec, planner
from prepkit.config import Config, Origin
from prepkit.config.origin import origin_of
from prepkit.facts import Facts
from prepkit.findings import Finding, PlanRejected
from prepkit.formats.importers.source import Imported
from prepkit.formats.policy import Policy, recorded
from prepkit.plan import Plan
from prepkit.render.text import findings_text


@frozen(kw_only=True)
class Verdict:
    """What rules and planner say for one world size."""

    world_size: int
    plan: Plan | None
    findings: tuple[Finding, ...]
    """The reasons against a plan, or the warnings of the plan."""
    accepted: tuple[Finding, ...] = ()
    """Errors that the config overrides."""
    supposed: tuple[str, ...] = ()
    """What a script says, and the file does not: the plan supposes the plainest of it."""


def judge(cfg: Config, facts: Facts) -> Verdict:
    """The verdict for the world size of the facts."""
    size = facts.env.world_size
    return (
        planner.plan(cfg, facts)
        .map(lambda plan: Verdict(world_size=size, plan=plan, findings=plan.warnings, accepted=plan.overridden))
        .lash(lambda findings: Success(Verdict(world_size=size, plan=None, findings=findings)))
        .unwrap()
    )


def is_plan(file: str) -> bool:
    """Return whether a file that is no config says that it is a plan. Only of one that can be read again: no pipe."""
    if not Path(file).is_file():
        return False
    try:
        data = json.loads(Path(file).read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("kind") == codec.KIND


def recorded_in(policy: Policy, file: str, verdict: Verdict) -> Verdict:
    """The verdict with what the policy says of its plan: denied, or recorded in it. Exceptions end with their day."""
    if verdict.plan is None or not policy.files:
        return verdict
    try:
        plan = recorded(policy, verdict.plan, date.today(), file)
    except PlanRejected as refused:
        return evolve(verdict, plan=None, findings=refused.findings)
    return evolve(verdict, plan=plan, findings=plan.warnings, accepted=plan.overridden)


def placed(verdict: Verdict, imported: Imported, refused: PlanRejected | None) -> Verdict:
    """The verdict with line and keys of the file in each finding, and without a plan where the file itself was refused.

    What the rules say of a place that could not be read is left out: they saw something else there.
    """
    wrong = refused.findings if refused is not None else ()
    unread = tuple(finding.where.partition(":$")[2] for finding in wrong)
    places = tuple(f"config{place}" for place in unread if place)

    def asked(finding: Finding) -> bool:
        return not any(f"{finding.where}.".startswith((f"{place}.", f"{place}[")) for place in places)

    def line(finding: Finding) -> Finding:
        placed = finding if finding.origin else evolve(finding, origin=_line(imported.written, finding))
        return imported.worded(placed)

    found = tuple(map(line, filter(asked, verdict.findings)))
    if refused is not None:
        return evolve(verdict, plan=None, findings=(*map(imported.worded, wrong), *found))
    return evolve(verdict, findings=found, accepted=tuple(map(line, verdict.accepted)))


def _line(written: tuple[Origin, ...], finding: Finding) -> str:
    if not finding.where.startswith("config."):
        return ""
    return str(origin_of(written, finding.where, finding.what) or "")


def findings_data(
    verdicts: tuple[Verdict, ...], data: Callable[[Finding], dict[str, Any]] = codec.to_data
) -> list[dict[str, Any]]:
    """Every finding once as JSON data, with the world sizes at which it was made. ``data`` makes that of each."""
    entries = _by_size(verdicts).items()
    return [data(finding) | {"accepted": accepted, "world_sizes": list(at)} for (finding, accepted), at in entries]


def verdicts_text(verdicts: tuple[Verdict, ...], line: Callable[[Finding], str] = str) -> str:
    """Every finding once, those of the same world sizes together; empty when there are none. ``line`` writes each."""
    groups: dict[tuple[tuple[int, ...], bool], list[Finding]] = {}
    for (finding, accepted), sizes in _by_size(verdicts).items():
        groups.setdefault((sizes, accepted), []).append(finding)
    parts: list[str] = []
    for (sizes, accepted), findings in groups.items():
        sizes_text = f"world size {', '.join(map(str, sizes))}" if len(verdicts) > 1 else ""
        title = ", ".join(part for part in (sizes_text, "accepted in config.overrides" if accepted else "") if part)
        parts += [f"{title}:"] if title else []
        parts.append(findings_text(tuple(findings), line))
    return "\n".join(parts)


def _by_size(verdicts: tuple[Verdict, ...]) -> dict[tuple[Finding, bool], tuple[int, ...]]:
    """Every finding once, with whether it was accepted, and the world sizes at which it was made."""
    sizes: dict[tuple[Finding, bool], tuple[int, ...]] = {}
    for verdict in verdicts:
        for key in (
            *((finding, False) for finding in verdict.findings),
            *((finding, True) for finding in verdict.accepted),
        ):
            sizes[key] = (*sizes.get(key, ()), verdict.world_size)
    return sizes
