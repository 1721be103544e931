"""Drawn models with awkward shapes: odd sizes, ties, frozen parts, mixed dtypes. One seed, one case."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor, nn

from prepkit.config import (
    BF16,
    DDP,
    FSDP1,
    FSDP2,
    Config,
    Engine,
    Mesh,
    Sharding,
    TensorParallel,
    TPLayer,
    TPPlan,
    WrapBlocks,
    WrapClasses,
    WrapPaths,
    WrapRoot,
)


class Block(nn.Module):
    """Residual block; ``scale`` makes a parameter of one dim that is no bias."""

    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=not bias)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.down(torch.relu(self.up(self.norm(x)))) * self.scale
        return x + changed


class LM(nn.Module):
    """Embedding, blocks, head, and a buffer of each kind."""

    def __init__(self, vocab: int, width: int, inner: tuple[int, ...], tied: bool, bias: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, size, bias) for size in inner)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("kept", torch.zeros(5))
        self.register_buffer("passing", torch.zeros(3, dtype=torch.int64), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


@frozen(kw_only=True)
class Case:
    """A model, a config and an optimizer, all from one seed."""

    seed: int
    cfg: Config
    vocab: int
    width: int
    inner: tuple[int, ...]
    tied: bool
    bias: bool
    dtype: torch.dtype
    frozen: tuple[str, ...]
    """Prefixes of the names that are not trained."""
    optimizer: str
    options: dict[str, Any]

    def model(self) -> LM:
        torch.manual_seed(self.seed)
        made = LM(self.vocab, self.width, self.inner, self.tied, self.bias).to(self.dtype)
        for name, param in made.named_parameters():
            if name.startswith(self.frozen) and self.frozen:
                param.requires_grad_(requires_grad=False)
                if self._casts() and not name.endswith("scale") and ".norm." not in name:
                    param.data = param.data.to(torch.bfloat16)  # mixed dtypes: gathered in one all the same
        return made

    def _casts(self) -> bool:
        """Whether what is frozen is stored in 16 bits beside what is not; in a flat parameter only if it is upcast."""
        precision = self.cfg.precision
        return isinstance(precision, BF16) and (precision.master_weights or not isinstance(self.cfg.engine, FSDP1))

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        held = [param for param in model.parameters() if param.requires_grad]
        cut = len(held) // 3 if getattr(self.cfg.engine, "use_orig_params", True) else 0
        groups = [{"params": some} for some in (held[:cut], held[cut:]) if some]
        made: torch.optim.Optimizer = getattr(torch.optim, self.optimizer)(groups, **self.options)
        return made

    def __str__(self) -> str:
        how = f"{self.optimizer}{self.options}" if self.options else self.optimizer
        engine = type(self.cfg.engine).__name__
        mesh = f" x{self.cfg.mesh.replicate} cut{self.cfg.mesh.tensor}" if self.cfg.mesh else ""
        if isinstance(self.cfg.engine, FSDP1):
            engine += f" {self.cfg.engine.sharding} {'original' if self.cfg.engine.use_orig_params else 'flat'}"
        return f"{engine}{mesh} {type(self.cfg.precision).__name__} {str(self.dtype)[6:]} {how}"


OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True}),
    ("Adam", {}),
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Adagrad", {}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("RAdam", {}),
    ("Adafactor", {}),
)


FLAT: tuple[Sharding, ...] = ("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


CUTS = TPPlan(
    (
        TPLayer("embed", "rowwise"),
        TPLayer("blocks.*.up", "colwise"),
        TPLayer("blocks.*.down", "rowwise"),
        TPLayer("head", "colwise", output_layout="replicate"),
    )
)
"""Every layer of the model; norms and scales stay whole on every rank."""


def cut(one: Case, tensor: int, copies: int = 1) -> Case:
    """The case with its layers cut over so many ranks, and with sizes that divide."""
    alone = isinstance(one.cfg.engine, TensorParallel)
    mesh = None if alone else Mesh(replicate=copies, shard=-1, tensor=tensor)
    return evolve(
        one,
        cfg=evolve(one.cfg, mesh=mesh, tp_plan=CUTS),
        vocab=one.vocab * tensor,
        inner=tuple(size * tensor for size in one.inner),
        frozen=() if alone else one.frozen,
        options=one.options | ({"foreach": False} if alone else {}),  # what is cut and what is whole are stepped apart
    )


def case(seed: int, engine: type, copies: int = 1, accumulation: int = 1) -> Case:
    """The case of a seed."""
    draw = Random(seed * 7919 + len(engine.__name__))
    inner = draw.choice(((draw.randint(5, 90),) * draw.randint(2, 4), (draw.randint(3, 40), draw.randint(41, 99))))
    precision = draw.choice((None, BF16(), BF16(reduce_dtype="bfloat16"), BF16(master_weights=False)))
    dtype = draw.choice((torch.float32, torch.bfloat16))
    parts: tuple[str, ...] = ("embed", "blocks.0.", "blocks.1.up", "blocks.1.scale")
    known = OPTIMIZERS if engine is DDP else OPTIMIZERS[:-1]  # torch's Adafactor cannot step a sharded parameter
    name, options = known[seed % len(known)]
    made: Engine = DDP(gradient_as_bucket_view=draw.random() < 0.5, bucket_cap_mb=draw.choice((25.0, 0.01)))
    always: tuple[str, ...] = ()
    wrap = draw.choice((WrapBlocks(), WrapRoot(), WrapClasses(("Block", "Linear")), WrapPaths(("blocks.*.up",))))
    if engine is FSDP2:
        made = FSDP2(wrap=wrap, reshard_after_forward=draw.random() < 0.7)
    if engine is TensorParallel:
        made = TensorParallel()
    if engine is FSDP1:
        sharding: Sharding = draw.choice(FLAT) if copies == 1 else draw.choice(("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"))
        ignored = draw.choice(((), (), ("blocks.1.down",)))
        made = FSDP1(wrap=wrap, sharding=sharding, use_orig_params=draw.random() < 0.5, ignored=ignored)
        parts = parts if made.use_orig_params else ()
        always = ignored  # nobody averages the gradients of what is ignored
    frozen = (*always, *(part for part in parts if draw.random() < 0.25))
    mesh = Mesh(replicate=copies) if copies > 1 else None
    return Case(
        seed=seed,
        cfg=Config(engine=made, precision=precision, mesh=mesh, accumulation=accumulation),
        vocab=draw.randint(90, 700),
        width=draw.randint(7, 70),
        inner=inner,
        tied=draw.random() < 0.4 and not isinstance(getattr(made, "wrap", None), WrapClasses),
        bias=draw.random() < 0.5,
        dtype=dtype,
        frozen=frozen,
        optimizer=name,
        options=options,
    )
