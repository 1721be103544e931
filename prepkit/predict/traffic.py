"""What sharded ranks send per optimizer step: all-gathers, reductions, copies with the host."""

from __future__ import annotations

from prepkit.predict import replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Label, Traffic
from prepkit.predict.transient import UnitSizes, summed
from prepkit.predict.unit_contents import UnitInstance


def traffic(inputs: Inputs, sizes: tuple[UnitSizes, ...]) -> tuple[Traffic, ...]:
    """Everything that is sent per optimizer step, over all its micro-batches; entries of 0 bytes are left out."""
    shards, replicas = inputs.axis("shard"), inputs.axis("replicate")
    entries = [
        *_gathers(inputs, sizes, shards),
        *(_reductions(inputs, sizes, shards, replicas) if inputs.trains else ()),
    ]
    if replicated.at_rest(inputs) == "host":
        uses = sum(_uses(inputs, unit) * sizes[unit.content].kept for unit in inputs.units)
        calls = len(inputs.units)
        to_host = Traffic(
            collective="host copy",
            what="gradients to the host",
            calls=calls,
            bytes=summed(inputs, sizes, "grads"),
            ranks=1,
            axis="shard",
            label=Label.BOUNDED,
        )
        to_device = Traffic(
            collective="host copy",
            what="shards to the device",
            calls=calls,
            bytes=uses,
            ranks=1,
            axis="shard",
            label=Label.BOUNDED,
        )
        entries += [to_device, to_host] if inputs.trains else [to_device]
    return tuple(entry for entry in entries if entry.bytes and (entry.ranks > 1 or entry.collective == "host copy"))


def _uses(inputs: Inputs, unit: UnitInstance) -> int:
    """How often a unit is gathered per optimizer step: in forward, and again in backward if it was freed between."""
    if not inputs.trains or unit.stays:
        return 1
    return inputs.accumulation * (1 if unit.reshard is False else 2)


def _gathers(inputs: Inputs, sizes: tuple[UnitSizes, ...], shards: int) -> list[Traffic]:
    """Forward and backward gathers; a unit that trains nothing is gathered in backward only if gradients pass it."""
    label = Label.EXACT
    if (
        not inputs.trains
        or inputs.splits_units
        or inputs.narrower
        or not all(content.trains() for content in inputs.contents)
    ):
        label = Label.BOUNDED
    total = sum(_uses(inputs, unit) * sizes[unit.content].gathered for unit in inputs.units)
    calls = sum(_uses(inputs, unit) for unit in inputs.units if sizes[unit.content].gathered)
    return [
        Traffic(
            collective="all-gather",
            what="parameters",
            calls=calls,
            bytes=total,
            ranks=shards,
            axis="shard",
            label=label,
            stride=inputs.axis("tensor"),
        )
    ]


def _reductions(inputs: Inputs, sizes: tuple[UnitSizes, ...], shards: int, replicas: int) -> list[Traffic]:
    """In the last micro-batch, before which gradients are kept whole (G-4, pain 16); in each where that is asked."""
    tensor = inputs.axis("tensor")
    total = inputs.averagings * summed(inputs, sizes, "reduced")
    calls = inputs.averagings * sum(count for index, count in inputs.counted.items() if sizes[index].reduced)
    return [
        Traffic(
            collective="reduce-scatter",
            what="gradients",
            calls=calls,
            bytes=total,
            ranks=shards,
            axis="shard",
            stride=tensor,
        ),
        Traffic(
            collective="all-reduce",
            what="gradients over the copies",
            calls=calls,
            bytes=total // shards,
            ranks=replicas,
            axis="replicate",
            stride=shards * tensor,
        ),
    ]
