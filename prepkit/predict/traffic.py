"""What the ranks of units send: gathers, reductions, and copies from and to the host."""

from __future__ import annotations

from prepkit.predict import replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Label, Traffic
from prepkit.predict.transient import Sizes, summed
from prepkit.predict.unit_contents import UnitOf


def traffic(job: Inputs, sizes: Sizes) -> tuple[Traffic, ...]:
    """Everything that is sent per optimizer step, micro-batches included; only what is of some bytes."""
    shards, copies = job.axis("shard"), job.axis("replicate")
    found = [*_gathers(job, sizes, shards), *(_reductions(job, sizes, shards, copies) if job.trains else ())]
    if replicated.at_rest(job) == "host":
        uses = sum(_uses(job, unit) * sizes[unit.content].kept for unit in job.units)
        calls = len(job.units)
        back = Traffic(
            collective="host copy",
            what="gradients to the host",
            calls=calls,
            bytes=summed(job, sizes, "grads"),
            ranks=1,
            axis="shard",
            label=Label.BOUNDED,
        )
        there = Traffic(
            collective="host copy",
            what="shards to the device",
            calls=calls,
            bytes=uses,
            ranks=1,
            axis="shard",
            label=Label.BOUNDED,
        )
        found += [there, back] if job.trains else [there]
    return tuple(one for one in found if one.bytes and (one.ranks > 1 or one.collective == "host copy"))


def _uses(job: Inputs, unit: UnitOf) -> int:
    """How often a unit is gathered per optimizer step: in forward, and again in backward if it was freed between."""
    if not job.trains or unit.stays:
        return 1
    return job.accumulation * (1 if unit.reshard is False else 2)


def _gathers(job: Inputs, sizes: Sizes, shards: int) -> list[Traffic]:
    """Forward and backward gathers; a unit that trains nothing is gathered in backward only if gradients pass it."""
    label = Label.EXACT
    if not job.trains or job.splits_units or job.narrower or not all(content.trains() for content in job.contents):
        label = Label.BOUNDED
    total = sum(_uses(job, unit) * sizes[unit.content].gathered for unit in job.units)
    calls = sum(_uses(job, unit) for unit in job.units if sizes[unit.content].gathered)
    return [
        Traffic(
            collective="all-gather",
            what="parameters",
            calls=calls,
            bytes=total,
            ranks=shards,
            axis="shard",
            label=label,
            stride=job.axis("tensor"),
        )
    ]


def _reductions(job: Inputs, sizes: Sizes, shards: int, copies: int) -> list[Traffic]:
    """Once per optimizer step: the micro-batches before the last keep their gradients whole (G-4, pain 16)."""
    parts = job.axis("tensor")
    total = summed(job, sizes, "reduced")
    calls = sum(times for index, times in job.counted.items() if sizes[index].reduced)
    return [
        Traffic(
            collective="reduce-scatter",
            what="gradients",
            calls=calls,
            bytes=total,
            ranks=shards,
            axis="shard",
            stride=parts,
        ),
        Traffic(
            collective="all-reduce",
            what="gradients over the copies",
            calls=calls,
            bytes=total // shards,
            ranks=copies,
            axis="replicate",
            stride=shards * parts,
        ),
    ]
