"""Bytes that every rank of a plan will hold and send, before anything runs: arithmetic on the plan, no torch.

The formulas follow the libraries' internals; ``CHECKED`` has the releases that they were compared with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from attrs import evolve

from prepkit.config import DDP, FSDP1, FSDP2, DeepSpeed, Single, TensorParallel
from prepkit.plan import Plan
from prepkit.predict import notes
from prepkit.predict.ddp import predict_ddp
from prepkit.predict.deepspeed.prediction import predict_zero
from prepkit.predict.fsdp1 import FlatSizes, predict_fsdp1
from prepkit.predict.fsdp2 import ShardSizes, predict_fsdp2
from prepkit.predict.inputs import Inputs, inputs_of
from prepkit.predict.not_predicted import hidden
from prepkit.predict.prediction import Label, Lifetime, Prediction, Term, Traffic
from prepkit.predict.replicated import predict_single
from prepkit.predict.tensor_parallel import predict_tensor
from prepkit.predict.transient import UnitSizes

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
    """Return what every rank holds and sends; linear in the number of parameters, whatever the number of ranks.

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
    prediction = evolve(prediction, without_state=inputs.trains and inputs.optimizer is None)
    return bounded(prediction) if inputs.uneven else prediction


def unit_sizes(inputs: Inputs) -> tuple[UnitSizes, ...]:
    """Return what one unit of each of ``Inputs.contents`` keeps and gathers."""
    if inputs.engine == FSDP1.__name__:
        return tuple(FlatSizes(content, inputs) for content in inputs.contents)
    return tuple(ShardSizes(content, inputs, inputs.axis("shard")) for content in inputs.contents)


# --- versions --------------------------------------------------------------------------------------------------------


T = TypeVar("T", Term, Traffic)

CHECKED: dict[str, dict[str, tuple[str, ...]]] = {
    "Single": {"torch": ("2.13",)},
    "DDP": {"torch": ("2.13",)},
    "FSDP2": {"torch": ("2.13",)},
    "TensorParallel": {"torch": ("2.13",)},
    "FSDP1": {"torch": ("2.13",)},
    "DeepSpeed": {"torch": ("2.13",), "deepspeed": ("0.19",)},
}
"""Engine to library to the releases (first two numbers) with which ``tests/predict`` found a difference of 0 bytes."""


def judged(prediction: Prediction, versions: dict[str, str]) -> Prediction:
    """The prediction as it is for checked libraries; with another one, with every exact number called bounded.

    An empty version, one that is not known, is taken for the newest checked one, and a note says so.
    """
    for library, checked in CHECKED.get(prediction.engine, {}).items():
        prediction = _judged(prediction, library, versions[library], checked)
    return prediction


def _judged(prediction: Prediction, library: str, version: str, checked: tuple[str, ...]) -> Prediction:
    newest = checked[-1]
    if not version:
        note = f"{library} version not known: the formulas are those of {library} {newest}."
        return evolve(prediction, notes=(*prediction.notes, note))
    release = re.match(r"\d+\.\d+", version)
    if release and release.group() in checked:
        return prediction
    note = (
        f"{library} {version} was not compared with these formulas, {library} {newest} was: "
        "what would be exact is called bounded."
    )
    return evolve(bounded(prediction), notes=(*prediction.notes, note))


def bounded(prediction: Prediction) -> Prediction:
    """The prediction with ``Label.BOUNDED`` in the place of every ``Label.EXACT``; no number changes."""
    return evolve(
        prediction,
        classes=tuple(evolve(ranks, terms=tuple(map(_doubted, ranks.terms))) for ranks in prediction.classes),
        traffic=tuple(map(_doubted, prediction.traffic)),
    )


def _doubted(value: T) -> T:
    return evolve(value, label=Label.BOUNDED) if value.label is Label.EXACT else value
