"""One process, one device: everything is whole, and nothing is sent."""

from __future__ import annotations

from prepkit.predict import notes, whole
from prepkit.predict.job import Job
from prepkit.predict.prediction import Moment, Prediction, Term


def predict_single(job: Job) -> Prediction:
    """Bytes of the ``Single`` engine."""
    grads = Term(
        category="gradients", bytes=job.total(trained=True), what="of every trained parameter", moment=Moment.STEP
    )
    return Prediction(
        engine=job.engine,
        world_size=job.world_size,
        classes=whole.alone(job, (*whole.terms(job), *((grads,) if job.trains else ()))),
        notes=notes.of_whole(job),
        not_predicted=whole.not_predicted(job),
    )
