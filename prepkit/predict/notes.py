"""What the choices cost, in words, where it matters: one sentence each."""

from __future__ import annotations

from attrs import evolve

from prepkit.findings.text import count, in_bytes
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Prediction

__all__ = ["in_bytes", "of_shards", "of_whole"]

UNCOUNTED = "Activations, the allocator's rounding, the driver and the libraries' workspaces are not counted."
COUNTED = (
    "Activations are an estimate; the allocator's rounding, the driver and the libraries' workspaces are not counted."
)
_SENDING = (
    "Loading: rank 0 alone holds the whole model first, {size}; a rank on meta holds what it keeps and one piece of a "
    "tensor."
)
WASTE = 0.01
"""Share of padding from which on it is worth a sentence."""


def of_whole(job: Inputs) -> tuple[str, ...]:
    """Sentences about engines that hold the model whole."""
    return (UNCOUNTED, *_loading(job))


def of_shards(job: Inputs, made: Prediction) -> Prediction:
    """The prediction with its sentences."""
    said = (UNCOUNTED, *_padding(job, made), *_one_unit(job, made), *_root(job, made), *_accumulation(job, made))
    return evolve(made, notes=(*said, *_frozen(job), *_host(job, made), *_loading(job)))


def of_flat(job: Inputs, made: Prediction) -> Prediction:
    """The same for flat parameters, which pad by a few elements only."""
    said = (UNCOUNTED, *_one_unit(job, made), *_root(job, made), *_accumulation(job, made), *_frozen(job))
    return evolve(made, notes=(*said, *_upcast(job), *_host(job, made), *_loading(job)))


def _upcast(job: Inputs) -> tuple[str, ...]:
    if not job.upcast_frozen:
        return ()
    more = in_bytes(job.upcast_frozen)
    said = (
        f"Frozen parameters share flat parameters with trained ones, so they are stored in float32 too: {more} more in "
        "all; units of their own keep them as they are."
    )
    return (said,)


def _padding(job: Inputs, made: Prediction) -> tuple[str, ...]:
    kept = made.classes[0].category("parameters")
    share = job.total() / made.shards
    if not share or kept / share < 1 + WASTE:
        return ()
    empty = f"; {count(made.empty_ranks, 'rank')} hold nothing else" if made.empty_ranks else ""
    said = (
        f"Padding: dim 0 does not divide by {made.shards:,}, so every rank holds {in_bytes(kept)} of parameters, "
        f"{kept / share:.2f} times its share{empty}. Gradients and traffic grow alike. Fewer shards per copy pad less."
    )
    return (said,)


def _one_unit(job: Inputs, made: Prediction) -> tuple[str, ...]:
    if any(unit.path for unit in job.units) or not made.classes[0].category("gathered units"):
        return ()
    size = in_bytes(made.classes[0].category("gathered units"))
    return (
        f"There is one unit: the whole model, {size}, is gathered on every rank from forward to the end of backward.",
    )


def _root(job: Inputs, made: Prediction) -> tuple[str, ...]:
    held = {term.what: term.bytes for term in made.classes[0].terms if term.category == "gathered units"}
    root = next((size for what, size in held.items() if what.startswith("the root")), 0)
    unit = next((size for what, size in held.items() if what.startswith("the largest")), 0)
    if not unit or root < 2 * unit:
        return ()
    what = "its gradients are whole too. " if job.trains else ""
    said = (
        f"The root holds {in_bytes(root)} gathered from forward to backward, the largest unit {in_bytes(unit)}; {what}"
        "Units of their own for its embedding and head make that shorter, where they are not tied."
    )
    return (said,)


def _accumulation(job: Inputs, made: Prediction) -> tuple[str, ...]:
    whole = [t.bytes for t in made.classes[0].terms if t.what.startswith("whole gradients")]
    if not whole:
        return ()
    said = (
        f"Accumulation over {job.accumulation} micro-batches averages once, so every rank keeps whole gradients, "
        f"{in_bytes(whole[0])}, until the last; accumulation=1 with a larger micro-batch keeps shards only."
    )
    return (said,)


def _frozen(job: Inputs) -> tuple[str, ...]:
    if not job.trains or all(content.trains() for content in job.contents):
        return ()
    return ("Units without trained parameters may be gathered once, not twice, where no gradient passes through them.",)


def _host(job: Inputs, made: Prediction) -> tuple[str, ...]:
    most = made.fullest.total("host")
    if not job.offload or not most or not job.per_node:
        return ()
    return (f"Host memory: {in_bytes(most)} a rank, {in_bytes(most * job.per_node)} a node of {job.per_node} ranks.",)


def _loading(job: Inputs) -> tuple[str, ...]:
    if job.world_size == 1:
        return ()
    size = job.loaded
    node = f", {in_bytes(size * job.per_node)} a node" if job.per_node else ""
    if job.sent:
        return (_SENDING.format(size=in_bytes(size)),)
    return (
        f"Loading: each process that does not build the model on meta holds all of it first, {in_bytes(size)}{node}.",
    )
