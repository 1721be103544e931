"""Models whose forward sends to other ranks what trains: right, and with a gradient that does not come back rightly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as through
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from tests.proving.unusual import seeded
from tests.proving.window import DDP, WIDTH, Window, adam, loss_of, micros

Crosses = type[torch.autograd.Function]


def _summed(x: Tensor) -> Tensor:
    whole = x.clone()
    dist.all_reduce(whole)
    return whole


def _gathered(x: Tensor) -> Tensor:
    """The same by way of buffers, of which nobody says of which dtype they are to be."""
    every = [torch.zeros(x.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x.contiguous())
    return torch.stack(every).sum(0)


def _exchanged(x: Tensor) -> Tensor:
    got = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(got, x.contiguous())
    return got


def _function(forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Any:
    """A function with a backward of its own."""
    return type(
        "Crosses",
        (torch.autograd.Function,),
        {
            "forward": staticmethod(lambda ctx, x: forward(x)),
            "backward": staticmethod(lambda ctx, grad: backward(grad)),
        },
    ).apply


class Cut(nn.Module):
    """A hidden layer of which each rank holds a part, between two that all hold alike."""

    def __init__(self, enters: Any, leaves: Any) -> None:
        super().__init__()
        self.enter, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)
        torch.manual_seed(20 + dist.get_rank())
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH, bias=False)
        self.enters, self.leaves = enters, leaves

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        return self.head(x + self.leaves(self.down(functional.gelu(self.up(self.enters(x))))))


class CutWithBiases(Cut):
    """The same in one module, beside biases of zeros: one that is cut, and one that all hold alike."""

    def __init__(self, enters: Any, leaves: Any) -> None:
        super().__init__(enters, leaves)
        self.cut = nn.Module()
        self.cut.up, self.cut.down = self.up.weight, self.down.weight
        self.cut.of_part, self.cut.of_all = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(WIDTH))
        del self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        inner = functional.gelu(functional.linear(self.enters(x), self.cut.up, self.cut.of_part))
        return self.head(x + self.leaves(functional.linear(inner, self.cut.down)) + self.cut.of_all)


def cut(enters: Any, leaves: Any, made: type[Cut] = Cut, clips: Callable[[nn.Module], None] = lambda _: None) -> Window:
    """Ranks read the same samples, and none has to average anything."""
    model = seeded(lambda: made(enters, leaves))
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2, rank=0):
            (loss_of(model, batch) / 2).backward()
        clips(model)
        optimizer.step()

    return Window(model, train)


def to_norm(model: nn.Module, *, of_all: bool) -> None:
    """Scale all gradients to a norm of 0.05: that of the whole model, or of what this rank holds of it."""
    alike, own = torch.zeros(()), torch.zeros(())
    for name, param in model.named_parameters():
        assert param.grad is not None
        square = param.grad.square().sum()
        alike, own = (alike, own + square) if name.startswith(("up", "down")) else (alike + square, own)
    norm = (alike + (_summed(own) if of_all else own)).sqrt()
    for param in model.parameters():
        param.grad *= 0.05 / norm


class Experts(nn.Module):
    """An expert on each rank, to which the tokens of all are sent."""

    def __init__(self, crosses: Any) -> None:
        super().__init__()
        self.trunk, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, dist.get_world_size())
        self.head = nn.Linear(WIDTH, 4)
        torch.manual_seed(20 + dist.get_rank())
        self.expert = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH))
        self.crosses = crosses

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.trunk(x))
        prob = self.gate(x).softmax(-1)
        top = functional.one_hot(prob.argmax(-1), dist.get_world_size()).to(x.dtype)
        got = self.crosses(self.expert(self.crosses(top.T[:, :, None] * x[None])))
        return self.head(x + ((top * prob).T[:, :, None] * got).sum(0))


def experts(crosses: Any, own: float = 0.5, *, averages: bool = True, averages_own: bool = False) -> Window:
    """``own``: by what the gradients of a rank's own are multiplied; ``averages``: those of all others."""
    model = seeded(lambda: Experts(crosses))
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            if averages_own or (averages and "expert" not in name):
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            elif "expert" in name:
                param.grad *= own
        optimizer.step()

    return Window(model, train)


class Norms(nn.Module):
    """Norms by the mean and the variance of the samples of all ranks."""

    def __init__(self, summed: Any) -> None:
        super().__init__()
        self.enter, self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.summed = summed

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        mean, square = self.summed(torch.stack((x.mean(0), x.square().mean(0)))) / dist.get_world_size()
        return self.head(torch.relu(self.inner((x - mean) / (square - mean.square() + 1e-5).sqrt())))


def norms_summed(rank: int, world: int) -> Window:
    """Each rank's loss is its part of one, and gradients are added up."""
    model = seeded(lambda: Norms(through.all_reduce))
    optimizer = adam(model)

    def train() -> None:
        x, y = next(micros(1))
        (functional.cross_entropy(model(x), y, reduction="sum") / (world * len(x))).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()

    return Window(model, train)


