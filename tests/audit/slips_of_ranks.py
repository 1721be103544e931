"""What errors of two ranks do to numbers, in loops of plain torch; see ``harms_in_torch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as through
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.functional import cross_entropy, dropout

from tests.audit.case import WIDTH, net
from tests.audit.harms import STEPS, Seen
from tests.audit.harms_in_torch import sgd, size
from tests.proving import sending

DDP = nn.parallel.DistributedDataParallel


@frozen
class SlipOfRanks:
    """An error, what it does, and what each rank comes to with it and without it."""

    rule: str
    what: str
    wrong: Callable[[int], Seen]
    """Takes the rank."""
    right: Callable[[int], Seen]


def batch(rank: int, at: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(20 + 10 * rank + at)
    return torch.randn(8, WIDTH, generator=generator), torch.randint(4, (8,), generator=generator)


def trained(rank: int, model: nn.Module, ticks: bool = False) -> float:
    optimizer = sgd(model)
    rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    for at in range(STEPS):
        inputs, classes = batch(rank, at)
        torch.manual_seed(40 + at)
        optimizer.zero_grad()
        cross_entropy(model(inputs), classes).backward()
        optimizer.step()
        if ticks:
            rate.step()
    return size(model)


def modes(*, alike: bool) -> Callable[[int], float]:
    return lambda rank: trained(rank, DDP(net(dropout=0.5)).train(alike or rank == 0))


def ticks(*, alike: bool) -> Callable[[int], float]:
    return lambda rank: trained(rank, DDP(net()), ticks=alike or rank == 0)


def summed(part: Tensor) -> Tensor:
    """Over the ranks, each of which has computed with its part of a layer."""
    whole = part.detach().clone()
    dist.all_reduce(whole)
    return whole


def halves(rank: int, x: Tensor) -> Tensor:
    """A layer that is cut over two ranks."""
    weight = net().enter.weight.detach()
    cut = slice(rank * WIDTH // 2, (rank + 1) * WIDTH // 2)
    return summed(x[:, cut] @ weight[:, cut].T)


def drops(*, alike: bool) -> Callable[[int], float]:
    """A layer of which each rank has one half, beside what it reads, of which dropout has left something."""

    def answer(rank: int) -> float:
        inputs, _ = batch(0, 0)
        torch.manual_seed(5 if alike else 5 + rank)
        hidden = dropout(inputs, 0.5)
        return float((hidden + halves(rank, hidden)).square().sum())

    return answer


def reads(*, alike: bool) -> Callable[[int], float]:
    return lambda rank: float(halves(rank, batch(0 if alike else rank, 0)[0]).square().sum())


def orders(*, alike: bool) -> Callable[[int], float]:
    """Different samples that both ranks read, each its half of an order of 32."""

    def different(rank: int) -> float:
        generator = torch.Generator().manual_seed(3 if alike else 3 + rank)
        read = torch.zeros(32)
        read[torch.randperm(32, generator=generator)[rank::2]] = 1
        return float((summed(read) > 0).sum())

    return different


def shards(*, inside_ddp: bool) -> Callable[[int], Seen]:
    """What a rank holds of a model whose shards DDP takes for copies, and sends from rank 0 to all."""

    def held(rank: int) -> Seen:
        del rank
        model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"))
        if inside_ddp:
            DDP(model)
        return float(sum(param.detach().double().sum() for param in model.parameters()))

    return held


def forward_between(*, slip: bool) -> Callable[[int], Seen]:
    """What a rank holds after two steps of FSDP1, with an evaluation between backward and step, or without one."""

    def held(rank: int) -> Seen:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.linspace(-1, 1, 8).view(2, 4) * (1 + rank)
        for _ in range(2):
            model(inputs).square().mean().backward()
            if slip:
                with torch.no_grad():
                    model(inputs)
            optimizer.step()
            optimizer.zero_grad()
        return float(sum(param.detach().double().sum() for param in model.parameters()))

    return held


def state_of_the_optimizer(*, sharded: bool) -> Callable[[int], Seen]:
    """A step with state that was loaded whole, or as it was saved."""

    def stepped(rank: int) -> Seen:
        model = fully_shard(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        inputs, classes = batch(rank, 0)
        cross_entropy(model(inputs), classes).backward()
        optimizer.step()
        state = optimizer.state_dict()
        if not sharded:
            state["state"] = {
                at: {key: whole(value) for key, value in one.items()} for at, one in state["state"].items()
            }
        optimizer.load_state_dict(state)
        try:
            optimizer.step()
        except RuntimeError as error:
            return type(error).__name__
        return float(sum(param.to_local().detach().sum() for param in model.parameters()))  # type: ignore[attr-defined]

    return stepped


def weights_loaded(*, sharded: bool) -> Callable[[int], Seen]:
    def loaded(rank: int) -> Seen:
        del rank
        model = fully_shard(net())
        state = model.state_dict()
        try:
            model.load_state_dict(state if sharded else {name: whole(value) for name, value in state.items()})
        except (RuntimeError, AttributeError, TypeError) as error:
            return type(error).__name__
        return float(sum(param.to_local().detach().sum() for param in model.parameters()))  # type: ignore[attr-defined]

    return loaded


class Copies(nn.Module):
    """A part that trains, and a copy that moves to it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.q, self.k = False, nn.Linear(4, 4), nn.Linear(4, 4)

    def move(self) -> None:
        for new, old in zip(self.q.parameters(), self.k.parameters(), strict=True):
            old.data.lerp_(new.data, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside:
            self.move()
        out: torch.Tensor = self.q(x) + self.k(x)
        return out


def written(*, inside: bool) -> Callable[[int], Seen]:
    """Moves the copy inside of the forward, for which FSDP2 has gathered it, or behind the backward."""

    def moved(rank: int) -> Seen:
        del rank
        torch.manual_seed(0)
        model = Copies()
        model.inside = inside
        fully_shard(model)(torch.ones(1, 4)).sum().backward()
        if not inside:
            model.move()
        return float(sum(whole(param).double().sum() for param in model.k.parameters()))

    return moved


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def normed(summed: Any) -> Callable[[int], float]:
    """By the samples of all ranks, over which ``summed`` adds up."""

    def train(rank: int) -> float:
        del rank
        window = sending.norms(summed)
        window.train()
        assert window.model is not None
        return size(window.model)

    return train


def stages(*, turned: bool) -> Callable[[int], float]:
    """Two of a pipeline; the first one takes the last micro-batch first, or goes in the order of its gradients."""

    def train(rank: int) -> float:
        torch.manual_seed(0)
        first, last = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh()), nn.Linear(8, 4)
        stage = last if rank else first
        parts = [batch(0, at) for at in range(3)]
        optimizer = sgd(stage)
        if rank == 0:
            outputs = [stage(x) for x, _ in parts]
            for one in outputs:
                dist.send(one.detach().contiguous(), 1)
            for one in reversed(outputs) if turned else outputs:
                grad = torch.empty_like(one)
                dist.recv(grad, 1)
                one.backward(grad)
        else:
            given = [torch.empty(8, 8) for _ in parts]
            for one in given:
                dist.recv(one, 0)
            for one, (_, classes) in zip(given, parts, strict=True):
                cross_entropy(stage(one.requires_grad_()), classes).backward()
                assert one.grad is not None
                dist.send(one.grad, 0)
        optimizer.step()
        return size(stage)

    return train


