"""What the forward does with the units. Known once it has run: ``foreign_uses`` asks, not ``check``."""

from __future__ import annotations

from prepkit.rules.memory import later
from prepkit.rules.rule import Rule

USED_ELSEWHERE = Rule(
    id="forward.used-elsewhere",
    summary="Every parameter of a unit is used inside the forward of the unit alone.",
    check=later,
    fix="Leave the module out of config.engine.wrap, so that the unit around it gathers its parameters.",
    source=("torch fully_shard", "torch FullyShardedDataParallel"),
)

FORWARD_RULES: tuple[Rule, ...] = (USED_ELSEWHERE,)
"""Rules that a forward answers."""
