"""What apply returns: the prepared objects, and the same two lines for every engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, evolve, field
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.utils.data.distributed import DistributedSampler

from prepkit.config import XLA, ClipNorm
from prepkit.live.model.unwrap import unwrap
from prepkit.live.ranks import end_groups
from prepkit.live.training import first_step, saving
from prepkit.live.training.drivers import Driver, Stepped, driver
from prepkit.live.training.gradients import Watched, gradients
from prepkit.plan import Plan
from prepkit.plan.drift import Drift


@define(kw_only=True)
class Prepared:
    """Model, optimizer, scheduler and loaders as the plan said, with a count of micro-batches.

    One micro-batch is ``loss = ...; ready.backward(loss); ready.step()``, whatever the engine and the accumulation.
    """

    model: Module
    optimizer: Optimizer | None = None
    scheduler: Any = None
    loaders: tuple[Any, ...] = ()
    plan: Plan = field(repr=False)
    attestation: Any = None
    """What ``verify`` found; None: not verified."""
    drift: tuple[Drift, ...] = field(default=(), repr=False)
    """Facts that were not as planned and do no harm, such as another library version."""
    scaler: torch.amp.GradScaler | None = None
    """Scales the loss of float16 training; None for every other precision. Save its ``state_dict()`` with the rest."""
    started: bool = False
    """Whether apply has started the process group, so that ``close`` ends it."""
    skipped: bool = field(default=False, init=False)
    """Whether the last window ended without an optimizer step, because a gradient overflowed."""
    grad_norm: torch.Tensor | None = field(default=None, init=False)
    """Joint norm of the gradients at the last optimizer step, before clipping; None unless the plan clips by norm."""
    _driver: Driver = field(init=False, repr=False)
    _seen: int = field(default=0, init=False, repr=False)
    """Micro-batches since the last optimizer step."""
    _last: bool = field(default=False, init=False, repr=False)
    """Whether the present micro-batch ends the window before it is full."""
    _looked: bool = field(default=False, init=False, repr=False)
    """Whether the gradients of the first window have been looked at."""
    _watched: Watched | None = field(default=None, init=False, repr=False)
    """Notes the gradients of the first window where the engine takes them away as they come."""
    _backward: bool = field(default=False, init=False, repr=False)
    """Whether ``backward`` has been called, so that gradients are divided and averaged for ``step`` alone."""
    _acting: bool = field(default=False, init=False, repr=False)
    """Whether the optimizer steps because ``step`` says so, or torch makes room for state that is read."""
    _ended: list[Any] = field(factory=list, init=False, repr=False)
    """The groups that ``close`` has ended."""

    def __attrs_post_init__(self) -> None:
        self._driver = driver(self.model)
        if self._driver.step is not None and self.optimizer is not None:
            self._watched = Watched(self.model)
            self._watched.begin()
        if self._driver.step is None and self.optimizer is not None:
            self.optimizer.register_step_pre_hook(self._refuse_foreign_step)
        self._sync()

    @property
    def pending(self) -> int:
        """Micro-batches since the last optimizer step: those whose gradients wait for the end of their window."""
        return self._seen

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of one micro-batch. Divides the loss by the plan's number of micro-batches.

        A window that ``accumulate(last=True)`` cuts short is divided by the full number as well.
        """
        self._backward = True
        if self._driver.backward is not None:
            self._driver.backward(self.model, loss)
            return
        loss = loss / self.plan.owners.accumulation_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types

    def step(self) -> bool:
        """Ends one micro-batch; True when it was the window's last and the optimizer has stepped.

        Then clips, steps the optimizer, ticks the scheduler and clears the gradients, in this order. Where float16
        gradients overflowed neither optimizer nor scheduler steps, ``skipped`` is True and the loss scale goes down
        (behaviour W-5, W-14).
        Raises ``RuntimeError`` without an optimizer; and ``FirstStepRefused`` on every rank, with nothing stepped,
        where the gradients of the first window would train wrongly (``training.first_step``).
        """
        optimizer = self.optimizer
        if optimizer is None:
            raise RuntimeError(
                "there is no optimizer to step: the plan was made without one; build it with optimizer=..., "
                "or with Config(optimizer=AdamW(...)), or leave out ready.step() for inference"
            )
        ended = self._at_boundary()
        if ended and not self._looked:
            self._look_at_first_step()
        if self._driver.step is not None:
            self._step_engine(self._driver.step, ended)
        elif ended:
            with self._stepping():
                self.skipped = not self._step_optimizer(optimizer)
            if not self.skipped:
                self._tick()
            optimizer.zero_grad(set_to_none=True)
        self._seen = 0 if ended else self._seen + 1
        self._last = False
        self._sync()
        return ended and not self.skipped

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Inside, the optimizer may step."""
        self._acting = True
        try:
            yield
        finally:
            self._acting = False

    def _refuse_foreign_step(self, *_: Any) -> None:
        """Before every step of the optimizer (``register_step_pre_hook``): gradients may be neither whole nor averaged.

        Who never calls ``ready.backward``, such as a trainer with a loop of its own, steps as it likes.
        """
        if self._backward and not self._acting:
            raise RuntimeError(
                "optimizer.step() was called after ready.backward(); write ready.step() in its place: it averages over "
                "the ranks, clips, steps, ticks the scheduler and clears the gradients at the end of each window"
            )

    def _look_at_first_step(self) -> None:
        """Once, before the optimizer acts for the first time; the outcome goes into the attestation."""
        if isinstance(self.plan.config.engine, XLA):  # averages inside the optimizer's step
            self._looked = True
            return
        watched = self._watched
        seen = tuple(gradients(self.model) if watched is None else watched.end())
        scaled = self.plan.owners.loss_scaling != "nobody"
        accepted = self.plan.config.overrides
        checks = first_step.look(self.model, seen, scaled=scaled, accepted=accepted, reduced=watched is None)
        self._looked, self._watched = True, None  # what was noted is kept while it refuses: the story stays the same
        if self.attestation is not None:
            self.attestation = evolve(self.attestation, checks=(*self.attestation.checks, *checks))

    def _step_optimizer(self, optimizer: Optimizer) -> bool:
        """Clips and steps; False where the scaler found an overflow, on every rank alike."""
        scaler = self.scaler
        if scaler is not None:
            scaler.unscale_(optimizer)  # a norm of scaled gradients would be clipped to nothing
        self.grad_norm = self._driver.clip(self.model, self.plan.owners.clip, _parameters(optimizer))
        if scaler is None:
            optimizer.step()
            return True
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale() >= scale  # it goes down after an overflow only; torch has no other public sign

    def _step_engine(self, step: Callable[[Module, bool], Stepped], ended: bool) -> None:
        """The engine clips, steps and clears by itself; the scheduler is ours unless the plan says otherwise."""
        done = step(self.model, ended)
        if ended:
            self.skipped = not done.applied
            self.grad_norm = done.norm if isinstance(self.plan.owners.clip, ClipNorm) else None
        if done.applied and self.plan.owners.scheduler == "prepkit":
            self._tick()

    def _tick(self) -> None:
        if self.scheduler is not None:
            for _ in range(self.plan.owners.scheduler_ticks):
                self.scheduler.step()

    def unwrap(self, *, keep_autocast: bool = True, keep_compiled: bool = True) -> Module:
        """The module that was given, out of its wrappers, for saving; without both also out of prepkit's hands.

        See ``live.unwrap``. What is sharded in place stays sharded.
        """
        return unwrap(self.model, keep_autocast=keep_autocast, keep_compiled=keep_compiled)

    def save(self, folder: str) -> None:
        """Writes model, optimizer, scheduler and scaler, every rank its shards. Collective; see ``training.saving``.

        The checkpoint that lay in the folder counts until the new one is whole. Raises ``RuntimeError`` inside an
        accumulation window: its gradients are in no checkpoint.
        """
        if self.pending:
            raise RuntimeError(
                f"{self.pending} of {self.plan.owners.accumulation_steps} micro-batches of this window have run, and a "
                "checkpoint holds no gradients; save after a step() that returned True"
            )
        with self._stepping():
            saving.save(folder, self.model, self.optimizer, self._more())

    def resume(self, folder: str) -> None:
        """Goes on from what ``save`` has written, on any number of ranks and any mesh. Collective."""
        if self.pending:
            raise RuntimeError(
                f"{self.pending} of {self.plan.owners.accumulation_steps} micro-batches of this window have run, and "
                "their gradients belong to what is replaced; resume before the first backward, or after a step() that "
                "returned True"
            )
        with self._stepping():
            saving.resume(folder, self.model, self.optimizer, self._more())

    def export(self, folder: str) -> None:
        """Writes the whole model as safetensors, for ``from_pretrained``. Collective; rank 0 holds all of it."""
        self._more()
        saving.export(folder, self.model)

    def _more(self) -> dict[str, Any]:
        """What is saved beside model and optimizer. Raises ``RuntimeError`` for an engine that has its own format."""
        if self._driver.step is not None:
            name = type(self.model).__name__
            ours = "prepkit.live.training.deepspeed_files has save(ready, folder), resume and export for it"
            raise RuntimeError(f"a {name} has checkpoints of its own; {ours}")
        return {"scheduler": self.scheduler, "scaler": self.scaler}

    def close(self) -> None:
        """Lets go of the wrapper, then ends the process group if apply has started it. For the end of training.

        Afterwards ``model`` is the module that was given; keep no other reference to the wrapper. Collective where
        the group is ended: every rank waits for the others, so that none loses its last collective.
        """
        self.model = unwrap(self.model)
        self._driver = driver(self.model)
        gc.collect()  # a DDP wrapper refers to itself; one that outlives its group can deadlock when it goes
        if self.started and dist.is_initialized():
            dist.barrier()
            self._ended += end_groups.end()

    @contextmanager
    def accumulate(self, *, last: bool = False) -> Iterator[None]:
        """One micro-batch: forward, ``backward`` and ``step`` inside. Needed only to end a window early.

        ``last=True``, as for the last batch of a loader, makes ``step`` step the optimizer whatever the count.
        """
        self._last = last
        self._sync()
        try:
            yield
        finally:
            self._last = False
            self._sync()

    def set_epoch(self, epoch: int) -> None:
        """Shuffles every sharded loader anew; the same epoch gives the same order (torch ``DistributedSampler``)."""
        for loader in self.loaders:
            sampler = getattr(loader, "sampler", None)
            if isinstance(sampler, DistributedSampler):
                sampler.set_epoch(epoch)

    def _at_boundary(self) -> bool:
        return self._last or self._seen + 1 >= self.plan.owners.accumulation_steps

    def _sync(self) -> None:
        """Gradients are averaged in the last backward of a window only; DDP wants to know before the forward."""
        self._driver.sync(self.model, self._at_boundary())


def _parameters(optimizer: Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]
