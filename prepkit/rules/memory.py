"""The budgets of a device and of a node, which the planner asks for: what a plan needs is known once it is made."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from prepkit.findings import Severity
from prepkit.findings.text import in_bytes
from prepkit.rules.rule import Hit, Moment, Rule


@frozen(kw_only=True)
class Host:
    """What the ranks of one node hold in its memory, in bytes."""

    memory: int
    """What a node has."""
    ranks: int
    """Ranks of a node."""
    keeps: int
    """What the fullest rank keeps there while it trains and saves: what is offloaded."""
    loads: int
    """What a rank holds there while its model is built with values, before apply."""


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
    host: Host | None = None
    """None where it is not known what a node has, or how many ranks."""


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


def _host(held: Held) -> Iterator[Hit]:
    if (host := held.host) is None:
        return
    for each, when, milder in ((host.keeps, "keeps offloaded", False), (host.loads, "builds its model", True)):
        if each * host.ranks > host.memory:
            what = f"Each of {host.ranks} ranks of a node holds {in_bytes(each)} there when it {when}, "
            what += f"{in_bytes(each * host.ranks)} together; a node has {in_bytes(host.memory)}."
            fix = "" if milder else "Offload less, shard over more nodes, or take nodes with more memory."
            yield Hit("env.host_memory", what, fix, milder=milder)
            return


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
    Rule(
        id="memory.exceeds-host",
        summary="What the ranks of a node hold in its memory, when they load, offload and save, fits into it together.",
        check=_host,
        at=(Moment.PLANNED,),
        fix=(
            "Build the model on meta and write weights=LoadWeights(path): each rank reads its own bytes; or on all but "
            "one rank, and weights=BroadcastWeights()."
        ),
        milder="for what is held before apply, as a model on meta holds nothing",
        source=("pain 6",),
    ),
)
"""Rules about the finished plan; an override accepts their errors like any other."""
