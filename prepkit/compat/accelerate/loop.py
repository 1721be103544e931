"""Where a script for accelerate is between the forward of a micro-batch and its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from prepkit.compat.accelerate.not_offered import NotOffered, as_the_loop, in_their_words
from prepkit.config import Clip, ClipNorm, ClipValue
from prepkit.court import found
from prepkit.loading.passes import Passes
from prepkit.training.prepared import Prepared

_BY_HAND = ("Single", "DDP")
"""Engines that leave gradients where a script finds and steps them."""


@define(eq=False)
class AcceleratedLoop:
    """The loop of one ``Accelerator``.

    One model with its optimizer is *driven*: ``ready.backward`` and ``ready.step`` run. Several models, or an optimizer
    that came by itself, are stepped as accelerate steps them, which DDP and one process allow: gradients are averaged
    in each backward that is to average, and torch's optimizer steps at the end of a window.
    """

    ready: Prepared
    """The first model's."""
    accumulation: int
    """Micro-batches of a window."""
    at_last_batch: Callable[[], bool]
    """Whether the batch in use ends its pass, and windows with it."""
    driven: bool = True
    others: list[Prepared] = field(factory=list, init=False)
    """The models beside the first."""
    boundary: bool = field(default=True, init=False)
    """Whether the present micro-batch ends its window (accelerate's ``sync_gradients``)."""
    stepped: bool = field(default=False, init=False)
    """Whether the present micro-batch has been ended."""
    inside: bool = field(default=False, init=False)
    """Whether the script is inside ``accumulate``."""
    micro_batches: int = field(default=0, init=False)
    """Those of ``accumulate`` that have ended, since the last pass did where windows end with it (its ``step``)."""
    overflowed: bool = field(default=False, init=False)
    """Likewise: the last step was skipped."""

    def __attrs_post_init__(self) -> None:
        self.ready.loop.leave_gradients()
        if not self.driven:
            self.step_by_hand()
        elif not self._by_engine:
            self.ready.loop.average(forced=True)  # outside of ``accumulate`` every backward does

    # --- who steps ---

    @property
    def models(self) -> tuple[Prepared, ...]:
        """All of them, the first one first."""
        return (self.ready, *self.others)

    @property
    def planned(self) -> Clip:
        """How the plan clips, where the script does not say it."""
        return self.ready.plan.owners.clip

    @property
    def _by_engine(self) -> bool:
        return self.ready.loop.plan.engine_steps

    def add(self, ready: Prepared) -> None:
        """Another model: where it is trained, all of them are stepped by hand from here on."""
        self.others.append(ready)
        if any(param.requires_grad for param in ready.model.parameters()):
            self.step_by_hand()

    def step_by_hand(self) -> None:
        """Nothing is driven any more. Raises ``NotOffered`` where engines keep gradients to themselves."""
        for ready in self.models:
            if ready.plan.run.engine not in _BY_HAND:
                what = "give one model and its optimizer to one prepare, and each other model to an Accelerator"
                name = f"several models, or an optimizer alone, under {ready.plan.run.engine}"
                raise NotOffered(name, what, "accelerate.several-models")
            ready.loop.release()  # steps and zero_grad are the script's
            ready.loop.average(forced=True)
        self.driven = False

    def accumulate_over(self, steps: int) -> None:
        """Windows have another number of micro-batches from here on, which no plan knows."""
        if steps != self.accumulation:
            self.step_by_hand()
            self.accumulation = steps

    # --- windows ---

    def ends_window(self) -> bool:
        """Return whether the micro-batch that runs now is the last of its window.

        The loop counts what is trained on, accelerate what enters ``accumulate``, in passes of the loader that was
        begun last: where they differ (loaders side by side, several micro-batches of one batch) the latter holds, where
        no engine keeps gradients to itself.
        """
        theirs = self.at_last_batch() or (self.micro_batches + 1) % self.accumulation == 0
        if self.driven and self.ready.loop.ends_window != theirs:
            if self.ready.plan.run.engine not in _BY_HAND:
                return self.ready.loop.ends_window
            self.step_by_hand()
        return theirs

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """One micro-batch; one whose optimizer was not stepped, because it ends no window, is counted all the same."""
        self._heed_no_sync()
        self.inside, self.stepped = True, False
        last = self.at_last_batch()
        self.boundary = self.ends_window()
        outer = [(ready, ready.loop.state.forced) for ready in self.models]
        try:
            for ready in (ready for ready, forced in outer if forced is not False):  # what ``no_sync`` says stays
                by_hand = self.boundary or ready.plan.run.average_each
                ready.loop.average(forced=None if self.driven else by_hand)
            if not self.driven:
                yield
            else:
                with self.ready.accumulate():
                    yield
                    if self.driven and not (self.stepped or self.boundary) and self.ready.loop.pending:
                        self.step()
            self.micro_batches = 0 if last else self.micro_batches + 1
        finally:
            self.inside = False
            for ready, forced in outer:
                ready.loop.average(forced=forced)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Inside, gradients of the model stay each rank's own; of all where none is named."""
        if self._by_engine and self.inside:  # the engine counts micro-batches, and averages at the end of a window
            yield
            return
        if self._by_engine:
            what = "write gradient_accumulation_steps and `with accelerator.accumulate(model):`"
            raise NotOffered("no_sync under DeepSpeed outside of accumulate", what, "accelerate.outside-accumulate")
        with ExitStack() as stack:
            for ready in [one for one in self.models if model is one.model] or self.models:
                stack.enter_context(not_averaged(ready))
            yield

    # --- the micro-batch ---

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Adds its gradients, divided by the micro-batches of a window."""
        if self._by_engine and self.accumulation > 1 and not self.inside:
            what = "write `with accelerator.accumulate(model):`"
            name = "gradient_accumulation_steps without accumulate under DeepSpeed"
            raise NotOffered(name, what, "accelerate.outside-accumulate")
        self._heed_no_sync()
        self.stepped = False
        if self.inside:
            self.boundary = self.ends_window()
        if self.driven:
            retain_graph = not self._by_engine and bool(options.pop("retain_graph", None))
            for name in options:
                raise NotOffered(f"backward({name}=...)", "write one forward for each backward, and leave it out")
            with in_their_words():
                self.ready.loop.backward(loss, retain_graph=True) if retain_graph else self.ready.backward(loss)
            return
        loss, scaler = loss / self.accumulation, self.ready.scaler
        (loss if scaler is None else scaler.scale(loss)).backward(**options)  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Ends the micro-batch of what is driven."""
        loop = self.ready.loop
        with in_their_words():
            if self.inside or self._by_engine or self.accumulation == 1:
                self.ready.step()
            else:  # outside of ``accumulate`` each step is one
                with self.ready.accumulate(last=True):
                    self.ready.step()
        self.stepped = True
        loop.clip = self.planned  # until the script asks again

    def step_of(self, optimizer: Optimizer, closure: Any) -> None:
        """``optimizer.step()`` of the script: ends the micro-batch, or steps this optimizer at the end of a window."""
        if closure is not None and self.driven:
            if self.ready.plan.run.engine not in _BY_HAND:
                raise as_the_loop("loop.closure-wanted")
            self.step_by_hand()  # what the closure does is the script's
        if not (self.boundary or self.inside):
            return
        if self.driven and not self.ready.loop.state.backwards:
            self._nothing_to_step()
        if self.driven:
            self.step()
        elif self.boundary:
            self._stepped_by_hand(optimizer, closure)

    def _stepped_by_hand(self, optimizer: Optimizer, closure: Any) -> None:
        scaler = self.ready.scaler
        if scaler is None:
            optimizer.step(closure)
            return
        scale = scaler.get_scale()
        scaler.step(optimizer, **({} if closure is None else {"closure": closure}))  # which torch refuses
        scaler.update()
        self.overflowed = scaler.get_scale() < scale

    @property
    def skipped(self) -> bool:
        """Whether the last window ended without a step, because a gradient overflowed."""
        return bool(self.ready.skipped) if self.driven else self.overflowed

    def _heed_no_sync(self) -> None:
        """A script that enters DDP's own ``no_sync``, as LocalSGD does, may step what is not averaged."""
        ready = self.ready
        if self.driven and not ready.loop.pending and getattr(ready.model, "require_backward_grad_sync", None) is False:
            self.step_by_hand()

    def _nothing_to_step(self) -> None:
        """A script that writes ``loss.backward()`` from the first steps on is stepped as accelerate does it."""
        if self.ready.loop.state.used or self._by_engine or self.ready.scaler is not None:
            raise as_the_loop("loop.step-without-backward")
        self.step_by_hand()

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool) -> None:
        """Clears the gradients where a window ends; inside one they are kept.

        So does accelerate, but in the window's last micro-batch: a ``zero_grad`` above its forward throws away those
        before it. Here they stay, and a warning says so, once.
        """
        if not self.driven:
            if self.boundary:
                optimizer.zero_grad(set_to_none=set_to_none)
            return
        loop = self.ready.loop
        if self.boundary and self.inside and loop.state.micro_batches:
            what = (
                "it was called at the top of the last micro-batch of a window, and cleared nothing: under accelerate "
                "it throws away the micro-batches before"
            )
            self._tell("accelerate.cleared-nothing", "optimizer.zero_grad", what)
        if not loop.state.micro_batches and (self.boundary or not loop.state.backwards) and not self._by_engine:
            optimizer.zero_grad(set_to_none=set_to_none)

    # --- clipping ---

    def clip_norm(self, parameters: Any, clip: ClipNorm) -> torch.Tensor:
        """Lets ``step`` clip so (``_choose``); returns the norm that it will find, of averaged and unscaled gradients.

        Collective where they are sharded. nan where the window has not ended, as what lies there is no gradient of it.
        """
        if self._by_engine:
            return self._clipped_by_engine(clip)
        norm = self._choose(parameters, clip)
        if norm is not None:
            return norm
        if not self.boundary:
            return torch.tensor(float("nan"))
        return self.ready.loop.norm(clip.norm_type)

    def _clipped_by_engine(self, clip: ClipNorm) -> torch.Tensor:
        """The norm at DeepSpeed's last step, as accelerate gives it: DeepSpeed clips by what its config says.

        Raises ``NotOffered`` where that says another number, or none though one is wanted: accelerate passes over it.
        """
        norm = self.ready.grad_norm
        told = torch.tensor(float("nan")) if norm is None else norm
        if self.planned is None and clip.max_norm == math.inf:  # the script wants the norm alone
            return told
        if not isinstance(self.planned, ClipNorm):
            said = f'write "gradient_clipping": {clip.max_norm} into its config'
            raise NotOffered("clipping under DeepSpeed", said, "accelerate.clips-otherwise")
        if clip != self.planned:
            said = f"its config says gradient_clipping {self.planned.max_norm}, by the 2-norm; write the same number"
            raise NotOffered(f"clipping by {clip.max_norm} under DeepSpeed", said, "accelerate.clips-otherwise")
        return told

    def clip_value(self, parameters: Any, clip: ClipValue) -> None:
        """Lets ``step`` clip so (``_choose``)."""
        if self._by_engine:
            said = "write accelerator.clip_grad_norm_(...)"
            raise NotOffered("clipping by value under DeepSpeed", said, "accelerate.clips-otherwise")
        self._choose(parameters, clip)

    def _choose(self, parameters: Any, clip: ClipNorm | ClipValue) -> torch.Tensor | None:
        """Lets ``step`` clip all that is trained, where gradients are averaged and unscaled; None then.

        Anything else is clipped now, as accelerate does it, and the norm is returned. Warns, once, of an iterator at
        its end, and inside a window, where accelerate clips what has come together so far.
        """
        chosen: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not chosen:
            what = (
                "clipping was given no parameter, and clips nothing, as under accelerate: an iterator such as "
                "itertools.chain(...) is at its end after its first use"
            )
            self._tell("accelerate.clips-nothing", "accelerator.clip_grad_norm_", what)
            return torch.tensor(0.0)
        if not (self.driven and self._all_trained(chosen)):
            return self._clipped_now(chosen, clip)
        if self.boundary:
            self.ready.loop.clip = clip
        else:
            what = (
                "clipping was asked for in a micro-batch that does not end its window, and is left out: accelerate "
                "would clip what has come together so far, of each rank alone"
            )
            self._tell("accelerate.clips-inside-window", "accelerator.clip_grad_norm_", what)
        return None

    def _all_trained(self, chosen: Sequence[Any]) -> bool:
        given = {id(param) for param in chosen}
        return all(id(param) in given for param in self.ready.loop.trained())

    def _clipped_now(self, chosen: list[Any], clip: ClipNorm | ClipValue) -> torch.Tensor:
        if self.ready.scaler is not None:
            what = "give model.parameters() of the one model, or write mixed_precision='bf16'"
            raise NotOffered("clipping a part of the parameters under fp16", what, "accelerate.clips-otherwise")
        norm = self.ready.loop.engine.clip(self.ready.model, clip, chosen)
        return torch.tensor(0.0) if norm is None else norm

    def _tell(self, rule: str, where: str, what: str) -> None:
        """Warns where a script trains otherwise than under accelerate."""
        self.ready.loop.court.hear((found(rule, where, what),))


