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
from prepkit.predict.fsdp2 import Sizes, predict_fsdp2
from prepkit.predict.inputs import Inputs, job_of
from prepkit.predict.not_predicted import hidden
from prepkit.predict.prediction import Label, Moment, Prediction, Term
from prepkit.predict.single import predict_single
from prepkit.predict.tensor_parallel import predict_tensor
from prepkit.predict.transient import Sized
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
    made = predict_job(type(plan.config.engine), job_of(plan))
    return made if activations is None else _with(made, activations)


def _with(made: Prediction, activations: int) -> Prediction:
    what = "of one micro-batch, from a step without data"
    term = Term(category="activations", bytes=activations, what=what, label=Label.ESTIMATED, moment=Moment.PASS)
    classes = tuple(evolve(one, terms=(*one.terms, term)) for one in made.classes)
    said = tuple(notes.COUNTED if note == notes.UNCOUNTED else note for note in made.notes)
    return evolve(made, classes=classes, notes=said)


def predict_job(engine: type, made: Inputs) -> Prediction:
    """The same of a job that is at hand."""
    formulas = PREDICTORS.get(engine)
    if formulas is None:
        missing = f"everything: there are no formulas for {engine.__name__} here"
        return Prediction(engine=engine.__name__, world_size=made.world_size, not_predicted=(missing,))
    found = judged(formulas(made), {"torch": made.torch, "deepspeed": made.deepspeed})
    return bounded(found) if made.uneven else found


def sized(made: Inputs) -> tuple[Sized, ...]:
    """What one unit of each of ``Inputs.contents`` keeps and gathers."""
    if made.engine == FSDP1.__name__:
        return tuple(FlatSizes(content, made) for content in made.contents)
    return tuple(Sizes(content, made, made.axis("shard")) for content in made.contents)
