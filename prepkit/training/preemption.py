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
from attrs import define

from prepkit.court import refused
from prepkit.ranks.world import new_group, ranks_of, world
from prepkit.training.prepared import Prepared

CODE = 128 + signal.SIGTERM
"""The exit code of a process that SIGTERM has ended, as shells, Slurm and torchrun read it."""

LOG = logging.getLogger("prepkit")


class Preempted(SystemExit):
    """SIGTERM has ended the run, which is saved. Leaves the process with ``CODE``, unless it is caught."""


@define
class _Signals:
    """SIGTERM on any rank. It comes at different moments on each, and all have to save at the same one."""

    told: bool = False
    """This rank got it."""
    decided: bool = False
    """All ranks know of it, and leave as soon as it suits the loop."""
    group: Any = None
    asked: Any = None
    """The question of the last window, which the ranks answer each other while the next one runs."""
    answer: torch.Tensor | None = None

    def ask(self) -> bool:
        """Ask at the end of a window; return what all answered at the end of the last one, the same on every rank."""
        if self.group is None:
            return self.told
        before = self.heard()
        self.answer = torch.tensor(int(self.told), device="cpu")
        self.asked = ranks_of(self.group).ask_worst(self.answer)
        return before

    def heard(self) -> bool:
        """Wait for the answer to the last question, which all ranks have asked."""
        if self.asked is None or self.answer is None:
            return False
        self.asked.wait()
        self.asked = None
        return bool(self.answer.item())


@contextmanager
def save_on_sigterm(ready: Prepared, folder: str, *, keep: int = 1) -> Iterator[None]:
    """Save after SIGTERM to any rank, at the end of the next window but one, and leave. Around the training loop.

    Where training loaders were prepared it leaves before the next batch is read, so that what the loop does with the
    last step, such as logging, is done; else inside ``step``. Then every rank raises ``Preempted``, whose exit code is
    143. Give the job two windows, what follows them, and the time of a save until it is killed (Slurm ``--signal``,
    Kubernetes ``terminationGracePeriodSeconds``). Ranks tell each other on a group of their own on gloo, in the
    background of a window. Collective; for the main thread. Raises ``RunRefused`` or ``CheckpointFailed`` for a folder
    that cannot be saved into.
    """
    if threading.current_thread() is not threading.main_thread():
        what = f"it was called in the thread {threading.current_thread().name!r}"
        raise refused("sigterm.other-thread", "save_on_sigterm", what)
    ready.checkpoints.check(folder)
    signals = _Signals(group=new_group("gloo") if world().carries_data else None)

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
        if signals.decided and not ready.loop.pending:
            leave()

    before = signal.signal(signal.SIGTERM, told)
    ready.loop.at_window = at_window
    between_batches = ready.loop.passes.before_batch(before_batch)
    try:
        yield
        ready.loop.at_window = None
        if not ready.loop.pending and (signals.decided or signals.ask() or signals.heard()):
            leave()
    finally:
        ready.loop.at_window = None
        ready.loop.passes.before_batch(None)
        signal.signal(signal.SIGTERM, before)