@contextmanager
def not_averaged(ready: Prepared) -> Iterator[None]:
    """Forwards and backwards inside leave each rank its own gradients."""
    before = ready.loop.state.forced
    ready.loop.average(forced=False)
    try:
        yield
    finally:
        ready.loop.average(forced=before)


@contextmanager
def averaged_in_backward(ready: Prepared) -> Iterator[None]:
    """The backward inside averages all that has come together, though its forward ran in ``not_averaged``.

    Under DDP alone; elsewhere a backward asks what the engine was told last (torch ``Reducer``).
    """
    model = ready.model
    if not isinstance(model, DistributedDataParallel):
        yield
        return
    before = ready.loop.state.forced
    ready.loop.average(forced=True)
    model.reducer.prepare_for_backward([])  # what the end of an averaging forward does
    ready.loop.forward_ran()
    try:
        yield
    finally:
        ready.loop.average(forced=before)


@frozen
class GradientState:
    """A view of one ``Accelerator``."""

    num_steps: int
    """Micro-batches of a window."""
    _ends_window: Callable[[], bool]
    _passes: Passes

    @staticmethod
    def _reset_state() -> None:
        """Nothing: there is no state that accelerators share."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the present micro-batch ends its window."""
        return self._ends_window()

    @property
    def active_dataloader(self) -> Any:
        """The loader that is being read, the innermost of several; None outside of any."""
        return self._passes.under_way[-1] if self._passes.under_way else None

    @property
    def dataloader_references(self) -> list[Any]:
        """All that are being read, the innermost last."""
        return list(self._passes.under_way)

    @property
    def in_dataloader(self) -> bool:
        """Whether any is."""
        return bool(self._passes.under_way)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the batch in use is the last of its pass."""
        return bool(getattr(self.active_dataloader, "end_of_dataloader", False))

    @property
    def remainder(self) -> int:
        """Samples of the pass beyond whole batches of all ranks; -1 outside of one, and where nobody knows."""
        return int(getattr(self.active_dataloader, "remainder", -1))
