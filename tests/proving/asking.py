"""Models whose forward asks other ranks, by collectives without a gradient and with one: right, wrong and unproven."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as through
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from tests.proving.unusual import Counts, averaged, seeded, summed_over_ranks, trained
from tests.proving.window import DDP, WIDTH, Net, Window, adam, micros

Count = Callable[[Tensor], Tensor]


class ByTokens(Net):
    """Returns its loss: a sum over the labels that count, divided by what ``count`` says of them."""

    def __init__(self, count: Count, by: float = 1.0, *, masks: bool = False) -> None:
        super().__init__()
        self.count, self.by, self.masks = count, by, masks

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        outputs, counts = super().forward(x), y >= 0
        if self.masks:
            each = functional.cross_entropy(outputs, y.clamp(min=0), reduction="none")
            return self.by * (each * counts).sum() / self.count(counts)
        return self.by * functional.cross_entropy(outputs, y, ignore_index=-1, reduction="sum") / self.count(counts)


def ragged(number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches of which another part counts on each rank."""
    for at, (x, y) in enumerate(micros(number)):
        yield x, y.where(torch.arange(6) < (5, 3, 4)[(dist.get_rank() + at) % 3], -1)


def by_tokens(model: nn.Module) -> Window:
    optimizer = adam(model)

    def train() -> None:
        model(*next(ragged(1))).backward()
        optimizer.step()

    return Window(model, train)


# --- how ranks count -------------------------------------------------------------------------------------------------


def in_place(counts: Tensor) -> Tensor:
    count = counts.sum()
    dist.all_reduce(count)
    return count


def in_the_background(counts: Tensor) -> Tensor:
    count = counts.sum().float()
    work = dist.all_reduce(count, async_op=True)
    assert work is not None
    work.wait()
    return count.clamp_(min=1)


def gathered(counts: Tensor) -> Tensor:
    mine = counts.sum().view(1)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    dist.barrier()
    return torch.cat(every).sum()


def gathered_into_one(counts: Tensor) -> Tensor:
    every = torch.empty(dist.get_world_size(), dtype=torch.long)
    dist.all_gather_into_tensor(every, counts.sum().view(1))
    return every.sum()


def gathered_as_objects(counts: Tensor) -> Tensor:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {"tokens": int(counts.sum())})
    return torch.tensor(sum(one["tokens"] for one in every))


def gathered_as_fractions(counts: Tensor) -> Tensor:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, Fraction(int(counts.sum())))
    return torch.tensor(float(sum(every)))


def sent_from_rank_0(counts: Tensor) -> Tensor:
    count = counts.sum()
    dist.reduce(count, 0)
    dist.broadcast(count, 0)
    return count


def part_of_all(counts: Tensor) -> Tensor:
    return in_place(counts) / dist.get_world_size()


def as_a_constant(counts: Tensor) -> Tensor:
    return torch.tensor(float(in_place(counts)) / dist.get_world_size())


def known_to_rank_0_alone(counts: Tensor) -> Tensor:
    count = counts.sum()
    dist.reduce(whole := count.clone(), 0)
    return whole if dist.get_rank() == 0 else count


WAYS: tuple[Count, ...] = (
    in_place,
    in_the_background,
    gathered,
    gathered_into_one,
    gathered_as_objects,
    sent_from_rank_0,
)


@frozen
class Program:
    """One window by tokens under DDP."""

    count: Count
    by: float = 1.0
    masks: bool = False

    @property
    def __name__(self) -> str:
        return f"tokens_{self.count.__name__}{'_of_a_mask' * self.masks}_times_{self.by:g}"

    def __call__(self, rank: int, world: int) -> Window:
        return by_tokens(DDP(seeded(lambda: ByTokens(self.count, self.by, masks=self.masks))))


# --- right -----------------------------------------------------------------------------------------------------------


def collective_in_the_forward(rank: int, world: int) -> Window:
    return trained(DDP(seeded(Counts)))


class Statistics(Net):
    """Norms its inputs by a running mean over all ranks, as batch norms by hand do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = self.enter(x).mean(0)
            dist.all_reduce(mean)
            self.mean.lerp_(mean / dist.get_world_size(), 0.1)  # type: ignore[operator]
        return super().forward(x - self.mean)


def statistics_of_all_ranks(rank: int, world: int) -> Window:
    return trained(DDP(seeded(Statistics)))


def statistics_under_fsdp2(rank: int, world: int) -> Window:
    """Whose own collectives are none of the model's."""
    model = seeded(Statistics)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(model)
    return trained(model)


def statistics_and_averages_by_hand(rank: int, world: int) -> Window:
    return trained(seeded(Statistics), then=averaged)


