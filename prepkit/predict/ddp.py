"""Every rank holds the whole model and one set of gradient buckets (torch ``reducer.cpp``)."""

from __future__ import annotations

from prepkit.predict import notes, replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Label, Moment, Prediction, Term, Traffic

MIB = 1 << 20
FIRST_BUCKET = MIB
"""torch ``dist._DEFAULT_FIRST_BUCKET_BYTES``; it holds for the default bucket size only."""
DEFAULT_CAP = 25 * MIB
"""torch's default bucket size."""

HALF = 2
"""Bytes of an element that a compressing hook sends."""


def predict_ddp(job: Inputs) -> Prediction:
    """Bytes of the ``DDP`` engine; for inference there is no wrapper, and nothing is sent."""
    return Prediction(
        engine=job.engine,
        world_size=job.world_size,
        classes=replicated.alone(job, (*replicated.terms(job), *_gradients(job))),
        traffic=_traffic(job),
        notes=(*_notes(job), *notes.of_whole(job)),
        not_predicted=(*replicated.not_predicted(job), *_unknown(job)),
    )


def _gradients(job: Inputs) -> tuple[Term, ...]:
    trained = job.total(trained=True)
    if job.wraps is None:
        what = "of every trained parameter"
        return (Term(category="gradients", bytes=trained, what=what, moment=Moment.STEP),) if job.trains else ()
    buckets = Term(category="buckets", bytes=trained, what="allocated when the model is wrapped, and kept")
    if job.wraps.gradient_as_bucket_view:
        return (buckets,)
    grads = Term(category="gradients", bytes=trained, what="a second copy beside the buckets", moment=Moment.STEP)
    return (buckets, grads)


def _traffic(job: Inputs) -> tuple[Traffic, ...]:
    """Gradients are averaged once per optimizer step: the micro-batches before the last run without (DDP-5)."""
    if job.wraps is None or job.world_size == 1:
        return ()
    ranks, axis = job.world_size, "replicate"
    sizes = bucket_sizes(_reversed(job), int(job.wraps.bucket_cap_mb * MIB))
    found = Traffic(
        collective="all-reduce",
        what="gradients",
        calls=len(sizes),
        bytes=_compressed(job),
        ranks=ranks,
        axis=axis,
    )
    buffers = Traffic(
        collective="broadcast",
        what="module buffers",
        calls=1,
        bytes=job.buffers,
        ranks=ranks,
        axis=axis,
        label=Label.BOUNDED,
    )
    gradients = () if _powers(job) else (found,)
    return (*gradients, buffers) if job.wraps.broadcast_buffers and job.buffers else gradients


def _compressed(job: Inputs) -> int:
    """Bytes of the gradients as they are sent: a hook casts each bucket (torch ``_compress_hook``)."""
    hook = job.wraps.hook if job.wraps else None
    if hook is None:
        return job.total(trained=True)
    return HALF * sum(
        one.numel * times * job.counted[i] for i, c in enumerate(job.contents) for one, times in c.held if one.trains
    )


def _powers(job: Inputs) -> bool:
    return job.wraps is not None and job.wraps.hook is not None and job.wraps.hook.hook == "powerSGD_hook"


def _unknown(job: Inputs) -> tuple[str, ...]:
    powers = "traffic of gradients, and memory of PowerSGD: both follow its ranks and when it starts"
    return (powers,) * _powers(job)


def _reversed(job: Inputs) -> list[int]:
    """Bytes of each trained parameter, last one first. Their order in the model only moves the buckets' borders."""
    held = [(one, n * job.counted[i]) for i, c in enumerate(job.contents) for one, n in c.held if one.trains]
    return [one.numel * one.size for one, times in reversed(held) for _ in range(times)]


def bucket_sizes(sizes: list[int], cap: int) -> list[int]:
    """Bytes of each bucket: it closes when it has reached the cap; the first one at 1 MiB under the default cap.

    torch ``_compute_bucket_assignment_by_size``, for parameters of one dtype in the order in which they are reduced.
    """
    limits = [FIRST_BUCKET, cap] if cap == DEFAULT_CAP else [cap]
    found: list[int] = []
    size = 0
    for one in sizes:
        size += one
        if size >= limits[0]:
            found.append(size)
            size, limits = 0, limits[1:] or limits
    return [*found, size] if size else found


def _notes(job: Inputs) -> tuple[str, ...]:
    if job.wraps is None:
        return ()
    said: tuple[str, ...] = ()
    if not job.wraps.gradient_as_bucket_view:
        size = notes.in_bytes(job.total(trained=True))
        said += (f"gradient_as_bucket_view=False (torch's own default) keeps gradients twice: {size} more a rank.",)
    if job.wraps.hook is not None and not _powers(job):
        said += (f"{job.wraps.hook.hook} sends gradients in two bytes; while one bucket is sent, so long is its copy.",)
    if job.wraps.find_unused_parameters:
        said += ("find_unused_parameters=True also all-reduces a small map of the used parameters; it is not counted.",)
    return said
