"""The training loop as a value: what it is held to, where it is, and what happens to it.

Events are plain data. Whoever drives a loop turns what happens into events, and asks ``prepkit.loop.advance`` what
follows. All of it is named tuples, because a loop makes some in every micro-batch; and the state of a loop that goes
on as before comes back after each window, so that what follows can be looked up. What counts on is no part of it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, NamedTuple

from attrs import frozen


@frozen(kw_only=True)
class LoopPlan:
    """The constants of one run that its loop asks for."""

    accumulation: int = 1
    """Micro-batches of a whole window."""
    optimizer: str = "AdamW"
    """Class of the optimizer; empty: none, and nothing is stepped."""
    wants_closure: str = ""
    """Class of an optimizer that asks for gradients several times a step, such as LBFGS; empty: none does."""
    engine: str = "Single"
    """Class of the engine in the config, for messages."""
    engine_steps: bool = False
    """The engine runs backward, clips, steps and clears by itself, as DeepSpeed does."""
    averages: bool = True
    """Engines average gradients over several ranks in a backward that was announced to them before its forward."""
    wrapper_averages: bool = False
    """Averages are made by a wrapper that has to see the forward, as under DDP."""
    loses_gradients: bool = False
    """A forward without gradients, after a backward that averaged, loses what was averaged, as under FSDP1."""
    swaps_weights: bool = True
    """Evaluation puts other weights into the model, as optimizers with an eval mode and adapters that merge do."""
    shows_gradients: bool = True
    """``.grad`` holds the gradients of a window between its micro-batches, as under neither FSDP1 nor ZeRO."""
    average_each: bool = False
    """Every micro-batch averages gradients over the ranks, and not a window's last one alone."""
    loss_scaled: bool = False
    """The loss is multiplied by a scale that prepkit keeps, for float16."""
    clips: str = ""
    """How gradients are clipped at the end of a window, as written in the config; empty: not."""
    clears: bool = True
    """Gradients are cleared when a window has ended; False in a loop whose script clears them itself, writes them, and
    adds to them in any number of backwards."""
    ticks: int = 0
    """Ticks of the scheduler after each step; 0: there is none, or somebody else ticks it."""
    global_batch: bool = False
    """The accumulation follows from ``Config(global_batch=...)``."""
    no_mean_over: str = ""
    """The reason why losses cannot be weighed by tokens here; empty: they can."""
    accepted: frozenset[str] = frozenset()
    """Ids of the rules whose errors ``config.overrides`` accepts."""


class Gradients(StrEnum):
    """What a driver has seen of the gradients in the model before it reports an event."""

    UNKNOWN = "nobody looked"
    NONE = "there are none"
    THERE = "there are some"
    WRITTEN = "they were written by something else since the last backward"


class Batches(NamedTuple):
    """The batch in use, and how many micro-batches those before it made."""

    loader: int | None = None
    """Number of the loader that was read last, inside a pass; None: outside of all."""
    last: bool = False
    """It is the last of its pass: it may be smaller, and says nothing of others."""
    at_end: bool = False
    """A batch in use is the last of a pass that ends windows."""
    trained: int = 0
    """Its micro-batches that are over."""
    expected: int = 1
    """Micro-batches that it will make: as many as most before it did; 1 where none was read."""
    late: bool = False
    """The pass that ends windows is over, so that what is trained now was read ahead of its time."""
    seen: tuple[tuple[int, int, int], ...] = ()
    """Loader, number of micro-batches, and how many of its batches made so many lately."""


