"""What the forward does with the units. Known once it has run: ``foreign_uses`` asks, not ``check``."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from prepkit.findings.text import at
from prepkit.rules.rule import Hit, Moment, Rule


@frozen
class Use:
    """A use of a parameter of one unit while that unit's forward does not run."""

    name: str
    """Of the parameter."""
    unit: str
    """Path of the unit that gathers it."""
    user: str
    """Path of the unit whose forward runs; empty: the root's."""


def elsewhere(uses: tuple[tuple[str, str, str], ...]) -> Iterator[Hit]:
    """Hits of parameters with their unit and user, each once, for who has met them in a forward that failed."""
    return _used_elsewhere(tuple(dict.fromkeys(Use(*use) for use in uses)))


def _used_elsewhere(uses: tuple[Use, ...]) -> Iterator[Hit]:
    for use in uses:
        by = f"`{use.user}`" if use.user else "the root"
        yield Hit(
            at(use.name),
            f"The forward of {by} computes with `{use.name}`, which is gathered for that of the unit `{use.unit}` "
            "alone.",
            f"Leave `{use.unit}` out of config.engine.wrap, so that the unit around it gathers its parameters, or call "
            "the module itself.",
        )


FORWARD_RULES: tuple[Rule, ...] = (
    Rule(
        id="forward.used-elsewhere",
        summary="Every parameter of a unit is used inside the forward of the unit alone.",
        check=_used_elsewhere,
        at=(Moment.FORWARD, Moment.CALL),
        fix="Leave the module out of config.engine.wrap, so that the unit around it gathers its parameters.",
        source=("torch fully_shard", "torch FullyShardedDataParallel"),
    ),
)
"""Rules that a forward answers."""
