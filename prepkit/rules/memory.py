"""The budget of a device. What a plan needs is known once it is made, so the planner asks these, not ``check``."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.findings import Severity
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


def later(_: Resolved) -> Iterator[Hit]:
    """Nothing: config and facts alone do not say it."""
    return iter(())


EXCEEDS = Rule(
    id="memory.exceeds-device",
    summary="What a rank certainly holds at one moment fits into the memory of its device.",
    check=later,
    fix="Shard over more ranks, offload, or take devices with more memory.",
    source=("pain 7", "pain 16"),
)
TIGHT = Rule(
    id="memory.may-exceed-device",
    summary="What a rank holds at most, activations aside, fits into the memory of its device.",
    check=later,
    fix="Shard over more ranks, offload, or watch the first steps.",
    severity=Severity.WARNING,
    source=("pain 7", "pain 16"),
)

PLAN_RULES: tuple[Rule, ...] = (EXCEEDS, TIGHT)
"""Rules about the finished plan, whose findings ``planner.budget`` makes; an override accepts them like any other."""
