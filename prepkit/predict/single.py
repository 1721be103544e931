"""One process, one device: everything is whole, and nothing is sent."""

from __future__ import annotations

from prepkit.predict import notes, replicated
from prepkit.predict.inputs import Inputs
from prepkit.predict.prediction import Lifetime, Prediction, Term


def predict_single(inputs: Inputs) -> Prediction:
    """Bytes of the ``Single`` engine: parameters, gradients until the step, optimizer state, buffers; no traffic."""
    grads = Term(
        category="gradients",
        bytes=inputs.total(trained=True),
        what="of every trained parameter",
        lifetime=Lifetime.STEP,
    )
    return Prediction(
        engine=inputs.engine,
        world_size=inputs.world_size,
        classes=replicated.one_class(inputs, (*replicated.terms(inputs), *((grads,) if inputs.trains else ()))),
        notes=notes.of_replicated(inputs),
        not_predicted=replicated.not_predicted(inputs),
    )