class LoopState(NamedTuple):
    """Where a loop is. A refused event leaves it as it was."""

    micro_batches: int = 0
    """Micro-batches of the window under way that are over."""
    backwards: int = 0
    """Backwards of the micro-batch under way."""
    more: bool = False
    """The last of them has announced another one."""
    cleared: bool = False
    """The gradients of this micro-batch were cleared after its backward."""
    armed: bool = False
    """The wrapper's forward has run since the last backward: DDP averages one backward per forward."""
    averaged: bool = False
    """The last backward of this window was averaged over the ranks."""
    failed: bool = False
    """The last backward has raised: some of its gradients may have been added."""
    used: bool = False
    """``ready.backward`` has been called: gradients are divided and averaged for ``ready.step()`` alone."""
    weighed: bool | None = None
    """The losses of this window say what they are a mean over; None: no loss yet."""
    cut_short: bool = False
    """The micro-batch under way ends its window before that is full (``accumulate(last=True)``)."""
    forced: bool | None = None
    """Whether each backward averages, where the loop's owner says it, as inside accelerate's ``no_sync``; None: the
    window says it."""
    averaging: bool | None = None
    """Whether the engine was told to average in the next backward; None: it was told nothing."""
    stepping: bool = False
    """The end of a window is being carried out."""
    evaluating: int = 0
    """How many ``evaluating()`` are open."""
    averages: int = 0
    """How many ``ema.applied()`` are open."""
    by_hand: bool = False
    """The optimizer has stepped before ``ready.backward`` was ever called: a loop of the user's own."""
    closed: bool = False
    batches: Batches = Batches()
    over_pass: bool | None = None
    """A pass that ends windows has ended since the window under way began; None: none is under way."""
    told: frozenset[str] = frozenset()
    """Ids of the rules that have warned, or whose errors were accepted: each is reported once."""

    @property
    def pending(self) -> int:
        """Micro-batches whose gradients wait for the end of their window."""
        return self.micro_batches + (self.backwards > 0)

    @property
    def at_last_batch(self) -> bool:
        """The micro-batch in use is the last that is expected of the last batch of a pass that ends windows."""
        batches = self.batches
        return batches.at_end and batches.trained + 1 >= batches.expected


class BatchRead(NamedTuple):
    """A loader of training data gave a batch."""

    loader: int
    last: bool = False
    """It is the last of its pass."""
    ends_windows: bool = False
    """The last batch of this loader's passes ends the window."""
    at_end: bool = False
    """This batch, or that of another loader in use, is such a last one."""


class PassEnded(NamedTuple):
    """A loader of training data is outside its pass."""

    loader: int
    exhausted: bool = True
    """The pass went to its end; False: the loop has left it."""
    ends_windows: bool = False
    at_end: bool = False
    """The batch in use of another loader is the last of a pass that ends windows."""


class ForwardRan(NamedTuple):
    """The wrapper's forward began or ended."""

    grad: bool = True
    """Gradients are recorded."""
    averages: bool = True
    """The wrapper is to average in the next backward."""


class Backward(NamedTuple):
    """``ready.backward(loss)`` was called."""

    more: bool = False
    """Another loss of the same micro-batch follows."""
    weighed: bool = False
    """The call says ``mean_over``."""
    alike: bool = True
    """All ranks say it, or none does."""
    leads: bool = True
    """The loss leads to something that has a gradient."""
    averages: bool = True
    """The engine is to average in this backward, as it stands: inside ``no_sync`` it is not."""
    gradients: Gradients = Gradients.UNKNOWN


class BackwardFailed(NamedTuple):
    """It raised."""


class Step(NamedTuple):
    """``ready.step()`` was called."""

    closure: bool = False
    gradients: Gradients = Gradients.UNKNOWN
    moved: tuple[int, int] | None = None
    """Where the last window left the scheduler, and where it is now, if somebody else has stepped it."""
    at_end: bool = False
    """The ticks of this step are more than the scheduler has left: after its last one it would raise."""


class Stepped(NamedTuple):
    """The end of a window was carried out."""

    applied: bool = True
    """The optimizer acted; False: gradients overflowed, and the loss scale goes down."""


class StepFailed(NamedTuple):
    """The end of a window was refused or interrupted."""

    acted: bool = False
    """The optimizer had begun to act: the window is over. False: it may be asked for again."""


class Cleared(NamedTuple):
    """``optimizer.zero_grad()`` was called: by the user, or by the loop inside the step that a closure makes."""


class SteppedByHand(NamedTuple):
    """The optimizer was stepped, and not by ``ready.step()``."""

    averaged: bool = True
    """Its gradients were averaged over the ranks, or there is nothing to average."""
    scaled: bool = True
    """Somebody has scaled the loss, or it needs no scale."""
    inner: str = ""
    """Class of an optimizer inside DeepSpeed's, which by itself reaches no weight; empty: the one that trains."""
    call: str = "optimizer.step()"
    """As a user types it: an engine's own steps it too."""


