"""Parts of a plan: steps with their reasons, owners of duties, and settings of the run."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from prepkit.config import Clip, Intent
from prepkit.steps import Step

# --- steps -----------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Planned:
    """A step of a plan, and the reason for it."""

    step: Step
    reason: str
    """One clause, read after the step; never read by the interpreter."""
    behaviour_ids: tuple[str, ...] = ()
    """Ids of the behaviour reference that the step answers, such as ``DDP-5``."""


def because(step: Step, reason: str, *behaviour_ids: str) -> tuple[Planned, ...]:
    """A piece of a plan: one step with its reason and its behaviour ids. Pieces add as tuples do."""
    return (Planned(step=step, reason=reason, behaviour_ids=behaviour_ids),)


# --- duties between two steps ----------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Owners:
    """``prepkit``, ``DeepSpeed`` or ``nobody`` for each duty; the same fields for every engine, so plans compare."""

    accumulation: str
    """Who counts micro-batches, and so decides which one ends with an optimizer step."""
    accumulation_steps: int
    """Micro-batches per optimizer step."""
    clipping: str
    """Who clips gradients just before the optimizer steps."""
    clip: Clip
    """How they are clipped."""
    scheduler: str
    """Who steps the learning-rate scheduler."""
    scheduler_ticks: int
    """Scheduler steps per optimizer step."""
    master_weights: str
    """Where the float32 copy of low-precision trainable parameters lives, or why there is none."""
    loss_scaling: str = "nobody"
    """Who scales the loss, unscales the gradients and skips steps that overflowed."""
    global_batch: int | None = None
    """Samples per optimizer step over all data ranks; None: nobody says how many a rank reads at once."""


Collectives = Literal["none", "torch", "xla"]
"""``torch``: ``torch.distributed`` does them; ``xla``: torch_xla, and torch has no group; ``none``: one rank."""


# --- the run ----------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class RunSettings:
    """Settings of a run, and its engine's ways with parameters and gradients; every engine has the same fields."""

    # --- asked for -------------------------------------------------------------------------------------------------

    intent: Intent
    """Purpose of the prepared model: training or inference."""
    timeout_s: float
    """Time-out of every collective, in seconds."""
    accepted: tuple[str, ...]
    """Ids of rules whose errors are accepted."""
    average_each: bool
    """prepkit averages gradients after every micro-batch, not only after the last of a window."""
    divides_loaders: bool
    """Loaders are divided over the data ranks, those included that are made later."""
    global_batch: int | None
    """Samples per optimizer step that were asked for; None: the number follows from micro-batches and ranks."""
    total_steps: int | None
    """Optimizer steps of the whole run; None: not known."""

    # --- the engine's ways -----------------------------------------------------------------------------------------

    engine: str
    """Name of the engine, for messages and checkpoints; nothing branches on it."""
    precision: str
    """Name of the precision, for messages."""
    collectives: Collectives
    """Library whose collectives the ranks use."""
    engine_steps: bool
    """The engine itself runs backward, clipping and the optimizer; ``loss.backward()`` alone is not enough."""
    shards_params: bool
    """A rank holds parts of parameters, and gathers them for a forward."""
    shows_gradients: bool
    """Gradients are in ``.grad`` between the micro-batches of a window."""
    averages_known_params: bool
    """Only parameters that were trained at apply are averaged over ranks, as DDP's buckets are filled then."""
    follows_new_params: bool
    """A parameter that enters the model after apply is trained as soon as an optimizer has it."""
    follows_unfrozen: bool
    """A parameter that is unfrozen after apply is trained as soon as an optimizer has it."""
    steps_frozen: bool
    """A parameter that is frozen after apply is still trained, as part of a flat parameter."""
    master_weights_in_place: bool
    """Trained parameters are float32, and thereby their own master weights, while the forward computes in less."""
