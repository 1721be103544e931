"""Models, batches and losses that do not fit, in a file that imports little: processes that prove a plan import it."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from tests.proving.small import Small


class Plain(Small):
    def __init__(self) -> None:
        super().__init__()
        self.drop.p = 0.0


class Raises(Plain):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("labels")


class OneRankRaises(Plain):
    """The others wait in the backward for it, and fail when it has gone."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise KeyError("labels")
        return super().forward(x)


class Leaves(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            os._exit(7)
        return super().forward(x)


class Killed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


class Gathers(Plain):
    """Returns what all ranks have, where there are others."""

    def forward(self, x: Tensor) -> Tensor:
        mine = super().forward(x)
        if not dist.is_initialized():
            return mine
        return torch.cat(all_gather(mine))  # with its graph: what has none is given again in a replay


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


def synchronised() -> nn.Module:
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(Normed())  # type: ignore[no-untyped-call]  # torch has no types
    return converted


def gathered(outputs: Tensor, batch: Any) -> Tensor:
    every = [torch.empty_like(outputs) for _ in range(dist.get_world_size())]
    dist.all_gather(every, outputs.detach())
    every[dist.get_rank()] = outputs
    return (torch.cat(every) @ torch.cat(every).T).mean()


class Nothing(Plain):
    def forward(self, x: Tensor) -> Any:
        return None


class Detached(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


class Heads(Plain):
    """Counts on the size of a layer that the plan cuts."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).view(len(x), 4, 2)
        return self.outer(heads.flatten(1))


class Unused(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(3, 3)


class NotMade(Plain):
    def __setstate__(self, state: Any) -> None:
        raise OSError("no such tokenizer")


class Spoils(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise IndexError("no such saved tensor")


class FailsBackward(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return Spoils.apply(super().forward(x))


def labels(outputs: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs, batch[1])


def not_a_number(outputs: Tensor, batch: Any) -> Tensor:
    return outputs.mean() * float("nan")


def raises() -> Any:
    raise KeyError("train.parquet")


AT_BATCHES = 3
