"""What one rank of a run does for all of them, and where all meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TextIO

from attrs import frozen

from prepkit.loading.passes import Passes
from prepkit.loading.reduce import How, gather_over_ranks, reduce_over_ranks
from prepkit.ranks import launcher, named_barrier
from prepkit.ranks.peers import Peers, named
from prepkit.ranks.within import check_limit
from prepkit.training import run_log


@frozen(eq=False)
class RunRanks:
    """The ranks of one run: ``ready.ranks``."""

    _peers: Peers | None
    """The others; None: alone."""
    _asked: Callable[[str], None]
    """Raises ``RunRefused`` for a call after ``close``."""
    _passes: Passes
    _same_data: int
    """Neighbouring ranks that read the same samples, and count once."""

    @property
    def is_main(self) -> bool:
        """True on rank 0, which prints and writes what is there once."""
        return launcher.is_main()

    def print(self, *values: Any, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
        """``print`` on the main process alone, above a bar of ``progress`` that is open."""
        run_log.show(self.is_main, values, sep, end, file)

    def progress(self, iterable: Iterable[Any], **options: Any) -> Any:
        """The items, with a bar of tqdm on the main process where a person looks; ``options`` are tqdm's.

        A loader that goes on inside a pass begins its bar there. ``disable=False`` shows the bar in a file as well.
        """
        return run_log.bar(self.is_main, iterable, options)

    def reduce(self, value: Any, how: How = "mean") -> Any:
        """Numbers and tensors, nested or not, as mean, sum, max or min over the data ranks. Collective."""
        with named(self._peers, "ready.ranks.reduce()"):
            self._asked("ready.ranks.reduce()")
            return reduce_over_ranks(value, how, self._same_data)

    def gather(self, value: Any) -> list[Any]:
        """Return what each data rank gives, as a list with an item per rank; for what is small. Collective."""
        with named(self._peers, "ready.ranks.gather()"):
            self._asked("ready.ranks.gather()")
            return gather_over_ranks(value, self._same_data)

    def gather_for_metrics(self, value: Any) -> Any:
        """Return what all ranks have made of the batches in use, each sample once (``loading.gather``). Collective."""
        with named(self._peers, "ready.ranks.gather_for_metrics()"):
            self._asked("ready.ranks.gather_for_metrics()")
            return self._passes.gather(value)

    def barrier(self, name: str = "", *, timeout_s: float = 600.0) -> None:
        """Return when every rank is here, with the same ``name``; host threads meet, devices are not waited for.

        Raises ``RankFailed`` on every rank, naming those that are not there in time, have ended, or came to a barrier
        of another name. Nobody hangs: no process group is asked. Raises ``TypeError`` for a name that is no text, and
        where ``timeout_s`` is no number; ``ValueError`` where it is not above 0 and finite.
        """
        self._asked("ready.ranks.barrier()")
        named_barrier.check_name(name)
        check_limit(timeout_s)
        if self._peers is not None:
            with named(self._peers, "ready.ranks.barrier()"):
                named_barrier.barrier(self._peers, name, timeout_s)
