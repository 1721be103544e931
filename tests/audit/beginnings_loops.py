"""Programs whose layers begin as they should not; and their neighbours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from tests.audit.case import adam
from tests.audit.loops import Loop, taken

Begins = Callable[[nn.Module], None]


def named(name: str, run: Callable[[], None]) -> Callable[[int, int], None]:
    def program(rank: int, world: int) -> None:
        torch.manual_seed(0)
        run()

    program.__name__ = name
    return program


def constant(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
        nn.init.constant_(layer.weight, 0.05)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


# --- units that begin alike ---


def begun(begins: Begins) -> Callable[[], None]:
    """A small network whose layers this has made begin."""

    def run() -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        begins(model)
        x, y = torch.randn(12, 8), torch.randint(3, (12,))
        taken(model, adam(model), fn.cross_entropy(model(x), y))

    return run


def every_layer(model: nn.Module) -> None:
    model.apply(constant)


def last_layer_of_zeros(model: nn.Module) -> None:
    nn.init.zeros_(model[-1].weight)  # type: ignore[index, arg-type, union-attr]


def only(at: int) -> Begins:
    return lambda model: constant(model[at])  # type: ignore[index]


def identities(model: nn.Module) -> None:
    nn.init.eye_(model[2].weight)  # type: ignore[index, arg-type, union-attr]


def frozen(model: nn.Module) -> None:
    every_layer(model)
    for param in model[:4].parameters():  # type: ignore[index]
        param.requires_grad = False


def kept(channels: int, *, grouped: bool, drawn_behind: bool) -> Callable[[], None]:
    """Pictures through filters that begin as an average."""

    def run() -> None:
        filters = nn.Conv2d(3, channels, 3, padding=1, groups=3 if grouped else 1)
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1))
        constant(filters)
        if not drawn_behind:
            head.apply(constant)
        model = nn.Sequential(filters, nn.ReLU(), head)
        x, y = torch.randn(8, 3, 6, 6), torch.randint(2, (8, 1)).float()
        taken(model, adam(model), fn.binary_cross_entropy_with_logits(model(x), y))

    return run


class LowRank(nn.Module):
    """A linear layer that rests, and what is added to it, which begins as nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> None:
    model = nn.Sequential(LowRank(), nn.GELU(), nn.Linear(8, 3))
    taken(model, adam(model), fn.cross_entropy(model(torch.randn(12, 8)), torch.randint(3, (12,))))


class Mixture(nn.Module):
    """Experts behind a gate that gives each the same at first."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        constant(self.gate)
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        return torch.stack([one(x) for one in self.experts], 1).mul(shares[..., None]).sum(1)


def gated() -> None:
    model = Mixture()
    taken(model, adam(model), fn.cross_entropy(model(torch.randn(12, 8)), torch.randint(4, (12,))))


# --- what a norm keeps ---


def normed(momentum: float | None, *, tracks: bool = True) -> Callable[[], None]:
    def run() -> None:
        norm = nn.BatchNorm1d(16, momentum=momentum, track_running_stats=tracks)
        model = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 3))
        taken(model, adam(model), fn.cross_entropy(model(torch.randn(12, 8)), torch.randint(3, (12,))))

    return run


# --- one layer several times ---


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).relu()


def stacked(stack: Callable[[], nn.Module]) -> Callable[[], None]:
    """A head behind such layers."""

    def run() -> None:
        model = nn.Sequential(stack(), nn.Linear(8, 3))
        taken(model, adam(model), fn.cross_entropy(model(torch.randn(12, 8)), torch.randint(3, (12,))))

    return run


class Through(nn.Module):
    """Layers of a list, one after the other."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def multiplied_in_a_list() -> nn.Module:
    return Through(nn.ModuleList([Residual()] * 3))


def multiplied_in_a_row() -> nn.Module:
    made = 2 * [Residual()]
    return nn.Sequential(*made, nn.LayerNorm(8))


def one_head_for_all() -> nn.Module:
    head = Residual()
    return Through(nn.ModuleList([head for _ in range(3)]))


def one_by_its_name() -> nn.Module:
    layer = Residual()
    return Through(nn.ModuleList([layer] * 3))


def said_to_share() -> nn.Module:
    return Through(nn.ModuleList([Residual()] * 3))  # all share


def activations() -> nn.Module:
    return nn.Sequential(*[nn.ReLU()] * 3)


def called_in_a_loop() -> nn.Module:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Residual()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.layer(x)
            return x

    return Again()


RIGHT_BEGINNINGS: tuple[Loop, ...] = tuple(
    Loop(named(name, run))
    for name, run in {
        "last_layer_of_zeros": begun(last_layer_of_zeros),
        "last_layer_of_a_constant": begun(only(4)),
        "a_constant_before_drawn_layers": begun(only(2)),
        "identities": begun(identities),
        "frozen_averages": begun(frozen),
        "averages_by_channel": kept(3, grouped=True, drawn_behind=False),
        "averages_before_a_drawn_head": kept(4, grouped=False, drawn_behind=True),
        "low_rank": adapted,
        "gate_that_begins_alike": gated,
        **{
            one.__name__: stacked(one)
            for one in (one_head_for_all, one_by_its_name, said_to_share, activations, called_in_a_loop)
        },
        "norm_of_a_tenth": normed(0.1),
        "norm_of_the_last_batch": normed(1.0),
        "norm_of_all_batches": normed(None),
        "norm_that_keeps_nothing": normed(0.99, tracks=False),
    }.items()
)

WRONG_BEGINNINGS: tuple[Loop, ...] = tuple(
    Loop(named(name, run), rule=rule)
    for name, run, rule in (
        ("every_layer_of_a_constant", begun(every_layer), "run.units-alike"),
        ("filters_of_a_constant", kept(4, grouped=False, drawn_behind=False), "run.units-alike"),
        ("momentum_of_another_library", normed(0.99), "run.norm-momentum"),
        *((one.__name__, stacked(one), "run.layer-repeated") for one in (multiplied_in_a_list, multiplied_in_a_row)),
    )
)
