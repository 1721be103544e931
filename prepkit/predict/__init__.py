"""What every rank of a plan will hold and send, before anything runs: arithmetic on the plan, no torch.

The formulas follow the libraries' internals; ``versions`` says with which releases they were compared.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from prepkit.config import DDP, FSDP1, FSDP2, DeepSpeed, Single, TensorParallel
from prepkit.plan import Plan
from prepkit.predict import notes
from prepkit.predict.ddp import predict_ddp
from prepkit.predict.fsdp1 import FlatSizes, predict_fsdp1
from prepkit.predict.fsdp2 import ShardSizes, predict_fsdp2
from prepkit.predict.inputs import Inputs, inputs_of
from prepkit.predict.not_predicted import hidden
from prepkit.predict.prediction import Label, Lifetime, Prediction, Term
from prepkit.predict.single import predict_single
from prepkit.predict.tensor_parallel import predict_tensor
from prepkit.predict.transient import UnitSizes
from prepkit.predict.versions import bounded, judged
from prepkit.predict.zero import predict_zero

PREDICTORS: dict[type, Callable[[Inputs], Prediction]] = {
    Single: predict_single,
    DDP: predict_ddp,
    FSDP1: predict_fsdp1,
    FSDP2: predict_fsdp2,
    TensorParallel: predict_tensor,
    DeepSpeed: predict_zero,
}
"""Engine to the function that gives its bytes. An engine without a row is said to be not predicted."""


def predict(plan: Plan, activations: int | None = None) -> Prediction:
    """What every rank holds and sends; linear in the number of parameters, whatever the number of ranks.

    ``activations`` is the bytes of one micro-batch as ``prepkit.activations`` estimates them; None: not counted.
    """
    if reasons := hidden(plan):
        engine = type(plan.config.engine).__name__
        return Prediction(engine=engine, world_size=plan.world_size, not_predicted=reasons)
    prediction = predict_inputs(type(plan.config.engine), inputs_of(plan))
    return prediction if activations is None else _with_activations(prediction, activations)


def _with_activations(prediction: Prediction, activations: int) -> Prediction:
    what = "of one micro-batch, from a step without data"
    term = Term(category="activations", bytes=activations, what=what, label=Label.ESTIMATED, lifetime=Lifetime.PASS)
    classes = tuple(ranks.and_also((term,)) for ranks in prediction.classes)
    sentences = tuple(notes.COUNTED if note == notes.UNCOUNTED else note for note in prediction.notes)
    return evolve(prediction, classes=classes, notes=sentences)


def predict_inputs(engine: type, inputs: Inputs) -> Prediction:
    """The prediction of inputs that are at hand, such as those of a plan evolved to another mesh."""
    formulas = PREDICTORS.get(engine)
    if formulas is None:
        missing = f"everything: there are no formulas for {engine.__name__} here"
        return Prediction(engine=engine.__name__, world_size=inputs.world_size, not_predicted=(missing,))
    prediction = judged(formulas(inputs), {"torch": inputs.torch, "deepspeed": inputs.deepspeed})
    return bounded(prediction) if inputs.uneven else prediction


def unit_sizes(inputs: Inputs) -> tuple[UnitSizes, ...]:
    """What one unit of each of ``Inputs.contents`` keeps and gathers."""
    if inputs.engine == FSDP1.__name__:
        return tuple(FlatSizes(content, inputs) for content in inputs.contents)
    return tuple(ShardSizes(content, inputs, inputs.axis("shard")) for content in inputs.contents)
