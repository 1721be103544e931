"""Where a script for accelerate is between the forward of a micro-batch and its end."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field

from prepkit.compat.accelerate.not_offered import PAGE, NotOffered
from prepkit.compat.accelerate.synchronization import not_averaged
from prepkit.config import Clip, ClipNorm, ClipValue
from prepkit.training.prepared import Prepared


@define
class AcceleratedLoop:
    """The loop of a ``Prepared``; without an optimizer of its own, a count of micro-batches whose gradients add up."""

    ready: Prepared
    planned: Clip
    """How the plan clips, where the script does not say it."""
    boundary: bool = field(default=True, init=False)
    """Whether the present micro-batch ends its window (accelerate's ``sync_gradients``)."""
    stepped: bool = field(default=False, init=False)
    """Whether the present micro-batch has been ended."""
    inside: bool = field(default=False, init=False)
    """Whether the script is inside ``accumulate``."""
    held: bool = field(default=False, init=False)
    """Whether it is inside ``no_sync``."""
    _told: set[str] = field(factory=set, init=False)
    counted: int = field(default=0, init=False)
    """Micro-batches of this window that have ended, where no optimizer was prepared."""

    def __attrs_post_init__(self) -> None:
        self.ready.loop.leave_clearing()  # ``optimizer.zero_grad`` does
        if not self.steps:
            self.ready.loop.average(forced=True)

    @property
    def steps(self) -> bool:
        """Whether there is an optimizer, so that ``ready.step`` counts."""
        return self.ready.optimizer is not None

    def ends_window(self) -> bool:
        """Whether the micro-batch that runs now is the last of its window."""
        if self.steps:
            return self.ready.loop.ends_window
        accumulation = self.ready.plan.owners.accumulation_steps
        return self.ready.loop.state.at_last_batch or self.counted + 1 >= accumulation

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """One micro-batch; one whose optimizer was not stepped, because it ends no window, is counted all the same."""
        self.inside, self.stepped = True, False
        self.boundary = self.ends_window()
        try:
            if not self.steps:
                yield from self._counted()
                return
            with self.ready.accumulate():
                yield
                if not (self.stepped or self.boundary) and self.ready.loop.pending:
                    self.step()
        finally:
            self.inside = False

    def _counted(self) -> Iterator[None]:
        ready = self.ready
        ready.loop.average(forced=self.boundary or ready.plan.run.average_each)
        yield
        self.counted = 0 if self.boundary else self.counted + 1
        ready.loop.average(forced=True)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients stay each rank's own, and another backward of the same micro-batch follows."""
        if self.ready.loop.plan.engine_steps:
            raise NotOffered(
                "no_sync under DeepSpeed", "write gradient_accumulation_steps and `with accelerator.accumulate(model):`"
            )
        self.held = True
        try:
            with not_averaged(self.ready):
                yield
        finally:
            self.held = False

    def backward(self, loss: torch.Tensor) -> None:
        """Notes whether the window ends here."""
        window = self.ready.plan.owners.accumulation_steps
        if window > 1 and not self.inside:
            raise NotOffered(
                "gradient_accumulation_steps without accumulate", "write `with accelerator.accumulate(model):`"
            )
        self.stepped = False
        self.boundary = self.ends_window()
        if self.steps:
            self.ready.backward(loss, more=self.held)
            return
        scaler = self.ready.scaler
        loss = loss / window
        (loss if scaler is None else scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Ends the micro-batch. Raises ``NotOffered`` where ``accelerator.backward`` has not run in it."""
        if not self.ready.loop.state.backwards:
            what = "write accelerator.backward(loss) in the place of loss.backward(), and one step for each"
            raise NotOffered("optimizer.step() without accelerator.backward(loss) since the last", what)
        self.ready.step()
        self.stepped = True
        self.ready.loop.clip = self.planned  # until the script asks again

    def zero_grad(self) -> None:
        """Clears the gradients behind the end of a window; inside one they are kept.

        So does accelerate, but in the window's last micro-batch: a ``zero_grad`` above its forward throws away those
        before it. Here they stay, and a warning says so, once.
        """
        if self.boundary and self.ready.loop.state.backwards:
            raise NotOffered("zero_grad before the step", "call optimizer.step() first")
        if self.boundary and self.inside and self.ready.loop.pending:
            self._tell(
                "optimizer.zero_grad() was called at the top of the last micro-batch of a window, and cleared nothing: "
                "under accelerate it throws away the micro-batches before. Write it behind optimizer.step()",
                stacklevel=4,
            )
        if not self.ready.loop.pending and not self.ready.loop.plan.engine_steps:
            assert self.ready.optimizer is not None, "who clears has one"
            self.ready.optimizer.zero_grad(set_to_none=True)

    def clip_norm(self, parameters: Any, clip: ClipNorm) -> torch.Tensor:
        """Lets ``step`` clip so (``_choose``); returns the norm that it will find, of averaged and unscaled gradients.

        Collective where they are sharded. nan where the window has not ended, as what lies there is no gradient of it.
        """
        if self.ready.loop.plan.engine_steps:
            return self._clipped_by_engine(clip)
        norm = self._choose(parameters, clip)
        if not self.steps and norm is not None:
            return norm
        ready = self.ready
        if not self.boundary:
            return torch.tensor(float("nan"))
        return ready.loop.norm(clip.norm_type)

    def _clipped_by_engine(self, clip: ClipNorm) -> torch.Tensor:
        """The norm at DeepSpeed's last step, as accelerate gives it: DeepSpeed clips by what its config says.

        Raises ``NotOffered`` where that says nothing, or another number, which accelerate passes over.
        """
        if not isinstance(self.planned, ClipNorm):
            raise NotOffered("clipping under DeepSpeed", f'write "gradient_clipping": {clip.max_norm} into its config')
        if clip != self.planned:
            said = f"its config says gradient_clipping {self.planned.max_norm}, by the 2-norm; write the same number"
            raise NotOffered(f"clipping by {clip.max_norm} under DeepSpeed", said)
        norm = self.ready.grad_norm
        return torch.tensor(float("nan")) if norm is None else norm

    def clip_value(self, parameters: Any, clip: ClipValue) -> None:
        """Lets ``step`` clip so (``_choose``)."""
        self._choose(parameters, clip)

    def _choose(self, parameters: Any, clip: ClipNorm | ClipValue) -> torch.Tensor | None:
        """Lets ``step`` clip so, where gradients are averaged and unscaled; DeepSpeed has to know before.

        Without an optimizer it clips now, and returns the norm where it had to be known. Warns, once, inside a window,
        where accelerate clips what has come together so far.
        """
        if self.ready.loop.plan.engine_steps:
            raise NotOffered("clipping under DeepSpeed", "write gradient_clipping into its config")
        chosen: list[Any] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self.steps:
            return self.ready.loop.engine.clip(self.ready.model, clip, chosen)
        given = {id(param) for param in chosen}
        if any(id(param) not in given for param in self.ready.loop.trained()):
            raise NotOffered(
                "clipping a part of the parameters", "give model.parameters(), or write a loop of your own"
            )
        if self.boundary:
            self.ready.loop.clip = clip
        else:
            self._tell(
                "clipping was asked for in a micro-batch that does not end its window, and is left out: accelerate "
                "would clip what has come together so far, of each rank alone. Write `if accelerator.sync_gradients:` "
                "above it",
                stacklevel=5,
            )
        return None

    def _tell(self, what: str, stacklevel: int) -> None:
        """Warns where a script trains otherwise than under accelerate: once for each way."""
        if what not in self._told:
            self._told.add(what)
            warnings.warn(f"{what}. See {PAGE}", stacklevel=stacklevel)
