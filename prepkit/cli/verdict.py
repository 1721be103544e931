"""What rules and planner say of one config at several world sizes, every finding once."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from returns.result import Success

from prepkit import codec, planner
from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.findings import Finding
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


def judge(cfg: Config, facts: Facts) -> Verdict:
    """The verdict for the world size of the facts."""
    size = facts.env.world_size
    return (
        planner.plan(cfg, facts)
        .map(lambda plan: Verdict(world_size=size, plan=plan, findings=plan.warnings, accepted=plan.overridden))
        .lash(lambda findings: Success(Verdict(world_size=size, plan=None, findings=findings)))
        .unwrap()
    )


def findings_data(verdicts: tuple[Verdict, ...]) -> list[dict[str, Any]]:
    """Every finding once as JSON data, with the world sizes at which it was made."""
    entries = _by_size(verdicts).items()
    return [
        codec.to_data(finding) | {"accepted": accepted, "world_sizes": list(at)} for (finding, accepted), at in entries
    ]


def verdicts_text(verdicts: tuple[Verdict, ...]) -> str:
    """Every finding once, those of the same world sizes together; empty when there are none."""
    groups: dict[tuple[tuple[int, ...], bool], list[Finding]] = {}
    for (finding, accepted), sizes in _by_size(verdicts).items():
        groups.setdefault((sizes, accepted), []).append(finding)
    parts: list[str] = []
    for (sizes, accepted), findings in groups.items():
        sizes_text = f"world size {', '.join(map(str, sizes))}" if len(verdicts) > 1 else ""
        title = ", ".join(part for part in (sizes_text, "accepted in config.overrides" if accepted else "") if part)
        parts += [f"{title}:"] if title else []
        parts.append(findings_text(tuple(findings)))
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
