"""Many right programs, and the same errors under other engines: products of models, engines, precisions and loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import prepkit as pk
from prepkit import config as c
from tests.proving.window import DDP, WIDTH, Window, loss_of, micros, net
from tests.support.deepspeed_cpu import lean

CPU = torch.device("cpu")


class Experts(nn.Module):
    """Each sample goes to two of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.gate(x).softmax(-1).topk(2)
        mixed = torch.zeros_like(x)
        for at in range(2):
            for number, expert in enumerate(self.experts):
                weight = shares[:, at, None] * (chosen[:, at, None] == number)
                mixed = mixed + weight * expert(x)
        return self.head(mixed)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x.unsqueeze(1))[0][:, 0])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0)
        return self.head((x + self.attention(x, x, x, need_weights=False)[0])[0])


class Convolving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 3, 3), nn.GroupNorm(1, 3), nn.GELU(), nn.Flatten(), nn.Linear(30, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unsqueeze(1))


class Shared(nn.Module):
    """One layer that is called three times, and whose weight is used once more by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return self.head(x @ self.layer.weight)


def normed() -> nn.Module:
    """A layer whose weight is computed from two others."""
    normed_layer = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(normed_layer, nn.SiLU(), nn.Linear(WIDTH, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": net,
    "experts": Experts,
    "recurrent": Recurrent,
    "attending": Attending,
    "convolving": Convolving,
    "shared": Shared,
    "normed": normed,
}
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": lambda given: torch.optim.Adam(given, lr=1e-2, weight_decay=0.1),
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda given: torch.optim.RMSprop(given, lr=1e-2, centered=True),
    "Adagrad": lambda given: torch.optim.Adagrad(given, lr=1e-2),
    "NAdam": lambda given: torch.optim.NAdam(given, lr=1e-2),
    "Adamax": lambda given: torch.optim.Adamax(given, lr=1e-2),
    "AMSGrad": lambda given: torch.optim.AdamW(given, lr=1e-2, amsgrad=True),
}


def made(model: str, wrap: str) -> nn.Module:
    """The same weights on every rank, wrapped."""
    torch.manual_seed(0)
    whole = MODELS[model]()
    torch.manual_seed(10 + dist.get_rank())
    if wrap == "ddp":
        return DDP(whole)
    if wrap == "fsdp1":
        return FullyShardedDataParallel(whole, device_id=CPU, use_orig_params=True)
    if wrap == "fsdp2":
        for child in whole.children():
            if next(child.parameters(), None) is not None and type(child) is not nn.ModuleList and model != "shared":
                fully_shard(child)
        return fully_shard(whole)
    return whole


@frozen
class OfTorch:
    """A loop of torch's own over a model, a wrapper and an optimizer; ``fault`` names what is wrong with it."""

    model: str
    wrap: str
    optimizer: str = "Adam"
    number: int = 2
    fault: str = ""

    @property
    def __name__(self) -> str:
        parts = (self.wrap, self.model, self.optimizer, str(self.number), self.fault.replace(" ", "-"))
        return "_".join(filter(None, parts))

    def __call__(self, rank: int, world: int) -> Window:
        model = made(self.model, self.wrap)
        params = list(model.parameters())
        optimizer = OPTIMIZERS[self.optimizer](params)
        if self.fault == "rate by rank":
            optimizer.param_groups[0]["lr"] *= 1 + rank
        if self.fault == "a gradient tripled":
            params[-1].register_hook(lambda grad: 3 * grad)
        by = {"divided twice": self.number**2, "never divided": 1, "divided by the ranks": self.number * world}

        def train() -> None:
            reader = 0 if self.fault == "same samples" else rank
            for batch in micros(self.number, rank=reader):
                (loss_of(model, batch) / by.get(self.fault, self.number)).backward()
            self._before_step(model, params)
            optimizer.step()

        return Window(model, train)

    def _before_step(self, model: nn.Module, params: list[Any]) -> None:
        if self.fault == "a gradient dropped":
            params[-1].grad = None
        for param in (one for one in params if one.grad is not None):  # FSDP1 leaves some ranks nothing of a parameter
            if self.fault == "halved again":
                param.grad *= 0.5
            elif self.fault == "doubled by hand":
                param.grad *= 2.0
            elif self.fault == "signs alone":
                param.grad.sign_()
            elif self.fault == "noise":
                param.grad.add_(torch.ones_like(param.grad))