class ByRank(Net):
    """Lets rank 0 alone say by what all divide."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(0) if dist.get_rank() == 0 else torch.zeros(WIDTH)
        dist.broadcast(scale, 0)
        return super().forward(x / scale)


def as_rank_0_says(rank: int, world: int) -> Window:
    """And half of a square."""
    return trained(DDP(seeded(ByRank)), loss=lambda model, batch: 0.5 * model(batch[0]).square().mean())


def tokens_of_all_and_gradients_summed_by_hand(rank: int, world: int) -> Window:
    model = seeded(lambda: ByTokens(in_place))
    optimizer = adam(model)

    def train() -> None:
        model(*next(ragged(1))).backward()
        summed_over_ranks(model)
        optimizer.step()

    return Window(model, train)


class OfAWindow(Net):
    """Is told how many labels of its rank count in a whole window."""

    def forward(self, x: Tensor, y: Tensor, mine: Tensor | float) -> Tensor:  # type: ignore[override]
        dist.all_reduce(every := torch.as_tensor(mine).clone())
        each = functional.cross_entropy(super().forward(x), y.clamp(min=0), reduction="none")
        return dist.get_world_size() * (each * (y >= 0)).sum() / every


@frozen
class Told:
    """Two micro-batches of one count."""

    kind: Callable[[float], Tensor | float]

    @property
    def __name__(self) -> str:
        return f"told_the_count_of_a_window_as_{self.kind.__name__}"

    def __call__(self, rank: int, world: int) -> Window:
        model = DDP(seeded(OfAWindow))
        optimizer, batches = adam(model), [*ragged(2)]
        mine = self.kind(float(sum(int((y >= 0).sum()) for _, y in batches)))

        def train() -> None:
            for x, y in batches:
                model(x, y, mine).backward()
            optimizer.step()

        return Window(model, train)


class Contrasts(Net):
    """Compares its samples with those of all ranks; gradients flow through its own alone, on each rank."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        mine, other = (functional.normalize(super(Contrasts, self).forward(one), dim=1) for one in (x, 1.1 * x))
        logits = 5 * self.gathered(mine) @ self.gathered(other).T
        return self.by * functional.cross_entropy(logits, torch.arange(len(logits)))

    def gathered(self, mine: Tensor) -> Tensor:
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine.detach())
        every[dist.get_rank()] = mine
        return torch.cat(every)


def contrasted(by: float) -> Window:
    return trained(DDP(seeded(lambda: Contrasts(by))), 1, lambda model, batch: model(batch[0]))


def contrast_over_all_ranks(rank: int, world: int) -> Window:
    """Each rank has its own part of one gradient, so that the sum is meant."""
    return contrasted(float(world))


def contrast_over_all_ranks_averaged(rank: int, world: int) -> Window:
    return contrasted(1.0)


class Balanced(Net):
    """A router's loss: parts of all ranks' samples, which are counted, times how likely they are."""

    def forward(self, x: Tensor) -> Tensor:
        likely = super().forward(x).softmax(1)
        parts = functional.one_hot(likely.argmax(1), 4).float().mean(0)
        dist.all_reduce(parts, dist.ReduceOp.SUM)
        parts /= dist.get_world_size()
        return 4 * (parts * likely.mean(0)).sum() - likely.log().mean()


def parts_of_all_ranks(rank: int, world: int) -> Window:
    return trained(DDP(seeded(Balanced)), 1, lambda model, batch: model(batch[0]))


# --- with a gradient, or not kept ------------------------------------------------------------------------------------


class WithGradient(Net):
    def __init__(self, gather: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gather = gather

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gather(self.enter(x)).square().mean()


class Summed(torch.autograd.Function):
    """As layers that are cut by hand have it, whose backward hands on what it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        del ctx
        return grads[0]


def gathered_with_its_graph(rank: int, world: int) -> Window:
    return trained(DDP(seeded(lambda: WithGradient(lambda x: torch.cat(through.all_gather(x))))))


def summed_in_a_function_of_autograd(rank: int, world: int) -> Window:
    return trained(DDP(seeded(lambda: WithGradient(Summed.apply))))


def summed_without_its_graph(rank: int, world: int) -> Window:
    def gather(x: Tensor) -> Tensor:
        every = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(every, x)
        return torch.cat(every)

    return trained(DDP(seeded(lambda: WithGradient(gather))))


def more_than_is_kept(rank: int, world: int) -> Window:
    def gather(x: Tensor) -> Tensor:
        dist.all_reduce(large := torch.ones(1 << 21))
        return x * large[0]

    return trained(DDP(seeded(lambda: WithGradient(gather))))


class Unsteady(Net):
    """Asks other ranks so many times in its first forward, and so many in each that follows."""

    def __init__(self, first: int, others: int) -> None:
        super().__init__()
        self.times = [others, first]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times[-1]):
            dist.all_reduce(torch.ones(()))
        del self.times[1:]
        return super().forward(x)


def one_collective_more(rank: int, world: int) -> Window:
    return trained(DDP(seeded(lambda: Unsteady(1, 2))), 1)


def one_collective_less(rank: int, world: int) -> Window:
    return trained(DDP(seeded(lambda: Unsteady(2, 1))), 1)


RIGHT_ASKING = (
    *(Program(one, 2.0) for one in WAYS),
    collective_in_the_forward,
    Program(in_place, 2.0, masks=True),
    Program(part_of_all, masks=True),
    Program(as_a_constant, masks=True),
    statistics_of_all_ranks,
    statistics_under_fsdp2,
    statistics_and_averages_by_hand,
    as_rank_0_says,
    tokens_of_all_and_gradients_summed_by_hand,
    Told(float),
    Told(torch.tensor),
    contrast_over_all_ranks,
    contrast_over_all_ranks_averaged,
    parts_of_all_ranks,
    gathered_with_its_graph,
    more_than_is_kept,
)
HALVED = "0.500 x what they should be: sums divided by the samples of all ranks, whose average is taken too"
REPEATS = "does not repeat the collectives of the run (allreduce at asking.py:"
ERRORS_ASKING: tuple[tuple[Any, ...], ...] = (
    *((one, "prove.averaged-twice", HALVED) for one in map(Program, WAYS)),
    (Program(in_place, masks=True), "prove.averaged-twice", HALVED),
    (Program(known_to_rank_0_alone), "prove.tokens"),
    (Program(gathered_as_fractions), "prove.unproven", "sends objects of class fractions.Fraction to other ranks"),
    (summed_in_a_function_of_autograd, "prove.slope", "a part that crosses to other ranks"),
    (summed_without_its_graph, "prove.slope", "a part that crosses to other ranks"),
    (one_collective_more, "prove.unproven", REPEATS),
    (one_collective_less, "prove.unproven", REPEATS),
)
"""Each with its rule and a word of its text."""
