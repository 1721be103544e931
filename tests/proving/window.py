"""Programs that train one window, recorded on every rank and proven on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

from prepkit.proving.proof import Proof
from prepkit.proving.record_file import write
from prepkit.proving.recorder import Recorder
from prepkit.proving.script import models_of, proven_models
from tests.support.launch import launched

WIDTH = 12
DDP = nn.parallel.DistributedDataParallel


@frozen
class Window:
    """What trains, and the code of one step."""

    model: nn.Module | None
    """None: whatever module is called first, as for a script."""
    train: Callable[[], Any]
    lingers: bool = False
    """As of the recorder."""


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.outer(torch.relu(self.inner(self.norm(x)))))


class Net(nn.Module):
    """Two blocks between two layers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attends(nn.Module):
    """Attention under a mask that it makes in its forward, in float32 whatever else is."""

    def __init__(self, masked: float) -> None:
        super().__init__()
        self.enter, self.head, self.masked = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4), masked

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, None, :] * torch.linspace(0.5, 2.0, 16)[:, None].to(x.dtype)
        mask = torch.full((16, 16), self.masked, dtype=torch.float32).triu(1)
        query, key, value = self.enter(rows)[:, None].chunk(3, -1)
        found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.head(found[:, 0]).mean(1)


def net(dropout: float = 0.0) -> Net:
    """The same weights on every rank; generators part after it."""
    torch.manual_seed(0)
    made = Net(dropout)
    torch.manual_seed(10 + dist.get_rank())
    return made


def micros(number: int, *, rank: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Samples and labels of this rank's micro-batches."""
    generator = torch.Generator().manual_seed(100 + (dist.get_rank() if rank is None else rank))
    for _ in range(number):
        yield torch.randn(6, WIDTH, generator=generator), torch.randint(4, (6,), generator=generator)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).float(), y)


def adam(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=lr)


def loop(model: nn.Module, optimizer: Any, number: int = 2, by: float | None = None) -> None:
    """Accumulates by hand, as torch's own guides do it."""
    for batch in micros(number):
        (loss_of(model, batch) / (number if by is None else by)).backward()
    optimizer.step()


def recorded(program: Callable[[int, int], Window], rank: int, world: int, folder: str) -> tuple[Recorder, Window]:
    """Runs a program's window, and leaves this rank's record in the folder."""
    with launched(rank, world):
        window = program(rank, world)
        recorder = Recorder(root=window.model, lingers=window.lingers)
        with recorder.on():
            window.train()
    if recorder.stepped:
        write(recorder.record(), Path(folder))
    dist.barrier()
    return recorder, window


def proved(rank: int, world: int, program: Callable[[int, int], Window], folder: str) -> Proof | None:
    """The proof of one program, from rank 0."""
    recorder, _ = recorded(program, rank, world, folder)
    return proven_models(models_of(recorder), folder)


__all__ = ["DDP", "Attends", "Window", "adam", "loop", "loss_of", "micros", "net", "proved", "recorded"]
