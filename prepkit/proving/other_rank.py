"""One process in the place of another rank: what a forward asks of its rank is answered as it was there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from traceback import walk_tb
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore  # torch has no public door to its fake group

from prepkit.facts.proof import OWN_COLLECTIVE
from prepkit.observe.prepared.around import line_of_program, own_frames
from prepkit.observe.prepared.instead import around_calls
from prepkit.proving.parts_of import CannotReplay
from prepkit.proving.record_file import Head
from prepkit.ranks.launcher import LOCAL_RANK, RANK
from prepkit.ranks.world import world

VARIABLES = (
    *RANK,
    *LOCAL_RANK,
    "GROUP_RANK",
    "ROLE_RANK",
    "NODE_RANK",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
)
"""Variables in which a launcher tells a process which one it is."""
ENVIRONMENTS = ("lightning.fabric", "lightning_fabric")
"""Packages of Lightning that have classes of what tells a strategy its rank."""
_TELLS = ContextVar("_TELLS", default=True)


def variables() -> tuple[tuple[str, str], ...]:
    """What a launcher has told this process, by the names of variables."""
    return tuple((name, os.environ[name]) for name in dict.fromkeys(VARIABLES) if name in os.environ)


@contextmanager
def itself() -> Iterator[None]:
    """Inside, torch knows this process again, as for a collective of prepkit's own."""
    token = _TELLS.set(False)
    try:
        yield
    finally:
        _TELLS.reset(token)


@contextmanager
def standing_for(head: Head) -> Iterator[None]:
    """Inside, torch, the variables of a launcher, accelerate and Lightning answer as on the rank of this record."""
    told = dict(head.variables)
    local = next((int(told[name]) for name in LOCAL_RANK if name in told), None)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, told))
        if world().running:
            stack.enter_context(around_calls(distributed_c10d, "_get_default_group", _of(head.asked)))
        for shared in _shared():
            mine = {"process_index": head.asked} | ({} if local is None else {"local_process_index": local})
            stack.enter_context(patch.dict(shared, {key: mine[key] for key in mine.keys() & shared.keys()}))
        for one in _environments():
            stack.enter_context(around_calls(one, "global_rank", lambda *_: head.asked))
        yield


@contextmanager
def as_one_of(processes: int) -> Iterator[None]:
    """Inside, a process of no group is rank 0 of so many, as far as it asks; a collective meets nobody."""
    if world().running:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=processes)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _of(rank: int) -> Any:
    """What ``get_rank`` gets for the group of all; everybody else gets the group itself."""
    asks = distributed_c10d.get_rank.__code__

    def group(plain: Any) -> Any:
        frame = sys._getframe(2)  # behind the function in the other's place
        return _Stands(rank) if frame.f_code is asks and _TELLS.get() else plain()

    return group


class _Stands:
    """Says its rank."""

    def __init__(self, number: int) -> None:
        self.number = number

    def rank(self) -> int:
        """As of a process group."""
        return self.number


def _shared() -> Iterator[dict[str, Any]]:
    """Yield what all states of accelerate in this process share."""
    module = sys.modules.get("accelerate.state")
    for name in ("PartialState", "AcceleratorState"):
        if isinstance(shared := getattr(getattr(module, name, None), "_shared_state", None), dict):
            yield shared


def _environments() -> Iterator[type]:
    """Yield classes of Lightning's, and of those that derive from them, that say a global rank themselves."""
    for home in ENVIRONMENTS:
        module = sys.modules.get(f"{home}.plugins.environments.cluster_environment")
        waiting = [] if module is None else [module.ClusterEnvironment]
        while waiting:
            waiting += (one := waiting.pop()).__subclasses__()
            if "global_rank" in vars(one):
                yield one


def not_plainly(error: Exception) -> CannotReplay:
    """What is raised where a model has failed in a replay; in a process of no group, where it asks for others."""
    if "process group has not been initialized" not in str(error):
        return CannotReplay(f"the model does not run plainly: {type(error).__name__}: {error!s:.200}")
    line = line_of_program(reversed([frame for frame, _ in walk_tb(error.__traceback__)]))
    said = f"the model asks other ranks in its forward or backward{f' ({line})' if line else ''}"
    return CannotReplay(f"{said}, as by a collective of its own, {OWN_COLLECTIVE}", sends=True)


def refused(collective: str) -> CannotReplay:
    """What is raised where a model asks other ranks in a replay, which do something else."""
    where = ", ".join(filter(None, (collective, line_of_program(own_frames()))))
    said = f"the model calls a collective of its own ({where}) in its forward or backward"
    return CannotReplay(f"{said}, {OWN_COLLECTIVE}", sends=True)
