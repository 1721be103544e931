"""What engines share that replicate the model: no shards, so one class of ranks, all holding equal bytes."""

from __future__ import annotations

from prepkit.predict import notes
from prepkit.predict.inputs import Inputs
from prepkit.predict.optimizers import StateBytes, state_formula, steps_on_device
from prepkit.predict.prediction import Label, Lifetime, Place, Prediction, RankClass, Term

# --- one process -----------------------------------------------------------------------------------------------------


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
        classes=one_class(inputs, (*terms(inputs), *((grads,) if inputs.trains else ()))),
        notes=notes.of_replicated(inputs),
        not_predicted=not_predicted(inputs),
    )


def terms(inputs: Inputs) -> tuple[Term, ...]:
    """Parameters, buffers, optimizer state, and the copies that autocast makes; gradients are left to the engine."""
    return (
        Term(
            category="parameters",
            bytes=inputs.total(),
            what="parts and whole ones" if inputs.axis("tensor") > 1 else "whole on every rank",
        ),
        *module_buffers(inputs),
        *optimizer_state(inputs, unsharded_state(inputs)),
        *_autocast(inputs),
    )


def module_buffers(inputs: Inputs) -> tuple[Term, ...]:
    """Registered buffers, which no engine shards."""
    return (
        (Term(category="module buffers", bytes=inputs.buffers, what="whole on every rank"),) if inputs.buffers else ()
    )


def unsharded_state(inputs: Inputs) -> StateBytes | None:
    """Optimizer state of unsharded parameters; None where it is not predicted."""
    bytes_of = state_formula(inputs.optimizer) if inputs.optimizer and inputs.trains else None
    if bytes_of is None:
        return None
    state = StateBytes(0)
    for param, count in inputs.params():
        if param.group is not None:
            state += bytes_of(param.shape, param.shape, param.size, param.group) * count
    return state


def optimizer_state(inputs: Inputs, state: StateBytes | None) -> tuple[Term, ...]:
    """The state as terms: beside the parameters; its counters are on the host unless the optimizer is fused."""
    if state is None or inputs.optimizer is None or not state.bytes + state.step:
        return ()
    kept = Term(
        category="optimizer state",
        bytes=state.bytes,
        what=f"of {inputs.optimizer.name}",
        label=state.label,
        place=at_rest(inputs),
    )
    host = inputs.device != "cpu" and (inputs.offload or not steps_on_device(inputs.optimizer))
    steps = Term(
        category="optimizer state",
        bytes=state.step,
        what="step counters",
        label=state.label,
        place="host" if host else "device",
    )
    return tuple(term for term in (kept, steps) if term.bytes)


def at_rest(inputs: Inputs) -> Place:
    """Return where shards, gradients and optimizer state are between uses: offloading keeps them on the host."""
    return "host" if inputs.offload and inputs.device != "cpu" else "device"


def _autocast(inputs: Inputs) -> tuple[Term, ...]:
    """Autocast keeps the cast copy of a trained float32 weight until the forward ends (torch ``autocast_mode.cpp``)."""
    size = inputs.autocast_size
    if size is None:
        return ()
    float32 = ((param, count) for param, count in inputs.params() if param.floating and param.size == 4)
    elements = sum(param.numel * count for param, count in float32 if param.trains)
    what = "autocast's copies of the weights that a matrix product uses"
    return (
        Term(category="working buffers", bytes=elements * size, what=what, label=Label.BOUNDED, lifetime=Lifetime.PASS),
    )


def one_class(inputs: Inputs, terms: tuple[Term, ...]) -> tuple[RankClass, ...]:
    """All ranks as one class: each holds these terms."""
    return (RankClass(first=0, last=0, ranks=inputs.world_size, terms=terms),)


def not_predicted(inputs: Inputs) -> tuple[str, ...]:
    """What is in no number, one phrase each: state of an optimizer without a formula, and what ``inputs`` names."""
    if inputs.optimizer is None or not inputs.trains or state_formula(inputs.optimizer) is not None:
        return inputs.left_out
    return (
        f"optimizer state: {inputs.optimizer.module}.{inputs.optimizer.name} is not in the tables",
        *inputs.left_out,
    )