class AccumulateEntered(NamedTuple):
    """``with ready.accumulate():`` was entered."""

    last: bool = False


class AccumulateLeft(NamedTuple):
    """It was left."""

    last: bool = False
    """It stood inside another one that ends the window."""


class Averaging(NamedTuple):
    """The loop's owner says whether backwards average from here on."""

    forced: bool | None
    """None: as the window says it."""


class LeftOut(NamedTuple):
    """``ready.skip()`` was called: the micro-batch under way counts nothing."""


class EvaluationEntered(NamedTuple):
    """``with ready.evaluating():`` was entered."""


class EvaluationLeft(NamedTuple):
    """It was left."""


class AveragesApplied(NamedTuple):
    """``with ema.applied():`` was entered."""


class AveragesLeft(NamedTuple):
    """It was left."""


class Saved(NamedTuple):
    """``ready.save()`` was called."""


class Resuming(NamedTuple):
    """``ready.resume()`` was called."""


class Resumed(NamedTuple):
    """A checkpoint was read."""

    steps: int
    seen: tuple[tuple[int, int, int], ...] = ()
    """What the saved run knew of its batches; empty: nothing, or the checkpoint does not say."""


class Called(NamedTuple):
    """Another call was made that wants an open run."""

    call: str
    counts: bool = False
    """It takes the number of steps from ``ready.steps``."""


class Closed(NamedTuple):
    """``ready.close()`` was called."""

    failing: bool = False
    """While an exception is under way, so that what is unfinished is no surprise."""


Event = (
    BatchRead
    | PassEnded
    | ForwardRan
    | Backward
    | BackwardFailed
    | Step
    | Stepped
    | StepFailed
    | Cleared
    | SteppedByHand
    | AccumulateEntered
    | AccumulateLeft
    | Averaging
    | LeftOut
    | EvaluationEntered
    | EvaluationLeft
    | AveragesApplied
    | AveragesLeft
    | Saved
    | Resuming
    | Resumed
    | Called
    | Closed
)


class Turn(NamedTuple):
    """What a rule at ``Moment.LOOP`` looks at: an event that is about to count, and the loop that it comes to."""

    state: LoopState
    event: Any
    plan: LoopPlan

    @property
    def ends(self) -> bool:
        """The micro-batch in use ends its window."""
        return ends_window(self.plan, self.state)


def ends_window(plan: LoopPlan, state: LoopState) -> bool:
    """The micro-batch in use is the last of its window, so that ``ready.step()`` steps the optimizer."""
    return state.micro_batches + 1 >= plan.accumulation or state.cut_short or state.at_last_batch


@frozen(kw_only=True)
class LoopFacts:
    """What a loop has done before the optimizer acts."""

    window: int = 0
    """Which window of micro-batches ends, counted from 1."""
    passes: tuple[int, int] = (0, 0)
    """The least and the greatest number of a pass over the data that a rank is in."""
    orders: tuple[int, int] = (0, 0)
    """The least and the greatest digest of what ranks take their part from, first of all; 0: nobody can tell."""
    own_order: int = 0
    """The digest of this rank."""
    streams: tuple[tuple[int, int], ...] = ()
    """Likewise for each loader, of the first samples of its stream before it is divided."""
    own_streams: tuple[int, ...] = ()
    """The digests of this rank; as many on each."""
    loss_finite: bool = True
    own_loss_finite: bool = True
    """Whether the last loss is a number on this rank; ``loss_finite``: on every rank."""
    written: tuple[str, ...] = ()
    """Parameters that a forward has written while they were gathered, so that what was written is lost."""
    gathers: str = ""
    """What has gathered them: ``FSDP1`` or ``FSDP2``."""
    loaders: int = 0
    """Loaders that were prepared."""
    read: bool = True
    """Whether a batch of one of them was read."""
    apart: int = 0
    """Steps since a batch of one of them was read or in use, this one among them, where there was one in use before."""
    divides: Literal["", "given", "nobody"] = ""
    """What divides samples over ranks: loaders that were given, or nobody; empty: nothing is to be divided."""
    readers: int = 1
    """Ranks that should read other samples."""
