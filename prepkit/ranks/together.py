"""Code around an apply under the guard of the ranks: what fails in it ends the apply of every other rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from attrs import define
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, but not exported for checkers
from torch.distributed.distributed_c10d import _get_default_store  # torch has no public door to it

from prepkit.ranks import launcher, rendezvous
from prepkit.ranks.all_or_none import RankGuard
from prepkit.ranks.world import world


@define
class _Shared:
    """Where nested calls of ``together`` find the guard that they share."""

    guard: RankGuard | None = None


_shared: ContextVar[_Shared | None] = ContextVar("_shared", default=None)


@contextmanager
def together(timeout_s: float = 600.0) -> Iterator[RankGuard | None]:
    """All ranks or none: what this rank raises inside ends the ``apply`` of every other one within seconds.

    Put it around everything that leads to ``apply``: reading the config, building model and plan::

        with pk.processes.together():
            plan = pk.build_plan(cfg, make_model(), optimizer=optimizer)
            ready = pk.apply(plan)

    The other ranks raise ``ApplyHalted`` with a ``RankFailed`` that names this rank and what it raised. ``apply`` does
    the same by itself for what happens inside it. Where training stands inside as well, ``RankFailed`` that names the
    rank is raised in the place of torch's error about a closed connection. Does nothing in a process on its own.
    """
    shared = _shared.get() or _Shared()
    if shared.guard is None or shared.guard.outcome:
        shared.guard = rank_guard(timeout_s)
    token = _shared.set(shared)
    try:
        yield shared.guard
    except BaseException as error:
        if shared.guard is not None and shared.guard.outcome == "well":  # what failed is on the way to the next apply
            if (lost := shared.guard.peers.lost(error)) is not None:  # or in training, and nobody is there to be told
                raise lost from error
            shared.guard = rank_guard(timeout_s)
        if shared.guard is not None:
            shared.guard.report_failure(error)
        raise
    finally:
        _shared.reset(token)


def rank_guard(timeout_s: float) -> RankGuard | None:
    """The guard of this process; None where it is alone: without a launcher, or in a fake group, without data.

    Waits for the other ranks where the group is still to be started; raises as ``rendezvous.meet`` does.
    """
    ranks = world()
    if ranks.running:
        if not ranks.carries_data:
            return None
        store = PrefixStore("prepkit", _get_default_store())
        return RankGuard(store=store, rank=ranks.rank, world=ranks.size, timeout_s=timeout_s)
    if launcher.processes() == 1:
        return None
    met, rank, size = rendezvous.meet(timeout_s)
    return RankGuard(store=met, rank=rank, world=size, timeout_s=timeout_s, rendezvous=met)
