"""The processes of a run as one value: ``world()`` says who this one is, and what it returns asks the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

T = TypeVar("T")
"""The type of a value that is gathered."""

_ALONE = ContextVar("_ALONE", default=False)


@frozen(kw_only=True)
class Ranks:
    """The ranks of one process group, seen from one of them.

    Its methods, but for ``wire``, are collective where the group carries data: every rank has to call them. Elsewhere
    they communicate nothing, and answer as if every rank had given what this one has given.
    """

    rank: int = 0
    """Number of this process in the group."""
    size: int = 1
    """Number of ranks in the group; 1 without a process group."""
    backend: str = ""
    """Device types and their backends, such as ``cpu:gloo,cuda:nccl``; empty without a process group."""
    group: dist.ProcessGroup | None = None
    """A subgroup; None: the default group, or none."""

    @property
    def running(self) -> bool:
        """True in a process group, even of one rank or of torch's fake backend."""
        return bool(self.backend)

    @property
    def carries_data(self) -> bool:
        """True where there are other ranks that can be reached; False in torch's fake group, which sends nothing."""
        return self.size > 1 and "fake" not in self.backend

    @property
    def members(self) -> tuple[int, ...]:
        """Numbers that the ranks of the group have in the default group, in the order of the group."""
        if not self.running:
            return (0,)
        return tuple(dist.get_process_group_ranks(dist.group.WORLD if self.group is None else self.group))

    @property
    def is_first(self) -> bool:
        """True on rank 0, and in a process on its own."""
        return self.rank == 0

    def wire(self, near: torch.device | None = None) -> torch.device:
        """The device on which tensors travel: ``near`` if the backend serves it, else the host, else an accelerator."""
        served = [pair.partition(":")[0] for pair in self.backend.split(",") if pair]
        if near is not None and (near.type in served or not served):
            return near
        return torch.device("cpu" if "cpu" in served or not served else served[0])

    def same(self, values: object) -> bool:
        """True on every rank where all have given values of the same ``repr``. Sends 32 bytes per rank."""
        if not self.carries_data:
            return True
        digest = hashlib.sha256(repr(values).encode()).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self.wire())
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self.group)
        return len({bytes(row.tolist()) for row in gathered}) == 1

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in the order of the ranks, pickled on their way."""
        if not self.carries_data:
            return [value] * self.size
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone

    def from_first(self, value: T) -> T:
        """The value of rank 0, pickled on its way; those of the others are ignored."""
        return self.sent_by(0, value)

    def sent_by(self, rank: int, value: T) -> T:
        """The value of this rank of the group, pickled on its way; those of the others are ignored."""
        if not self.carries_data:
            return value
        sent = [value]
        source = rank if self.group is None else dist.get_global_rank(self.group, rank)
        dist.broadcast_object_list(sent, src=source, group=self.group)
        return sent[0]

    def worst(self, values: Tensor) -> Tensor:
        """The largest of each element over the ranks, as a new tensor on the same device."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def least(self, values: Tensor) -> Tensor:
        """The smallest of each element over the ranks, as a new tensor on the same device."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def spread(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and the largest of each element, of a signed dtype, in one collective."""
        negative, largest = self._reduced(torch.stack((-values, values)), dist.ReduceOp.MAX)
        return -negative, largest

    def total(self, values: Tensor) -> Tensor:
        """The sum of each element over the ranks, as a new tensor on the same device."""
        if not self.carries_data:
            return values.detach() * self.size
        return self._reduced(values, dist.ReduceOp.SUM)

    def average(self, values: Tensor) -> None:
        """Put the mean over the ranks in the place of each element, without a copy. On a device of the backend."""
        if self.running:
            dist.all_reduce(values, group=self.group)
            values /= self.size

    def parts(self, values: Tensor, into: list[Tensor] | None = None) -> list[Tensor]:
        """The tensors of all ranks, of one shape and dtype, rank by rank; ``into``: written into these."""
        if into is None and not self.carries_data:
            return [values] * self.size
        everyone = [torch.empty_like(values) for _ in range(self.size)] if into is None else into
        dist.all_gather(everyone, values, group=self.group)
        return everyone

    def send(self, values: Tensor, rank: int) -> None:
        """Put the tensor of this rank of the group in the place of everybody else's, of the same shape and dtype."""
        if self.carries_data:
            dist.broadcast(values, src=self.members[rank], group=self.group)

    def scatter(self, values: list[Any] | None) -> Any:
        """Give each rank its item of the list of rank 0, pickled on its way; the others give None."""
        got: list[Any] = [None]
        dist.scatter_object_list(got, values, src=self.members[0], group=self.group)
        return got[0]

    def ask_worst(self, values: Tensor) -> Any:
        """Begin to put the largest of each element over the ranks in its place; what is returned has a ``wait``."""
        return dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group, async_op=True)

    def meet(self) -> None:
        """Returns when every rank is here, or fails after the group's time-out."""
        if self.carries_data:
            dist.barrier(group=self.group)

    def _reduced(self, values: Tensor, how: Any) -> Tensor:
        sent = values.detach().to(self.wire(values.device), copy=True)
        if self.carries_data:
            dist.all_reduce(sent, op=how, group=self.group)
        return sent.to(values.device)


def world() -> Ranks:
    """All ranks of the run as they are now: of torch's default group, or this process on its own."""
    return ranks_of(None)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, ``world()`` is this process on its own, so that nothing waits for ranks that do not come."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


def ranks_of(group: dist.ProcessGroup | None) -> Ranks:
    """The ranks of a group; None: of the default group, or this process on its own where there is none."""
    if not (dist.is_available() and dist.is_initialized()) or (group is None and _ALONE.get()):
        return Ranks()
    return Ranks(
        rank=dist.get_rank(group),
        size=dist.get_world_size(group),
        backend=str(dist.get_backend_config(group)),
        group=group,
    )


def new_group(backend: str | None = None) -> dist.ProcessGroup:
    """Another group of all ranks, whose messages mix with no others; None: on the default backend. Collective."""
    group: dist.ProcessGroup = dist.new_group(backend=backend)
    return group


def average_on_xla(tensors: list[Tensor]) -> None:
    """Put the mean over XLA's processes, of which torch knows no group, in the place of each tensor."""
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    xm.all_reduce("sum", tensors, scale=1.0 / xr.world_size())


class RankZeroFailed(RuntimeError):
    """Rank 0 failed at something that only it does; the same error on every other rank."""
