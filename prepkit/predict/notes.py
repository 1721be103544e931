"""What the choices cost, in words, where it matters: one sentence each."""

from __future__ import annotations

from attrs import evolve

from prepkit.findings.text import count, in_bytes
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Prediction

__all__ = ["in_bytes", "of_replicated", "of_shards"]

UNCOUNTED = "Activations, the allocator's rounding, the driver and the libraries' workspaces are not counted."
COUNTED = (
    "Activations are an estimate; the allocator's rounding, the driver and the libraries' workspaces are not counted."
)
STATE = "Optimizer state is that of every trained parameter; one that never gets a gradient has none."
_RANK_0_LOADS = (
    "Loading: rank 0 alone holds the whole model first, {size}; a rank on meta holds what it keeps and one piece of a "
    "tensor."
)
WASTE = 0.01
"""Share of padding from which on it is worth a sentence."""


def of_replicated(inputs: Inputs) -> tuple[str, ...]:
    """Sentences about an engine that holds the model whole on every rank."""
    return (UNCOUNTED, *of_state(inputs), *_loading(inputs))


def of_state(inputs: Inputs) -> tuple[str, ...]:
    """On what the figure of the optimizer's state rests."""
    return (STATE,) if inputs.trains and inputs.optimizer is not None else ()


def of_shards(inputs: Inputs, prediction: Prediction) -> Prediction:
    """The prediction of per-parameter shards (FSDP2), with its sentences."""
    sentences = (
        UNCOUNTED,
        *of_state(inputs),
        *_padding(inputs, prediction),
        *_one_unit(inputs, prediction),
        *_root(inputs, prediction),
        *_accumulation(inputs, prediction),
    )
    return evolve(prediction, notes=(*sentences, *_frozen(inputs), *_host(inputs, prediction), *_loading(inputs)))


def of_flat(inputs: Inputs, prediction: Prediction) -> Prediction:
    """The prediction of flat parameters (FSDP1), which pad by a few elements only, with its sentences."""
    sentences = (
        UNCOUNTED,
        *of_state(inputs),
        *_one_unit(inputs, prediction),
        *_root(inputs, prediction),
        *_accumulation(inputs, prediction),
        *_frozen(inputs),
    )
    return evolve(prediction, notes=(*sentences, *_upcast(inputs), *_host(inputs, prediction), *_loading(inputs)))


def _upcast(inputs: Inputs) -> tuple[str, ...]:
    if not inputs.upcast_frozen:
        return ()
    more = in_bytes(inputs.upcast_frozen)
    sentence = (
        f"Frozen parameters share flat parameters with trained ones, so they are stored in float32 too: {more} more in "
        "all; units of their own keep them as they are."
    )
    return (sentence,)


def _padding(inputs: Inputs, prediction: Prediction) -> tuple[str, ...]:
    whole = sum(param.numel * param.size * number for param, number in inputs.whole)
    kept = prediction.classes[0].category("parameters") - whole
    share = inputs.total() / prediction.shards
    if not share or kept / share < 1 + WASTE:
        return ()
    empty = f"; {count(prediction.empty_ranks, 'rank')} hold nothing else" if prediction.empty_ranks else ""
    sentence = (
        f"Padding: dim 0 does not divide by {prediction.shards:,}, so every rank holds {in_bytes(kept)} of parameters, "
        f"{kept / share:.2f} times its share{empty}. Gradients and traffic grow alike. Fewer shards per copy pad less."
    )
    return (sentence,)


def _one_unit(inputs: Inputs, prediction: Prediction) -> tuple[str, ...]:
    if any(unit.path for unit in inputs.units) or not prediction.classes[0].category("gathered units"):
        return ()
    size = in_bytes(prediction.classes[0].category("gathered units"))
    return (
        f"There is one unit: the whole model, {size}, is gathered on every rank from forward to the end of backward.",
    )


def _root(inputs: Inputs, prediction: Prediction) -> tuple[str, ...]:
    held = {term.what: term.bytes for term in prediction.classes[0].terms}
    root = next((size for what, size in held.items() if what.startswith("the root, kept")), 0)
    unit = next((size for what, size in held.items() if what.startswith("the largest unit")), 0)
    if not unit or root < 2 * unit:
        return ()
    grads = "its gradients are whole too. " if inputs.trains else ""
    sentence = (
        f"The root holds {in_bytes(root)} gathered from forward to backward, the largest unit {in_bytes(unit)}; {grads}"
        "Units of their own for its embedding and head make that shorter, where they are not tied."
    )
    return (sentence,)


def _accumulation(inputs: Inputs, prediction: Prediction) -> tuple[str, ...]:
    whole = [t.bytes for t in prediction.classes[0].terms if t.what.startswith("whole gradients")]
    if not whole:
        return ()
    sentence = (
        f"Accumulation over {inputs.accumulation} micro-batches averages once, so every rank keeps whole gradients, "
        f"{in_bytes(whole[0])}, until the last; average_each=True, or accumulation=1 with a larger micro-batch, "
        "keeps shards only."
    )
    return (sentence,)


def _frozen(inputs: Inputs) -> tuple[str, ...]:
    if not inputs.trains or all(content.trains() for content in inputs.contents):
        return ()
    return ("Units without trained parameters may be gathered once, not twice, where no gradient passes through them.",)


def _host(inputs: Inputs, prediction: Prediction) -> tuple[str, ...]:
    most = prediction.fullest.total("host")
    if not inputs.offload or not most or not inputs.per_node:
        return ()
    return (
        f"Host memory: {in_bytes(most)} a rank, {in_bytes(most * inputs.per_node)} a node of {inputs.per_node} ranks.",
    )


def _loading(inputs: Inputs) -> tuple[str, ...]:
    if inputs.world_size == 1:
        return ()
    size = inputs.loaded
    node = f", {in_bytes(size * inputs.per_node)} a node" if inputs.per_node else ""
    if inputs.sent:
        return (_RANK_0_LOADS.format(size=in_bytes(size)),)
    return (
        f"Loading: each process that does not build the model on meta holds all of it first, {in_bytes(size)}{node}.",
    )
