"""A byte-level GPT, and its data: the sources of Python's own standard library, found on any machine with Python."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

VOCABULARY = 256
CONTEXT = 128


class Block(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection; input and output (batch, time, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape out as in."""
        normed = self.norm1(x)
        # -1 counts the heads that are here: under tensor parallelism each rank has some of them
        q, k, v = (to(normed).unflatten(2, (-1, self.head_width)).transpose(1, 2) for to in (self.q, self.k, self.v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Next-byte model; the output head shares the embedding's weight."""

    tp_plan: ClassVar[dict[str, str]] = {
        "blocks.*.q": "colwise",
        "blocks.*.k": "colwise",
        "blocks.*.v": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }
    """How tensor parallelism may cut the layers, in the words of transformers."""

    def __init__(self, width: int = 192, depth: int = 6, heads: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("places", torch.arange(CONTEXT), persistent=False)
        self.apply(lambda module: _init(module, depth))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats of predicting each next byte; ``tokens`` is (batch, time + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(inputs) + self.position(self.places[: inputs.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _init(module: nn.Module, depth: int) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02 / math.sqrt(depth))
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def small() -> GPT:
    """The model of the demo: 2.7 million parameters."""
    return GPT()


class StandardLibrary(Dataset[torch.Tensor]):
    """Windows of ``CONTEXT + 1`` bytes of the standard library's sources, in one fixed shuffled order."""

    def __init__(self, windows: int, seed: int = 0) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"\n".join(file.read_bytes() for file in files)
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        last = len(self.text) - CONTEXT - 1
        self.starts = torch.randint(last, (windows,), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = int(self.starts[index])
        return self.text[start : start + CONTEXT + 1].long()
