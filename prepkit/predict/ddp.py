"""Every rank holds the whole model and one set of gradient buckets (torch ``reducer.cpp``)."""

from __future__ import annotations

from prepkit.predict import notes, replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Label, Lifetime, Prediction, Term, Traffic

MIB = 1 << 20
FIRST_BUCKET = MIB
"""torch ``dist._DEFAULT_FIRST_BUCKET_BYTES``; it holds for the default bucket size only."""
DEFAULT_CAP = 25 * MIB
"""torch's default bucket size."""

HALF = 2
"""Bytes of an element that a compressing hook sends."""


def predict_ddp(inputs: Inputs) -> Prediction:
    """Bytes of the ``DDP`` engine; for inference there is no wrapper, and nothing is sent."""
    return Prediction(
        engine=inputs.engine,
        world_size=inputs.world_size,
        classes=replicated.one_class(inputs, (*replicated.terms(inputs), *_gradients(inputs))),
        traffic=_traffic(inputs),
        notes=(*_notes(inputs), *notes.of_replicated(inputs)),
        not_predicted=(*replicated.not_predicted(inputs), *_left_out(inputs)),
    )


def _gradients(inputs: Inputs) -> tuple[Term, ...]:
    trained = inputs.total(trained=True)
    if inputs.wraps is None:
        what = "of every trained parameter"
        return (Term(category="gradients", bytes=trained, what=what, lifetime=Lifetime.STEP),) if inputs.trains else ()
    buckets = Term(category="buckets", bytes=trained, what="allocated when the model is wrapped, and kept")
    if inputs.wraps.gradient_as_bucket_view:
        return (buckets,)
    grads = Term(category="gradients", bytes=trained, what="a second copy beside the buckets", lifetime=Lifetime.STEP)
    return (buckets, grads)


def _traffic(inputs: Inputs) -> tuple[Traffic, ...]:
    """Gradients are averaged in the last micro-batch of a step (DDP-5), or in each where that is asked."""
    if inputs.wraps is None or inputs.world_size == 1:
        return ()
    ranks, axis = inputs.world_size, "replicate"
    sizes = bucket_sizes(_reversed(inputs), int(inputs.wraps.bucket_cap_mb * MIB))
    averaged = Traffic(
        collective="all-reduce",
        what="gradients",
        calls=inputs.averagings * len(sizes),
        bytes=inputs.averagings * _compressed(inputs),
        ranks=ranks,
        axis=axis,
    )
    buffers = Traffic(
        collective="broadcast",
        what="module buffers",
        calls=1,
        bytes=inputs.buffers,
        ranks=ranks,
        axis=axis,
        label=Label.BOUNDED,
    )
    gradients = () if _uses_powersgd(inputs) else (averaged,)
    return (*gradients, buffers) if inputs.wraps.broadcast_buffers and inputs.buffers else gradients


def _compressed(inputs: Inputs) -> int:
    """Bytes of the gradients as they are sent: a hook casts each bucket (torch ``_compress_hook``)."""
    hook = inputs.wraps.hook if inputs.wraps else None
    if hook is None:
        return inputs.total(trained=True)
    return HALF * sum(param.numel * count for param, count in inputs.params() if param.trains)


def _uses_powersgd(inputs: Inputs) -> bool:
    return inputs.wraps is not None and inputs.wraps.hook is not None and inputs.wraps.hook.hook == "powerSGD_hook"


def _left_out(inputs: Inputs) -> tuple[str, ...]:
    powers = "traffic of gradients, and memory of PowerSGD: both follow its ranks and when it starts"
    return (powers,) * _uses_powersgd(inputs)


def _reversed(inputs: Inputs) -> list[int]:
    """Bytes of each trained parameter, last one first. Their order in the model only moves the buckets' borders."""
    trained = [(param.numel * param.size, count) for param, count in inputs.params() if param.trains]
    return [size for size, count in reversed(trained) for _ in range(count)]


def bucket_sizes(sizes: list[int], cap: int) -> list[int]:
    """Bytes of each bucket: it closes when it has reached the cap; the first one at 1 MiB under the default cap.

    torch ``_compute_bucket_assignment_by_size``, for parameters of one dtype in the order in which they are reduced.
    """
    limits = [FIRST_BUCKET, cap] if cap == DEFAULT_CAP else [cap]
    buckets: list[int] = []
    filled = 0
    for size in sizes:
        filled += size
        if filled >= limits[0]:
            buckets.append(filled)
            filled, limits = 0, limits[1:] or limits
    return [*buckets, filled] if filled else buckets


def _notes(inputs: Inputs) -> tuple[str, ...]:
    if inputs.wraps is None:
        return ()
    sentences: tuple[str, ...] = ()
    if not inputs.wraps.gradient_as_bucket_view:
        size = notes.in_bytes(inputs.total(trained=True))
        sentences += (
            f"gradient_as_bucket_view=False (torch's own default) keeps gradients twice: {size} more a rank.",
        )
    if inputs.wraps.hook is not None and not _uses_powersgd(inputs):
        sentences += (
            f"{inputs.wraps.hook.hook} sends gradients in two bytes; while one bucket is sent, so long is its copy.",
        )
    if inputs.wraps.find_unused_parameters:
        sentences += (
            "find_unused_parameters=True also all-reduces a small map of the used parameters; it is not counted.",
        )
    return sentences
