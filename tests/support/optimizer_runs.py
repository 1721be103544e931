"""One optimizer under one engine on two processes, against the same optimizer alone: what the table of them rests on.

``python -m tests.tools.optimizers`` runs every pair.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from torch import nn

import prepkit as pk
from prepkit.findings import PlanRejected
from tests.support.deepspeed_cpu import lean

WIDTH = 64
STEPS = 5


@frozen
class Tried:
    """One optimizer class of a library, and how it is made."""

    options: dict[str, Any] = field(factory=dict)
    model: str = "dense"
    """``dense``, ``matrices`` (no vectors) or ``sparse`` (an embedding with sparse gradients)."""
    near: float = 2e-3
    """Relative difference of losses that is still the same: what is quantised depends on where blocks begin."""


TORCH = {
    "ASGD": Tried({"lr": 0.05}),
    "Adadelta": Tried({"lr": 1.0}),
    "Adafactor": Tried({"lr": 0.05}),
    "Adagrad": Tried({"lr": 0.01}),
    "Adam": Tried({"lr": 0.01}),
    "AdamW": Tried({"lr": 0.01}),
    "Adamax": Tried({"lr": 0.01}),
    "LBFGS": Tried({"lr": 0.5, "max_iter": 4}),
    "Muon": Tried({"lr": 0.05}, model="matrices"),
    "NAdam": Tried({"lr": 0.01}),
    "RAdam": Tried({"lr": 0.01}),
    "RMSprop": Tried({"lr": 0.001}),
    "Rprop": Tried({"lr": 0.01}),
    "SGD": Tried({"lr": 0.05, "momentum": 0.9}),
    "SparseAdam": Tried({"lr": 0.05}, model="sparse"),
}
BITSANDBYTES = {
    name: Tried({"lr": 0.01}, near=2e-2)
    for name in (
        "AdamW",
        "AdamW8bit",
        "PagedAdamW8bit",
        "Adam8bit",
        "Lion8bit",
        "LAMB",
        "LARS",
        "SGD8bit",
    )
} | {"LARS": Tried({"lr": 0.01, "momentum": 0.9}), "SGD8bit": Tried({"lr": 0.01, "momentum": 0.9}, near=2e-2)}
TORCHAO = {name: Tried({"lr": 0.01}, near=3e-2) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")}
CLASSES: dict[str, dict[str, Tried]] = {
    "torch.optim": TORCH,
    "transformers": {"Adafactor": Tried()},
    "bitsandbytes.optim": BITSANDBYTES,
    "torchao.optim": TORCHAO,
    "schedulefree": {name: Tried({"lr": 0.01}) for name in ("AdamWScheduleFree", "SGDScheduleFree")},
}
"""Module to its classes; a module that is not installed is left out."""

PLAN = pk.tp.TPPlan((pk.tp.TPLayer("blocks.*.up", "colwise"), pk.tp.TPLayer("blocks.*.down", "rowwise")))
KEPT = json.dumps({"zero_force_ds_cpu_optimizer": False})
ENGINES: dict[str, pk.Config] = {
    "DDP": pk.Config(engine=pk.DDP()),
    "FSDP1": pk.Config(engine=pk.FSDP1()),
    "FSDP1, flat": pk.Config(engine=pk.FSDP1(use_orig_params=False)),
    "FSDP2": pk.Config(engine=pk.FSDP2()),
    "FSDP2, offloaded": pk.Config(engine=pk.FSDP2(offload=pk.OffloadToCPU(pin_memory=False))),
    "TensorParallel": pk.Config(engine=pk.TensorParallel(), tp_plan=PLAN),
    **{f"ZeRO {stage}": pk.Config(engine=pk.DeepSpeed(stage=stage, micro_batch=4)) for stage in range(4)},
    "ZeRO 2, offloaded": pk.Config(engine=pk.DeepSpeed(stage=2, micro_batch=4, offload_optimizer="cpu", config=KEPT)),
}
DTYPES: dict[str, pk.Config] = {"": pk.Config(), "bfloat16": pk.Config(precision=pk.BF16())}


class Block(nn.Module):
    """Two matrices."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A residual step."""
        return x + self.down(torch.tanh(self.up(x)))