def norms(summed: Any) -> Window:
    model = DDP(seeded(lambda: Norms(summed)))
    optimizer = adam(model)

    def train() -> None:
        loss_of(model, next(micros(1))).backward()
        optimizer.step()

    return Window(model, train)


class NormsWithLoss(Norms):
    """Returns what its loss is made of, too."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return functional.cross_entropy(logits, y), logits


def norms_that_return_their_loss(rank: int, world: int) -> Window:
    model = DDP(seeded(lambda: NormsWithLoss(through.all_reduce)))
    optimizer = adam(model)

    def train() -> None:
        loss, logits = model(*next(micros(1)))
        (loss + 0.1 * logits.square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    return Window(model, train)


_as_it_is = _function(lambda x: x.view_as(x), lambda grad: grad)
_copied = _function(lambda x: x.view_as(x), _summed)
_reduced = _function(_summed, lambda grad: grad)


summed_without_the_others = _function(_summed, lambda grad: grad)
"""Whose backward hands on what it gets, as that of a sum over ranks must not where each has a loss of its own."""


def cut_by_hand(rank: int, world: int) -> Window:
    return cut(_copied, _reduced)


def cut_by_hand_with_biases(rank: int, world: int) -> Window:
    return cut(_copied, _reduced, CutWithBiases)


def cut_and_clipped_by_hand(rank: int, world: int) -> Window:
    return cut(_copied, _reduced, clips=partial(to_norm, of_all=True))


def experts_by_hand(rank: int, world: int) -> Window:
    return experts(_function(_exchanged, _exchanged), 1 / world)


def norms_over_all(rank: int, world: int) -> Window:
    return norms(through.all_reduce)


def norms_over_buffers(rank: int, world: int) -> Window:
    return norms(_function(_gathered, _summed))


RIGHT_SENDING = (
    cut_by_hand,
    cut_by_hand_with_biases,
    cut_and_clipped_by_hand,
    experts_by_hand,
    norms_over_all,
    norms_summed,
    norms_that_return_their_loss,
    norms_over_buffers,
)


def nothing_comes_back_to_what_enters(rank: int, world: int) -> Window:
    return cut(_as_it_is, _reduced)


def clipped_by_what_a_rank_holds(rank: int, world: int) -> Window:
    return cut(_copied, _reduced, clips=partial(to_norm, of_all=False))


def added_up_again_on_the_way_back(rank: int, world: int) -> Window:
    return cut(_copied, through.all_reduce)


def experts_never_divided(rank: int, world: int) -> Window:
    return experts(_function(_exchanged, _exchanged), 1.0)


def tokens_that_come_back_to_the_wrong_rank(rank: int, world: int) -> Window:
    return experts(_function(_exchanged, lambda grad: grad), 1 / world)


def norms_without_the_others_gradient(rank: int, world: int) -> Window:
    return norms(summed_without_the_others)


def layers_beside_experts_that_nobody_averages(rank: int, world: int) -> Window:
    """The mean of the ranks' gradients, which none of them has, is what it should be."""
    return experts(_function(_exchanged, _exchanged), 1 / world, averages=False)


def experts_averaged(rank: int, world: int) -> Window:
    return experts(_function(_exchanged, _exchanged), averages_own=True)


class Gated(nn.Module):
    """Gate and value come of one layer, which is cut by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(WIDTH, 16), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, -1)
        return self.down(functional.silu(gate) * value)


def gate_and_value_that_are_cut_as_one(rank: int, world: int) -> Window:
    model = seeded(Gated)
    plan = {"both": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    optimizer = adam(model)

    def train() -> None:
        loss_of(model, next(micros(1, rank=0))).backward()
        optimizer.step()

    return Window(model, train)


TWICE = "2 x what the average of all ranks' losses changes by: added up over the ranks once too often"
NOT_BACK = "a part that crosses to other ranks does not come back, or is changed on its way"
ERRORS_SENDING: tuple[tuple[Callable[[int, int], Window], str, str], ...] = (
    (nothing_comes_back_to_what_enters, "prove.slope", "Gradients of 4 parameters are other on each rank"),
    (added_up_again_on_the_way_back, "prove.slope", TWICE),
    (clipped_by_what_a_rank_holds, "prove.slope", "scaled by what the program does with them behind the backward"),
    (experts_never_divided, "prove.slope", TWICE),
    (tokens_that_come_back_to_the_wrong_rank, "prove.slope", NOT_BACK),
    (norms_without_the_others_gradient, "prove.slope", NOT_BACK),
    (gate_and_value_that_are_cut_as_one, "prove.unproven", "Its layers are cut over ranks, and compute otherwise"),
    (layers_beside_experts_that_nobody_averages, "prove.slope", "nobody averages them over the 2 ranks"),
    (experts_averaged, "prove.slope", "each of which holds weights of its own there: a wrapper has averaged them"),
)
