"""Single layers cut over all ranks, and nothing else (torch ``parallelize_module``): what is not cut is whole."""

from __future__ import annotations

from prepkit.predict import notes, replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Lifetime, Prediction, Term


def predict_tensor(inputs: Inputs) -> Prediction:
    """Bytes of the ``TensorParallel`` engine; its traffic follows the inputs, which a plan does not know."""
    grads = Term(
        category="gradients",
        bytes=inputs.total(trained=True),
        what="of parts and whole parameters",
        lifetime=Lifetime.STEP,
    )
    return Prediction(
        engine=inputs.engine,
        world_size=inputs.world_size,
        tensor=inputs.world_size,
        classes=replicated.one_class(inputs, (*replicated.terms(inputs), *((grads,) if inputs.trains else ()))),
        notes=notes.of_replicated(inputs),
        not_predicted=replicated.not_predicted(inputs),
    )
