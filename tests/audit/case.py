"""What ``pk.audit`` is given, and the small models that the scripts of errors and of clean programs train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH = 16
ROOT = Path(__file__).resolve().parents[2]


@frozen(kw_only=True)
class Case:
    """The objects of a program, as they are before its first step."""

    model: nn.Module
    optimizer: Any = None
    scheduler: Any = None
    loaders: tuple[Any, ...] = ()
    audit: Callable[..., Any] | None = None
    """What audits it, where that has to be code of its own; None: ``pk.audit``."""
    at_step: bool = False
    """Whether the optimizer is about to step, as it is when ``prepkit audit`` looks."""


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.inner(x)))


class Net(nn.Module):
    """An embedding, three equal blocks and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(dropout: float = 0.0) -> Net:
    """The same weights on every rank; generators then part, so that dropout does."""
    torch.manual_seed(0)
    made = Net(dropout).train()
    torch.manual_seed(1 + (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0))
    return made


def adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.AdamW:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)


def rows(count: int = 32) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(count, WIDTH, generator=generator), torch.zeros(count, dtype=torch.long))


def divided(rank: int, world: int, batch: int = 4) -> DataLoader[Any]:
    """Each rank its own samples, as torch's own guide does it."""
    sampler: Any = DistributedSampler(rows(), num_replicas=world, rank=rank)
    return DataLoader(rows(), batch_size=batch, sampler=sampler)
