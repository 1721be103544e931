"""Saving when the scheduler of a cluster takes the machine away: SIGTERM ends the run at the end of a window, saved."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from attrs import define

from prepkit.live.training.prepared import Prepared

CODE = 128 + signal.SIGTERM
"""The exit code of a process that SIGTERM has ended, as shells, Slurm and torchrun read it."""

LOG = logging.getLogger("prepkit")


class Preempted(SystemExit):
    """The run was told to end, and is saved. Leaves the process with ``CODE``, unless it is caught."""


@define
class _Signals:
    """Whether any rank was told to end. Ranks hear of it at different moments, and have to save at the same one."""

    told: bool = False
    """Whether this one was."""
    decided: bool = False
    """Whether all have heard of it, and leave as soon as it suits the loop."""
    group: Any = None
    asked: Any = None
    """The question of the last window, which the ranks answer each other while the next one runs."""
    answer: torch.Tensor | None = None

    def ask(self) -> bool:
        """At the end of a window: what all said at the end of the last one, the same on every rank."""
        if not dist.is_initialized():
            return self.told
        before = self.heard()
        self.answer = torch.tensor(int(self.told))
        self.asked = dist.all_reduce(self.answer, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        return before

    def heard(self) -> bool:
        """The answer to the last question; collective only in that all have asked it."""
        if self.asked is None or self.answer is None:
            return False
        self.asked.wait()
        self.asked = None
        return bool(self.answer.item())


@contextmanager
def save_on_sigterm(ready: Prepared, folder: str, *, keep: int = 1) -> Iterator[None]:
    """Around the training loop: SIGTERM to any rank saves after the end of the next window but one, and leaves.

    Where training loaders were prepared it leaves before the next batch is read, so that what the loop does with the
    last step, such as logging, is done; else inside ``step``. Then every rank raises ``Preempted``, whose exit code is
    143. Give the job two windows, what follows them, and the time of a save until it is killed (Slurm ``--signal``,
    Kubernetes ``terminationGracePeriodSeconds``). Ranks tell each other on a group of their own on gloo, in the
    background of a window. Collective; for the main thread. Raises ``CheckpointFailed`` for a folder that could not be
    saved into.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("save_on_sigterm handles a signal, which Python lets the main thread do only; call it there")
    ready.check_saving(folder)
    signals = _Signals(group=dist.new_group(backend="gloo") if dist.is_initialized() else None)

    def told(number: int, frame: FrameType | None) -> None:
        del number, frame
        signals.told = True

    def leave() -> None:
        LOG.warning("SIGTERM: saving into %s and leaving", folder)
        ready.save(folder, keep=keep)
        raise Preempted(CODE)

    def at_window() -> None:
        overdue, signals.decided = signals.decided, signals.decided or signals.ask()
        if overdue or (signals.decided and not between_batches):
            leave()

    def before_batch() -> None:
        if signals.decided and not ready.pending:
            leave()

    before = signal.signal(signal.SIGTERM, told)
    ready.at_window = at_window
    between_batches = ready.before_batch(before_batch)
    try:
        yield
        ready.at_window = None
        if not ready.pending and (signals.decided or signals.ask() or signals.heard()):
            leave()
    finally:
        ready.at_window = None
        ready.before_batch(None)
        signal.signal(signal.SIGTERM, before)
