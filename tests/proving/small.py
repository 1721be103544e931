"""A small model with its batches and loss, in a file that imports little: processes that prove a plan import it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.drop(torch.relu(self.inner(x))))


class Drawing(nn.Module):
    """Has a generator of its own, of which nothing is drawn in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.generator = nn.Linear(6, 3), torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def batches() -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 6, generator=generator),) for _ in range(4)]


def loss(outputs: Tensor, batch: tuple[Tensor]) -> Tensor:
    return outputs.square().mean() + batch[0].mean()


def halved(grad: Tensor) -> Tensor:
    return grad / 2


def by_sample(outputs: Tensor, batch: tuple[Tensor]) -> Tensor:
    return outputs.square().mean(1) + batch[0].mean()


def of_outputs(outputs: Tensor) -> Tensor:
    return outputs.square().mean()