class Dense(nn.Module):
    """Two blocks, and where there are vectors a norm."""

    def __init__(self, vectors: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(vectors) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH) if vectors else nn.Identity()
        self.head = nn.Linear(WIDTH, 4, bias=vectors)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Four numbers a row."""
        x = x.sin()  # as wide in every model
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


class Sparse(nn.Module):
    """One embedding, whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Four numbers a row."""
        out: torch.Tensor = self.embed((x[:, 0].abs() * 31).long().clamp(max=31))
        return out


def model_of(kind: str) -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    return Sparse() if kind == "sparse" else Dense(kind == "dense")


def batches(rank: int, world: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each batch of eight."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = torch.randn(8, WIDTH, generator=draw), torch.randn(8, 4, generator=draw)
        part = slice(rank * 8 // world, (rank + 1) * 8 // world)
        yield x[part], y[part]


def optimizer_of(library: str, name: str, params: Any) -> torch.optim.Optimizer:
    """A new one, with the options that the table above says."""
    torch.compile = _as_written  # type: ignore[assignment]  # torchao's step, which takes longer than all the rest
    made: torch.optim.Optimizer = getattr(import_module(library), name)(params, **CLASSES[library][name].options)
    return made


def _as_written(function: Any, **_: Any) -> Any:
    return function


def alone(library: str, name: str, dtype: str) -> list[float]:
    """Losses in one process, by hand."""
    model = model_of(CLASSES[library][name].model)
    optimizer = optimizer_of(library, name, model.parameters())
    losses = []
    for x, y in batches(0, 1):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                out = model(x)
            loss = (out.float() - y).square().mean()
            loss.backward()
            return loss

        losses.append(float(closure().detach()))
        if name == "LBFGS":
            optimizer.step(closure)  # type: ignore[arg-type]  # torch wants a float
        else:
            optimizer.step()
    return losses


def together(rank: int, world: int, library: str, name: str, engine: str, dtype: str) -> tuple[str, list[float]]:
    """What was raised, and the losses up to there; all ranks have the mean over them."""
    cfg = evolve(ENGINES[engine], precision=DTYPES[dtype].precision)
    model = model_of(CLASSES[library][name].model)
    optimizer = optimizer_of(library, name, model.parameters())
    losses: list[float] = []
    if engine.startswith("ZeRO"):
        lean()
    same_data = engine == "TensorParallel"
    try:
        plan = pk.build_plan(cfg, model, optimizer=optimizer, rules=())
        ready = pk.apply(plan)
        for x, y in batches(0 if same_data else rank, 1 if same_data else world):
            seen: list[torch.Tensor] = []

            def closure(x: torch.Tensor = x, y: torch.Tensor = y, seen: list[torch.Tensor] = seen) -> torch.Tensor:
                loss = (ready.model(x).float() - y).square().mean()
                seen.append(loss)
                ready.backward(loss)
                return loss

            if name == "LBFGS":
                ready.step(closure)
            else:
                closure()
                ready.step()
            mean = seen[0].detach().clone()
            dist.all_reduce(mean)
            losses.append(float(mean) / world)
        ready.close()
    except PlanRejected as refused:
        return f"refused: {refused}", losses
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} | {_where(error)}", losses
    return "", losses


def _where(error: BaseException) -> str:
    """The last lines of code on the way to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return "; ".join(f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-4:])


def verdict(library: str, name: str, raised: str, losses: list[float], expected: list[float], dtype: str) -> str:
    """Empty where it trains as alone; else ``raises``, or ``trains otherwise``."""
    if raised:
        return "raises"
    near = max(CLASSES[library][name].near, 3e-2 if dtype else 0.0)
    far = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, expected, strict=True))
    return "" if far <= near else "trains otherwise"