SLIPS_OF_RANKS: tuple[SlipOfRanks, ...] = (
    *(
        SlipOfRanks(rule, "gradients are lost", forward_between(slip=True), forward_between(slip=False))
        for rule in ("loop.forward-loses-gradients", "loop.evaluated-before-step")
    ),
    SlipOfRanks(
        "prove.slope",
        "a part of the gradient is lost",
        normed(sending.summed_without_the_others),
        normed(through.all_reduce),
    ),
    SlipOfRanks("prove.handed-back", "gradients are those of others", stages(turned=True), stages(turned=False)),
    SlipOfRanks("run.written-in-forward", "what was written is lost", written(inside=True), written(inside=False)),
    SlipOfRanks("run.ranks-modes", "one rank drops nothing", modes(alike=False), modes(alike=True)),
    SlipOfRanks("run.ranks-schedulers", "the ranks' weights part", ticks(alike=False), ticks(alike=True)),
    SlipOfRanks("run.dropout-unlike", "halves of other layers are added", drops(alike=False), drops(alike=True)),
    SlipOfRanks("run.tensor-samples", "halves of other samples are added", reads(alike=False), reads(alike=True)),
    SlipOfRanks("run.orders-apart", "samples are never read", orders(alike=False), orders(alike=True)),
    SlipOfRanks(
        "run.wrapped-twice", "rank 1 gets the shards of rank 0", shards(inside_ddp=True), shards(inside_ddp=False)
    ),
    SlipOfRanks(
        "run.whole-state",
        "the next step raises",
        state_of_the_optimizer(sharded=False),
        state_of_the_optimizer(sharded=True),
    ),
    SlipOfRanks("run.whole-weights", "torch raises", weights_loaded(sharded=False), weights_loaded(sharded=True)),
)


def both_ways(rank: int, world: int, at: int) -> tuple[Seen, Seen]:
    """What a rank comes to with the error and without it."""
    slip = SLIPS_OF_RANKS[at]
    return slip.wrong(rank), slip.right(rank)