ENGINES: dict[str, c.Engine] = {
    "DDP": c.DDP(),
    "FSDP1": c.FSDP1(),
    "FSDP2": c.FSDP2(),
    **{f"DeepSpeed{stage}": c.DeepSpeed(stage=stage, micro_batch=6) for stage in range(4)},
}


@frozen
class OfPrepkit:
    """prepkit's own loop; ``by``: what the script divides its loss by, although prepkit does."""

    engine: str
    accumulation: int = 1
    low: bool = False
    tokens: bool = False
    by: float = 1.0
    extra: c.Config = field(factory=c.Config, repr=False)

    @property
    def __name__(self) -> str:
        parts = f"prepkit_{self.engine}_{self.accumulation}{'_bf16' * self.low}{'_tokens' * self.tokens}"
        more = [name for name in ("clip", "checkpointing", "compile") if getattr(self.extra, name) is not None]
        return "_".join((parts, *more)) + (f"_divided_by_{self.by:g}" if self.by != 1 else "")

    @property
    def needs(self) -> str:
        """The package that has to be there."""
        return "deepspeed" if self.engine.startswith("DeepSpeed") else ""

    def __call__(self, rank: int, world: int) -> Window:
        if self.needs:
            lean()
        cfg = evolve(
            self.extra,
            engine=ENGINES[self.engine],
            accumulation=self.accumulation,
            precision=c.BF16() if self.low else None,
            optimizer=c.AdamW(lr=1e-2),
        )
        ready = pk.apply(pk.build_plan(cfg, net()))

        def train() -> None:
            for at, (x, y) in enumerate(micros(self.accumulation)):
                samples = 3 + rank + at if self.tokens else 6
                loss = loss_of(ready.model, (x[:samples], y[:samples])) / self.by
                ready.backward(loss, mean_over=float(samples) if self.tokens else None)
                ready.step()

        return Window(ready.model, train)


CLIPPED = c.Config(clip=c.ClipNorm(0.05))
CHECKPOINTED = c.Config(checkpointing=c.CheckpointBlocks())
COMPILED = c.Config(compile=c.CompileModel(backend="aot_eager"))
DRAWN_RIGHT: tuple[Any, ...] = (
    *(OfTorch(model, wrap) for model in MODELS for wrap in ("ddp", "fsdp1", "fsdp2")),
    *(OfTorch("blocks", wrap, optimizer) for optimizer in list(OPTIMIZERS)[1:] for wrap in ("ddp", "fsdp2")),
    *(OfTorch("blocks", wrap, "SGD", 3, fault) for wrap in ("fsdp1", "fsdp2") for fault in ("signs alone", "noise")),
    *(OfPrepkit(engine, steps, low) for engine in ENGINES for steps in (1, 3) for low in (False, True)),
    *(OfPrepkit(engine, 2, tokens=True) for engine in ENGINES),
    *(OfPrepkit(engine, 2, extra=CLIPPED) for engine in ENGINES),
    *(OfPrepkit(engine, 2, extra=extra) for engine in ("DDP", "FSDP1", "FSDP2") for extra in (CHECKPOINTED, COMPILED)),
)
RIGHT_OF_FOUR: tuple[Any, ...] = (
    *(OfTorch("experts", wrap) for wrap in ("ddp", "fsdp1", "fsdp2")),
    *(OfPrepkit(engine, 3) for engine in ENGINES),
)
"""On four ranks."""
FAULTS: dict[str, str] = {
    "divided twice": "prove.accumulation",
    "never divided": "prove.accumulation",
    "divided by the ranks": "prove.averaged-twice",
    "doubled by hand": "prove.summed",
    "halved again": "prove.averaged-twice",
}
DRAWN_ERRORS: tuple[tuple[Any, str], ...] = (
    *(
        (OfTorch("blocks", wrap, "SGD", 3, fault), rule)
        for wrap in ("fsdp1", "fsdp2")
        for fault, rule in FAULTS.items()
    ),
    *(
        (OfTorch(model, "ddp", "SGD", 3, fault), rule)
        for model in ("experts", "attending")
        for fault, rule in (
            ("rate by rank", "prove.options"),
            ("same samples", "prove.same-samples"),
            ("a gradient dropped", "prove.no-gradient"),
            ("a gradient tripled", "prove.ratio"),
        )
    ),
    *((OfPrepkit(engine, 4, by=4), "prove.accumulation") for engine in ENGINES),
)
"""The same errors where another engine makes them, with the rule that tells it."""
