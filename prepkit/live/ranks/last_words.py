"""What a rank leaves in the rendezvous store when its script ends in the midst of a run: what it raised, and where.

Whoever loses the connection to it repeats the words. A process that is killed leaves none, nor does one that
``multiprocessing`` started, which ends without the exit functions of Python. One that gloo or NCCL aborts, as where
ranks call different collectives, shows in its log where its Python was.
"""

from __future__ import annotations

import atexit
import faulthandler
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prepkit.live.ranks.peers import Peers


def leave_at_exit(peers: Peers) -> None:
    """The words of this rank are written when its script ends, unless ``take_back`` was called before.

    What ends it at once, such as an abort, writes the lines that its threads were at to standard error, where nobody
    has asked for that before (``faulthandler``); it stays so.
    """
    peers.at_exit = partial(_leave, peers)
    atexit.register(peers.at_exit)
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
        with suppress(OSError, ValueError, AttributeError):  # one without a file descriptor, as in a notebook
            faulthandler.enable(sys.__stderr__)


def take_back(peers: Peers) -> None:
    """The run was closed: its end is nobody's loss."""
    if peers.at_exit is not None:
        atexit.unregister(peers.at_exit)
        peers.at_exit = None


def words_of(peers: Peers, rank: int) -> str:
    """What the rank has left, to be put behind ``has ended``; empty where it left nothing, or the store has gone."""
    with suppress(RuntimeError):
        if peers.store.check([f"words/{rank}"]):
            return f" ({peers.store.get(f'words/{rank}')})"
    return ""


def _leave(peers: Peers) -> None:
    error: BaseException | None = getattr(sys, "last_value", None)  # set by Python for what ended the script
    how = "its script came to an end" if error is None else f"it raised {type(error).__name__}: {error!s:.300}"
    where = f"; the last call of its run was {peers.last_call}" if peers.last_call else ""
    with suppress(RuntimeError):  # at once, without the threads of ``PatientStore``: none starts at the exit
        peers.store.store.set(f"words/{peers.rank}", f"{how}{where}, before ready.close()")
