"""The budget of a device. What a plan needs is known once it is made, so the planner asks these, not ``check``."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from prepkit.findings import Severity
from prepkit.findings.text import in_bytes
from prepkit.rules.rule import Hit, Moment, Rule


@frozen(kw_only=True)
class Held:
    """What the fullest rank of a finished plan holds, and what its device has. In bytes, activations aside."""

    rank: int
    floor: int
    """What it holds for certain at one moment."""
    ceiling: int
    """What it holds at most."""
    memory: int
    """What a device has."""
    options: tuple[str, ...] = ()
    """Changes of the config that would fit, as they are typed."""


def _exceeds(held: Held) -> Iterator[Hit]:
    if held.floor > held.memory:
        yield _hit(held, f"for certain {in_bytes(held.floor)}")


def _tight(held: Held) -> Iterator[Hit]:
    if held.floor <= held.memory < held.ceiling:
        yield _hit(held, f"at most {in_bytes(held.ceiling)}")


def _hit(held: Held, needs: str) -> Hit:
    who = f"The fullest rank, {held.rank}, holds {needs}, activations aside"
    typed = "\n       or write ".join(held.options)
    return Hit("env.memory", f"{who}; a device has {in_bytes(held.memory)}.", f"Write {typed}." if typed else "")


PLANNED_RULES: tuple[Rule, ...] = (
    Rule(
        id="memory.exceeds-device",
        summary="What a rank certainly holds at one moment fits into the memory of its device.",
        check=_exceeds,
        at=(Moment.PLANNED,),
        fix="Shard over more ranks, offload, or take devices with more memory.",
        source=("pain 7", "pain 16"),
    ),
    Rule(
        id="memory.may-exceed-device",
        summary="What a rank holds at most, activations aside, fits into the memory of its device.",
        check=_tight,
        at=(Moment.PLANNED,),
        fix="Shard over more ranks, offload, or watch the first steps.",
        severity=Severity.WARNING,
        source=("pain 7", "pain 16"),
    ),
)
"""Rules about the finished plan; an override accepts their errors like any other."""
