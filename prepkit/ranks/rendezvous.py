"""Where the ranks of a launch find each other, before there is a process group.

torch's ``env://`` rendezvous waits for as many processes as ``WORLD_SIZE`` says, and names none that does not come.
Here every rank connects on its own, says who it is, and looks at what the others say. The store stays for the life of
the process: a rank that met again at the same port while another still left it would find the old one, or none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache

from attrs import define, field
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not exported

from prepkit.ranks import launcher
from prepkit.ranks.peers import RankFailed
from prepkit.ranks.within import PatientStore, within

LOOK_S = 0.1
"""Seconds between two looks at who has come."""


def meet(timeout_s: float) -> tuple[Store, int, int]:
    """Store, rank and number of ranks. Returns when all ranks are there.

    Rank 0 serves the store, unless the launcher does (torchrun). Raises ``RankFailed`` that names the ranks that have
    not come in time, or were started with another ``WORLD_SIZE`` or the ``RANK`` of another.
    """
    meeting = _meeting(launcher.address())
    try:
        meeting.join(timeout_s)
    except RankFailed:
        raise
    except RuntimeError as error:
        at = f"{meeting.address.host}:{meeting.address.port}"
        who = "the launcher, which serves it, has" if meeting.address.served else "rank 0, which serves it, has"
        what = f"the rendezvous store at {at} (MASTER_ADDR, MASTER_PORT) did not answer within {timeout_s:.0f} s: "
        raise RankFailed(0 if not meeting.address.served else -1, f"{what}{who} not come, or has ended") from error
    assert meeting.store is not None, "it was joined"
    return meeting.store, meeting.address.rank, meeting.address.world


@define(eq=False, repr=False)
class Meeting:
    """One launch, as this rank takes part in it."""

    address: launcher.Address
    store: Store | None = field(default=None, init=False)
    _seated: bool = field(default=False, init=False)

    def join(self, timeout_s: float) -> None:
        """Connects and waits for the other ranks; the second time there is nothing to do."""
        until = time.monotonic() + timeout_s
        limit = timedelta(seconds=timeout_s)
        if self.store is None:
            own = within(timeout_s + 5, lambda: _connect(self.address, limit), "the rendezvous store")
            self.store = PrefixStore(f"prepkit {self.address.attempt}", own)
        self.store.set_timeout(limit)
        if not self._seated:
            _check_in(PatientStore(self.store, timeout_s), self.address, until, timeout_s)
            self._seated = True


@lru_cache(maxsize=1)
def _meeting(address: launcher.Address) -> Meeting:
    return Meeting(address)


def _connect(address: launcher.Address, limit: timedelta) -> Store:
    """As torch ``_create_c10d_store`` does, but without a wait for the others."""
    serves = address.rank == 0 and not address.served
    return TCPStore(
        address.host,
        address.port,
        None,
        serves,
        limit,
        wait_for_workers=False,
        multi_tenant=serves,
        use_libuv=address.libuv,
    )


def _check_in(store: PatientStore, address: launcher.Address, until: float, timeout_s: float) -> None:
    rank, world = address.rank, address.world
    if store.add(f"processes of rank {rank}", 1) > 1:
        raise RankFailed(rank, f"two processes were started with RANK={rank}; give every process a rank of its own")
    store.set(f"world of {rank}", str(world))
    came: set[int] = set()
    while missing := [other for other in range(world) if other not in came]:
        for other in _here(store, missing):
            came.add(other)
            if (theirs := store.get(f"world of {other}")) != str(world):
                what = f"WORLD_SIZE is {world} on rank {rank} and {theirs} on rank {other}"
                raise RankFailed(other, f"{what}; start all processes with the same number")
        if len(came) == world:
            return
        if time.monotonic() > until:
            raise RankFailed(missing[0] if len(missing) == 1 else -1, late(missing, world, timeout_s))
        time.sleep(LOOK_S)


def _here(store: PatientStore, ranks: list[int]) -> Iterator[int]:
    """Those that have come, up to the first that has not: all are waited for anyhow; but at least the first 8."""
    for place, rank in enumerate(ranks):
        if store.check([f"world of {rank}"]):
            yield rank
        elif place >= 8:
            return


def late(missing: list[int], world: int, timeout_s: float) -> str:
    """Name the ranks that have not come."""
    who = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"not all {world} ranks came within {timeout_s:.0f} s; missing: {who}; their logs say why"
