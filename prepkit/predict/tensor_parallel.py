"""Single layers cut over all ranks, and nothing else (torch ``parallelize_module``): what is not cut is whole."""

from __future__ import annotations

from prepkit.predict import notes, replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Moment, Prediction, Term


def predict_tensor(job: Inputs) -> Prediction:
    """Bytes of the ``TensorParallel`` engine; its traffic follows the inputs, which a plan does not know."""
    grads = Term(
        category="gradients", bytes=job.total(trained=True), what="of parts and whole parameters", moment=Moment.STEP
    )
    return Prediction(
        engine=job.engine,
        world_size=job.world_size,
        parts=job.world_size,
        classes=replicated.alone(job, (*replicated.terms(job), *((grads,) if job.trains else ()))),
        notes=notes.of_whole(job),
        not_predicted=replicated.not_predicted(job),
    )
