"""A small model to cut, plans for it by hand, and a run in one process to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import prepkit as pk
from tests.support.transformers_models import Batch, build


class Mixer(nn.Module):
    """A residual block over tokens: norm, up, down, with biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + change


class Toy(nn.Module):
    """Embedding, blocks and a head; the loss is inside, as transformers has it. One parameter is frozen."""

    def __init__(self, words: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.layers = nn.ModuleList(Mixer(8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, words, bias=False)
        self.layers[0].norm.bias.requires_grad = False

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return type("Out", (), {"loss": loss, "logits": logits})


def toy(words: int = 12) -> tuple[Any, Batch]:
    """The model, equal on every rank, and a batch of four."""
    torch.manual_seed(5)
    tokens = torch.randint(words, (4, 6), generator=torch.Generator().manual_seed(6))
    return Toy(words), {"input_ids": tokens, "labels": tokens.flip(1)}


PLAIN_ROWS = pk.tp.TPPlan(
    (
        pk.tp.TPLayer("embed", "rowwise"),
        pk.tp.TPLayer("layers.*.up", "colwise"),
        pk.tp.TPLayer("layers.*.down", "rowwise"),
        pk.tp.TPLayer("head", "colwise", output_layout="replicate"),
    )
)
SEQUENCE_ROWS = pk.tp.TPPlan(
    (
        pk.tp.TPLayer("embed", "rowwise", output_layout="sequence"),
        pk.tp.TPLayer("layers.*.norm", "sequence"),
        pk.tp.TPLayer("layers.*.up", "colwise", input_layout="sequence"),
        pk.tp.TPLayer("layers.*.down", "rowwise", output_layout="sequence"),
        pk.tp.TPLayer("norm", "sequence", output_layout="replicate"),
        pk.tp.TPLayer("head", "colwise", output_layout="replicate"),
    )
)
REPLICATED = pk.tp.TPPlan(
    (*PLAIN_ROWS.layers, pk.tp.TPLayer("layers.*.norm", "replicate"), pk.tp.TPLayer("norm", "replicate"))
)


BUILDERS: dict[str, Callable[[], tuple[Any, Batch]]] = {"toy": toy, "toy-uneven": lambda: toy(10)}


def built(family: str) -> tuple[Any, Batch]:
    """A toy, or one of the families of transformers."""
    return BUILDERS[family]() if family in BUILDERS else build(family)


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """AdamW, which steps every element by itself, over what is trained."""
    held = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(held, lr=0.01, eps=1e-3, **options)


def train(model: nn.Module, optimizer: Any, batch: Batch, steps: int, norm: float) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and joint norms of the gradients of a loop written by hand."""
    losses, norms = [], []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, norms


def whole(param: Tensor) -> Tensor:
    """The whole of a parameter."""
    return param.full_tensor().detach() if isinstance(param, DTensor) else param.detach()
