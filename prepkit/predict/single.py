"""One process, one device: everything is whole, and nothing is sent."""

from __future__ import annotations

from prepkit.predict import notes, replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Moment, Prediction, Term


def predict_single(job: Inputs) -> Prediction:
    """Bytes of the ``Single`` engine."""
    grads = Term(
        category="gradients", bytes=job.total(trained=True), what="of every trained parameter", moment=Moment.STEP
    )
    return Prediction(
        engine=job.engine,
        world_size=job.world_size,
        classes=replicated.alone(job, (*replicated.terms(job), *((grads,) if job.trains else ()))),
        notes=notes.of_whole(job),
        not_predicted=replicated.not_predicted(job),
    )
