"""A model whose Linears fit float8, but for one, and its plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from prepkit.config import Config
from prepkit.facts import Env
from prepkit.observe import observe
from prepkit.plan import Plan
from prepkit.planner import plan

WIDTH, WORDS = 16, 32
TOKENS = torch.arange(32).reshape(4, 8)
LIBRARIES = (
    *(("deepspeed", "0.19.8"), ("msamp", "0.4.0"), ("torch_xla", "2.9.0")),
    *(("torchao", "0.18.0"), ("transformer_engine", "2.9.0")),
)


class Block(nn.Module):
    """Two Linears that fit, and between them one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.gate = nn.Linear(WIDTH, 5, bias=False)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        change: Tensor = self.outer(torch.relu(self.inner(normed)))
        return x + change * self.gate(normed).mean(-1, keepdim=True).sigmoid()


class Wide(nn.Module):
    """Embedding, three blocks and a head that is tied to the embedding."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


FITTING = ("layers.0.outer", "layers.1.inner", "layers.1.outer", "layers.2.inner", "layers.2.outer")
"""What torchao converts when the first Linear, ``layers.0.inner``, and the last, ``head``, are kept."""


def seeded(dtype: torch.dtype = torch.float32) -> Wide:
    torch.manual_seed(5)
    return Wide(dtype)


def loss_of(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    """Of predicting another token from each."""
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), (7 * tokens + 3).remainder(WORDS).flatten())


def stepped(model: nn.Module) -> Optimizer:
    """AdamW with the state of one step."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def planned(cfg: Config, model: nn.Module, optimizer: Any = None, *, scheduler: Any = None, **env: Any) -> Plan:
    """The plan where every library is installed."""
    there = Env(**{"libraries": LIBRARIES, **env})
    return plan(cfg, observe(model, optimizer=optimizer, scheduler=scheduler, env=there).facts).unwrap()
