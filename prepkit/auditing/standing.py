"""Where a rank stands still: its program waits for other ranks inside a call of torch's, and computes nothing."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from attrs import define, field

from prepkit.observe.prepared.around import is_of_library, line_of_program
from prepkit.ranks.arrivals import LOOK_S, Arrivals

WAITS = (
    *(f"distributed/{one}.py" for one in ("distributed_c10d", "_functional_collectives", "nn/functional")),
    *("autograd/graph.py", "nn/parallel/distributed.py"),
)
"""Files of torch's in which a thread stands that waits for other ranks: in a collective, a backward, or DDP."""
OURS = __name__.partition(".")[0]
COMPUTES = 0.05
"""Of the time between two looks, how much of a processor a process takes that does something."""


@define(eq=False)
class Standing:
    """Tells ``arrivals``, from a thread of its own, since when the thread that has made it stands still, and where."""

    arrivals: Arrivals
    _thread: int = field(factory=threading.get_ident, init=False)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it looks."""
        over = threading.Event()
        thread = threading.Thread(target=self._looks, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(LOOK_S)  # it may wait for a store that does not answer

    def _looks(self, over: threading.Event) -> None:
        since, spent, place = time.monotonic(), time.process_time(), ""
        while not over.wait(LOOK_S):
            now, used, before = time.monotonic(), time.process_time(), place
            place = waits_at(sys._current_frames().get(self._thread))
            if place != before or used - spent > COMPUTES * LOOK_S:
                since = now
            spent = used
            self.arrivals.stands(place, now - since)


def waits_at(frame: FrameType | None) -> str:
    """The call of the program in which this frame waits for other ranks, with its line; empty: it does not."""
    call, inside = "", False
    while frame is not None and is_of_library(frame):
        inside = inside or frame.f_code.co_filename.endswith(WAITS)
        call, frame = _name(frame) or call, frame.f_back
    return f"{call} ({line_of_program([frame])})" if inside and frame is not None else ""


def _name(frame: FrameType) -> str:
    """What it is called, but for what torch puts around each collective to log it, and for what listens to it."""
    around = frame.f_globals.get("__name__", "").startswith(OURS) or frame.f_code.co_filename.endswith("c10d_logger.py")
    return "" if around else frame.f_code.co_name
