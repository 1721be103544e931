"""Live models of every shape that is easily got wrong, as plain data that travels, and as modules."""

from __future__ import annotations

from typing import Literal

import torch
from attrs import frozen
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

WORLDS = (*range(1, 65), 128, 1000, 1024)
"""Numbers of ranks: each up to 64, and a few large ones."""

Held = Literal["none", "fresh", "stateful"]


@frozen(kw_only=True)
class Seed:
    """What a model, its optimizer and its place among the ranks grow from."""

    blocks: int
    width: int
    vocab: int
    hidden: int
    depth: int
    """Modules inside one another in the last part of a block."""
    dtype: str
    other: str
    """Dtype of the extra parameters."""
    extra: tuple[tuple[int, ...], ...]
    """Shapes of parameters of their own: odd, prime, with a dimension of 1, smaller than the number of ranks."""
    tied: bool
    shared: bool
    """Whether the last block is the first one again."""
    norm: Literal["layer", "batch"]
    kept: bool
    """Whether the model's own buffer is saved; the blocks' is of the other kind."""
    frozen: tuple[int, ...]
    """Numbers of the parameters that are not trained."""
    held: Held
    """What the optimizer holds."""
    groups: int
    world: int
    rank: int
    device: str


class Nest(nn.Module):
    """Modules inside one another, a parameter each."""

    def __init__(self, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.inner = Nest(width, hidden, depth - 1) if depth > 1 else nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Block(nn.Module):
    """What repeats."""

    def __init__(self, seed: Seed) -> None:
        super().__init__()
        self.attn = nn.Linear(seed.width, seed.width, bias=False)
        self.mlp = nn.Linear(seed.width, seed.hidden)
        self.deep = Nest(seed.width, seed.hidden, seed.depth)
        self.register_buffer("mask", torch.ones(seed.width), persistent=not seed.kept)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Grown(nn.Module):
    """Names as in ``prepkit.testing.tiny_model``, so that drawn configs find their modules."""

    def __init__(self, seed: Seed) -> None:
        super().__init__()
        self.embed = nn.Embedding(seed.vocab, seed.width)
        self.layers = nn.ModuleList(Block(seed) for _ in range(seed.blocks))
        if seed.shared and seed.blocks > 1:
            self.layers[-1] = self.layers[0]
        self.norm = nn.LayerNorm(seed.width) if seed.norm == "layer" else nn.BatchNorm1d(seed.width)
        self.head = nn.Linear(seed.width, seed.vocab, bias=False)
        if seed.tied:
            self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(3), persistent=seed.kept)
        self.to(getattr(torch, seed.dtype))
        for index, shape in enumerate(seed.extra):
            added = nn.Parameter(torch.zeros(shape, dtype=getattr(torch, seed.other)))
            (self.norm if index % 2 else self).register_parameter(f"extra{index}", added)
        for number, param in enumerate(self.parameters()):
            param.requires_grad_(number not in seed.frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x


def grow(seed: Seed) -> tuple[Grown, Optimizer | None]:
    """The model, and the optimizer over what is trained."""
    model = Grown(seed)
    trained = [param for param in model.parameters() if param.requires_grad]
    if seed.held == "none" or not trained:
        return model, None
    cut = len(trained) // 2 if seed.groups > 1 else 0
    optimizer = AdamW([{"params": part} for part in (trained[:cut], trained[cut:]) if part])
    if seed.held == "stateful":
        for param in trained:
            moments = {key: torch.zeros_like(param) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
    return model, optimizer


@st.composite
def seeds(draw: st.DrawFn) -> Seed:
    """Every kind of model at many world sizes, as any of its ranks."""
    world = draw(st.sampled_from(WORLDS))
    dtype = draw(st.sampled_from(("float32", "bfloat16", "float16")))
    size = st.sampled_from((1, 2, 3, 5, 7, 8, 13, 64, 127))
    shapes = st.lists(st.tuples(size) | st.tuples(size, size) | st.tuples(size, size, size), max_size=3)
    return Seed(
        blocks=draw(st.integers(0, 4)),
        width=draw(st.sampled_from((1, 2, 3, 4, 7, 8, 16))),
        vocab=draw(st.sampled_from((1, 2, 5, 11, 32, 97))),
        hidden=draw(st.sampled_from((1, 3, 8, 17))),
        depth=draw(st.integers(1, 3)),
        dtype=dtype,
        other=draw(st.sampled_from((dtype, dtype, "float32", "bfloat16"))),
        extra=tuple(draw(shapes)),
        tied=draw(st.booleans()),
        shared=draw(st.sampled_from((False, False, False, True))),
        norm=draw(st.sampled_from(("layer", "layer", "batch"))),
        kept=draw(st.booleans()),
        frozen=tuple(draw(st.lists(st.integers(0, 12), max_size=4, unique=True))),
        held=draw(st.sampled_from(("none", "fresh", "stateful"))),
        groups=draw(st.integers(1, 2)),
        world=world,
        rank=draw(st.sampled_from((0, world - 1)) | st.integers(0, world - 1)),
        device=draw(st.sampled_from(("cpu", "cpu", "cuda"))),
    )
