"""Programs that share their work wrongly over micro-batches and ranks, and their right twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather as gathered_with_graph
from torch.nn import functional as fn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.audit.by_libraries import accelerator
from tests.audit.case import WIDTH, adam, divided, net, rows
from tests.audit.loops import Loop

MICRO = 2
# --- accelerate ---


def prepared(**options: Any) -> tuple[Any, Any, Any, Any]:
    ours = accelerator(**options)
    model = net()
    return ours, *ours.prepare(model, adam(model), DataLoader(rows(), 4, shuffle=True))


def divided_under_accumulate(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared(gradient_accumulation_steps=MICRO)
    for x, y in loader:
        with ours.accumulate(model):
            ours.backward(fn.cross_entropy(model(x), y) / MICRO)
            optimizer.step()
            optimizer.zero_grad()


def a_sum_divided_by_accelerate_s_own_count(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared(gradient_accumulation_steps=MICRO)
    for x, y in loader:
        with ours.accumulate(model):
            outputs = model(x)
            loss = fn.cross_entropy(outputs, y) + 0.1 * outputs.square().mean()
            ours.backward(loss / ours.gradient_accumulation_steps)
            optimizer.step()
            optimizer.zero_grad()


def accumulates(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared(gradient_accumulation_steps=MICRO)
    for x, y in loader:
        with ours.accumulate(model):
            ours.backward(fn.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


def mean_of_two_losses(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared(gradient_accumulation_steps=2)
    for x, y in loader:
        with ours.accumulate(model):
            outputs = model(x)
            ours.backward((fn.cross_entropy(outputs, y) + 0.1 * outputs.square().mean()) / 2)
            optimizer.step()
            optimizer.zero_grad()


def divides_by_itself(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared()
    for at, (x, y) in enumerate(loader):
        ours.backward(fn.cross_entropy(model(x), y) / MICRO)
        if (at + 1) % MICRO == 0:
            optimizer.step()
            optimizer.zero_grad()


def clipped_behind_the_step(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared()
    for x, y in loader:
        ours.backward(fn.cross_entropy(model(x), y))
        optimizer.step()
        ours.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()


def clipped_before_the_step(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared()
    for x, y in loader:
        ours.backward(fn.cross_entropy(model(x), y))
        ours.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def clipped_at_each_micro_batch(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared(gradient_accumulation_steps=MICRO)
    for x, y in loader:
        with ours.accumulate(model):
            ours.backward(fn.cross_entropy(model(x), y))
            ours.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()


def clipped_where_it_steps(rank: int, world: int) -> None:
    ours, model, optimizer, loader = prepared(gradient_accumulation_steps=MICRO)
    for x, y in loader:
        with ours.accumulate(model):
            ours.backward(fn.cross_entropy(model(x), y))
            if ours.sync_gradients:
                ours.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()


# --- torch ---


def torch_clips_at_each_micro_batch(rank: int, world: int) -> None:
    model = net()
    optimizer = adam(model)
    for at, (x, y) in enumerate(divided(rank, world)):
        (fn.cross_entropy(model(x), y) / MICRO).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if at % MICRO:
            optimizer.step()
            optimizer.zero_grad()


def each_sample_is_clipped_by_itself(rank: int, world: int) -> None:
    """As for private training: what is clipped is added up elsewhere."""
    model = net()
    optimizer = adam(model)
    for x, y in divided(rank, world):
        total = [torch.zeros_like(one) for one in model.parameters()]
        for row, label in zip(x[:2], y[:2], strict=True):
            optimizer.zero_grad()
            fn.cross_entropy(model(row[None]), label[None]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            torch._foreach_add_(total, [one.grad for one in model.parameters()])
        for one, grad in zip(model.parameters(), total, strict=True):
            one.grad = grad / 2
        optimizer.step()


def the_other_goes_backward_behind_the_clip(rank: int, world: int) -> None:
    maker, judge = net(), net()
    first, second = adam(maker), adam(judge)
    for x, y in divided(rank, world):
        for model in (judge, maker):
            fn.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()


def torch_clips_behind_the_step(rank: int, world: int) -> None:
    model = net()
    optimizer = adam(model)
    for x, y in divided(rank, world):
        fn.cross_entropy(model(x), y).backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.zero_grad()


def norm_is_read_behind_the_step(rank: int, world: int) -> None:
    model = net()
    optimizer = adam(model)
    for x, y in divided(rank, world):
        fn.cross_entropy(model(x), y).backward()
        optimizer.step()
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        optimizer.zero_grad()


def clips_the_second_in_its_turn(rank: int, world: int) -> None:
    maker, judge = net(), net()
    first, second = adam(maker), adam(judge)
    for x, y in divided(rank, world):
        fn.cross_entropy(maker(x), y).backward()
        first.step()
        fn.cross_entropy(judge(x), y).backward()
        nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        second.step()
        first.zero_grad()
        second.zero_grad()


# --- ranks ---


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return fn.normalize(self.one(x), dim=-1), fn.normalize(self.other(x), dim=-1)


def contrasts(rank: int, world: int, gather: Callable[[Tensor], Tensor], *, first: int | None = None) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Pairs())
    optimizer = adam(model)
    for x, _ in divided(rank, world):
        one, other = model(x)
        ones, others, targets = (
            gather(one),
            gather(other),
            torch.arange(len(x)) + (rank if first is None else first) * len(x),
        )
        loss = fn.cross_entropy(5 * one @ others.t(), targets) + fn.cross_entropy(5 * other @ ones.t(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def parts_of(tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.detach())
    return parts


def own_part_without_graph(rank: int, world: int) -> None:
    contrasts(rank, world, lambda tensor: torch.cat(parts_of(tensor)))


def gathered_by_lightning_without_graph(rank: int, world: int) -> None:
    from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available as gather

    contrasts(rank, world, lambda tensor: gather(tensor).flatten(0, 1))


def gathered_by_lightning_with_its_graph(rank: int, world: int) -> None:
    from lightning.fabric.utilities.distributed import _all_gather_ddp_if_available as gather

    contrasts(rank, world, lambda tensor: gather(tensor, sync_grads=True).flatten(0, 1))


def own_part_put_back(rank: int, world: int) -> None:
    def gather(tensor: Tensor) -> Tensor:
        parts = parts_of(tensor)
        parts[rank] = tensor
        return torch.cat(parts)

    contrasts(rank, world, gather)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.cat(parts_of(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def gathered_by_a_function(rank: int, world: int) -> None:
    contrasts(rank, world, Gather.apply)


def gathered_by_torch(rank: int, world: int) -> None:
    contrasts(rank, world, lambda tensor: torch.cat(gathered_with_graph(tensor)))


def pairs_of_the_first_rank(rank: int, world: int) -> None:
    contrasts(rank, world, Gather.apply, first=0)


def pairs_of_the_first_rank_for_torch(rank: int, world: int) -> None:
    contrasts(rank, world, lambda tensor: torch.cat(gathered_with_graph(tensor)), first=0)


def gathered_in_one(rank: int, world: int, first: int | None = None, longer: bool = False) -> None:
    """Both views beside each other; ``longer``: or by themselves, and only then of one length."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(WIDTH, 16))
    optimizer = adam(model)
    for x, _ in divided(rank, world):
        one, other = model(x).chunk(2, 1)
        if longer:
            others = fn.normalize(Gather.apply(other.contiguous()), dim=-1)
        else:
            others = Gather.apply(torch.cat([one, other], 1)).chunk(2, 1)[1]
        targets = torch.arange(len(x)) + (rank if first is None else first) * len(x)
        fn.cross_entropy(one @ others.t(), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def pairs_of_the_first_rank_in_one(rank: int, world: int) -> None:
    gathered_in_one(rank, world, first=0)


def pairs_of_the_first_rank_of_any_length(rank: int, world: int) -> None:
    gathered_in_one(rank, world, first=0, longer=True)


def spread(outputs: Tensor) -> Tensor:
    """How far the numbers of outputs go with each other."""
    centred = outputs - outputs.mean(0)
    return (centred.t() @ centred / len(outputs)).fill_diagonal_(0).square().sum()


def spreads(rank: int, world: int, gather: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(WIDTH, 8))
    optimizer = adam(model)
    for x, _ in divided(rank, world):
        outputs = model(x)
        everyone = gather(outputs)
        loss = outputs.square().mean() + spread(everyone)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def spread_of_all_without_graph(rank: int, world: int) -> None:
    def gather(outputs: Tensor) -> Tensor:
        return torch.cat(parts_of(outputs))

    spreads(rank, world, gather)


def spread_of_all(rank: int, world: int) -> None:
    spreads(rank, world, Gather.apply)


def own_part_first(rank: int, world: int) -> None:
    def gather(tensor: Tensor) -> Tensor:
        others = [one for at, one in enumerate(parts_of(tensor)) if at != rank]
        return torch.cat([tensor, *others])

    contrasts(rank, world, gather, first=0)


def gathered_for_a_metric(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    for x, y in divided(rank, world):
        outputs = model(x)
        torch.cat(parts_of(outputs)).argmax(-1)
        fn.cross_entropy(outputs, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def averages_by_hand(rank: int, world: int, wait: Callable[[list[Any]], object]) -> None:
    model = net()
    optimizer = adam(model)
    for x, y in divided(rank, world):
        fn.cross_entropy(model(x), y).backward()
        works = []
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= world
                works.append(dist.all_reduce(param.grad, async_op=True))
        wait(works)
        optimizer.step()
        optimizer.zero_grad()


def nobody_waits(rank: int, world: int) -> None:
    averages_by_hand(rank, world, lambda works: dist.barrier())


def waits_for_each(rank: int, world: int) -> None:
    averages_by_hand(rank, world, lambda works: [one.wait() for one in works])


def attacked(name: str, *, clears: bool = False, frees: bool = False, once: bool = False) -> Loop:
    """Samples that are moved against the model; ``frees``: each way there trains too, the last with what it moves."""

    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        shift = torch.zeros_like(x).requires_grad_()
        for at in range(1 if once else 3):
            (fn.cross_entropy(model(x + shift), y) / (3 if frees else 1)).backward()
            assert shift.grad is not None
            if frees and at == 2:
                break
            with torch.no_grad():
                shift += 0.05 * shift.grad.sign()
            shift.grad.zero_()
        return (x + shift).detach()

    def run(rank: int, world: int) -> None:
        model = net()
        optimizer = adam(model)
        for _ in range(3):
            optimizer.zero_grad()
            x, y = torch.randn(8, WIDTH), torch.arange(8) % 3
            worse = attack(model, x, y)
            if clears:
                optimizer.zero_grad()
            if not frees:
                fn.cross_entropy(model(worse), y).backward()
            optimizer.step()

    run.__name__ = name
    return Loop(run, rule="" if clears or frees or once else "run.others-gradients")


def residual_by_parts(rank: int, world: int) -> None:
    """Places get gradients, which nobody asks for."""
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        for part in torch.linspace(0, 1, 24).reshape(3, 8, 1):
            x = part.clone().requires_grad_()
            u = model(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            ((slope - u).square().mean() / 3).backward()
        (model(torch.zeros(1, 1)) - 1).square().mean().backward()
        optimizer.step()


WRONG_SHARES: tuple[Loop, ...] = (
    attacked("attacked_and_not_cleared"),
    Loop(divided_under_accumulate, "accelerate", rule="run.loss-divided"),
    Loop(a_sum_divided_by_accelerate_s_own_count, "accelerate", rule="run.loss-divided"),
    Loop(clipped_behind_the_step, "accelerate", rule="run.clipped-late"),
    Loop(torch_clips_behind_the_step, rule="run.clipped-late"),
    Loop(clipped_at_each_micro_batch, "accelerate", rule="run.clipped-between"),
    Loop(torch_clips_at_each_micro_batch, rule="run.clipped-between"),
    Loop(own_part_without_graph, ranks=2, rule="run.gathered-apart"),
    Loop(gathered_by_lightning_without_graph, "lightning", 2, rule="run.gathered-apart"),
    Loop(pairs_of_the_first_rank, ranks=2, rule="run.pairs-misplaced"),
    Loop(pairs_of_the_first_rank_for_torch, ranks=2, rule="run.pairs-misplaced"),
    Loop(pairs_of_the_first_rank_in_one, ranks=2, rule="run.pairs-misplaced"),
    Loop(pairs_of_the_first_rank_of_any_length, ranks=2, rule="run.pairs-misplaced"),
    Loop(spread_of_all_without_graph, ranks=2, rule="run.term-constant"),
    Loop(nobody_waits, ranks=2, rule="run.unwaited"),
)
RIGHT_SHARES: tuple[Loop, ...] = (
    attacked("attacked_and_cleared", clears=True),
    attacked("attacked_on_the_way", frees=True),
    attacked("attacked_once_and_plain", once=True),
    Loop(residual_by_parts),
    *(Loop(run, "accelerate") for run in (accumulates, mean_of_two_losses, divides_by_itself, clipped_before_the_step)),
    *(Loop(run) for run in (norm_is_read_behind_the_step, clips_the_second_in_its_turn)),
    *(Loop(run) for run in (each_sample_is_clipped_by_itself, the_other_goes_backward_behind_the_clip)),
    Loop(clipped_where_it_steps, "accelerate"),
    Loop(gathered_by_lightning_with_its_graph, "lightning", 2),
    *(Loop(run, ranks=2) for run in (own_part_put_back, own_part_first, gathered_by_a_function, gathered_by_torch)),
    *(Loop(run, ranks=2) for run in (spread_of_all, gathered_in_one, gathered_for_a_metric, waits_for_each)),
)
