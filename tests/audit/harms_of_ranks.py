"""What errors of several ranks do to a number, after three steps on two ranks; see ``harms``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.audit import by_gradients, by_habit, by_hand, by_numbers, by_sharding
from tests.audit.by_gradients import batch
from tests.audit.case import WIDTH, Case, adam, divided, net, rows
from tests.audit.errors import ERRORS
from tests.audit.harms import STEPS, Make, Seen


@frozen
class HarmOfRanks:
    """One error of two ranks, what it does, and the number that shows it."""

    make: Make
    mended: Make
    what: str
    measure: Callable[[Case, int], Seen]

    @property
    def rule(self) -> str:
        (rule,) = (one.rule for one in ERRORS if one.make is self.make)
        return rule


def seen_over_ranks(rank: int, world: int, at: int) -> tuple[Seen, Seen]:
    """What the wrong program of a row comes to, and the mended one."""
    harm = HARMS_OF_RANKS[at]
    wrong = harm.measure(harm.make(rank, world), rank)
    return wrong, harm.measure(harm.mended(rank, world), rank)


def train(case: Case, rank: int) -> None:
    """Three steps, each rank on samples of its own."""
    generator = torch.Generator().manual_seed(20 + rank)
    torch.manual_seed(30 + rank)
    for _ in range(STEPS):
        case.optimizer.zero_grad()
        inputs, classes = torch.randn(8, WIDTH, generator=generator), torch.randint(4, (8,), generator=generator)
        cross_entropy(case.model(inputs), classes).backward()
        case.optimizer.step()


def parted(case: Case, rank: int) -> Seen:
    """How far the weights of the ranks are apart after three steps; the exception where they cannot be taken."""
    try:
        train(case, rank)
    except RuntimeError as error:
        return type(error).__name__
    return difference(case.model)


def difference(model: nn.Module) -> float:
    """Sum of what rank 0 and rank 1 differ by, in parameters and buffers; the same on both."""
    total = torch.zeros(())
    for tensor in (*model.parameters(), *model.buffers()):
        whole: Any = tensor.detach()
        whole = whole.to_local() if hasattr(whole, "to_local") else whole
        if not whole.is_floating_point():
            continue
        held = [torch.zeros_like(whole) for _ in range(dist.get_world_size())]
        dist.all_gather(held, whole.contiguous())
        total += (held[0] - held[1]).abs().sum()
    return float(total)


def parted_by_a_step(case: Case, rank: int) -> float:
    """How far the step apart that the program is about to take moves the ranks."""
    case.optimizer.step()
    return difference(case.model)


def gradients_missing(case: Case, rank: int) -> float:
    """Gradients that one rank has and the other has not."""
    there = torch.tensor([float(param.grad is not None) for param in case.model.parameters()])
    other = there.clone()
    dist.all_reduce(other)
    return float((other == 1).sum())


def different_samples(case: Case, rank: int) -> float:
    """Different samples that both ranks together read in a pass."""
    mine = [tuple(row.tolist()) for read in case.loaders[0] for row in (read[0] if isinstance(read, list) else read)]
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, mine)
    return float(len({row for rows_read in held for row in rows_read}))


def samples_read(case: Case, rank: int) -> float:
    """Samples that both ranks together read in a pass of 32."""
    count = torch.tensor(float(sum(len(read[0]) for read in case.loaders[0])))
    dist.all_reduce(count)
    return float(count)


def batches_apart(case: Case, rank: int) -> float:
    """Batches that one rank reads in a pass when the other has none left, where it waits for ever."""
    counts = torch.tensor([float(len(list(case.loaders[0]))) * (1 if rank else -1)])
    dist.all_reduce(counts)
    return float(counts.abs())


# --- without their errors ---


def ddp(rank: int, world: int) -> Case:
    model = DistributedDataParallel(net())
    return Case(model=model, optimizer=adam(model), loaders=(divided(rank, world),))


def inside_ddp(rank: int, world: int) -> Case:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(net(), nn.Linear(4, 4)))
    return Case(model=model, optimizer=adam(model))


def unfrozen_before_ddp(rank: int, world: int) -> Case:
    model = net()
    model.blocks.requires_grad_(requires_grad=False)
    model.blocks.requires_grad_(requires_grad=True)
    wrapped = DistributedDataParallel(model)
    return Case(model=wrapped, optimizer=adam(wrapped))


def frozen_before_ddp(rank: int, world: int) -> Case:
    model = net()
    model.blocks.requires_grad_(requires_grad=False)
    wrapped = DistributedDataParallel(model)
    return Case(model=wrapped, optimizer=adam(wrapped))


def head_replaced_before_ddp(rank: int, world: int) -> Case:
    model = net()
    model.head = nn.Linear(WIDTH, 4)
    wrapped = DistributedDataParallel(model)
    return Case(model=wrapped, optimizer=adam(wrapped))


def stepped_on_both(rank: int, world: int) -> Case:
    model = net()
    optimizer = by_numbers.stepped(model)
    model.load_state_dict(net().state_dict())
    return Case(model=DistributedDataParallel(model), optimizer=optimizer)


def replicated(rank: int, world: int) -> Case:
    model = net()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Case(model=model, optimizer=adam(model))


def forward_through_ddp(rank: int, world: int) -> Case:
    model = DistributedDataParallel(net())
    model(batch(rank)).square().sum().backward()
    return Case(model=model, optimizer=adam(model), at_step=True)


def averages_kept(rank: int, world: int) -> Case:
    model = net()
    entered = model.enter(batch(rank))
    (entered if rank else model.head(entered)).square().sum().backward()
    for param in model.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        dist.all_reduce(param.grad)
    return Case(model=model, optimizer=adam(model), at_step=True)


def all_of_both(rank: int, world: int) -> Case:
    generator = torch.Generator().manual_seed(0)
    part, _ = torch.utils.data.random_split(rows(), [32, 0], generator)
    sampler: Any = DistributedSampler(part, num_replicas=world, rank=rank)
    return Case(model=net(), loaders=(DataLoader(part, batch_size=4, sampler=sampler),))


READ_TWICE = "both ranks read the same samples"
APART = "the ranks' weights part"

HARMS_OF_RANKS: tuple[HarmOfRanks, ...] = (
    HarmOfRanks(by_hand.no_wrapper, ddp, APART, parted),
    HarmOfRanks(by_hand.head_beside_ddp, inside_ddp, APART, parted),
    HarmOfRanks(by_hand.unfrozen_after_ddp, unfrozen_before_ddp, APART, parted),
    HarmOfRanks(by_hand.head_replaced_after_ddp, head_replaced_before_ddp, "the second step raises", parted),
    HarmOfRanks(by_hand.frozen_after_ddp, frozen_before_ddp, "the second step raises", parted),
    HarmOfRanks(by_hand.frozen_on_one_rank, ddp, APART, parted),
    HarmOfRanks(by_hand.rate_by_rank, ddp, APART, parted),
    HarmOfRanks(by_hand.weights_read_on_rank_0_after_ddp, ddp, APART, parted),
    HarmOfRanks(by_hand.one_bit_of_one_rank, ddp, APART, parted),
    HarmOfRanks(by_hand.buffer_of_one_rank, ddp, "the ranks' buffers part", parted),
    HarmOfRanks(by_numbers.state_read_on_rank_0, stepped_on_both, APART, parted),
    HarmOfRanks(by_numbers.state_by_rank, stepped_on_both, APART, parted),
    HarmOfRanks(by_numbers.betas_by_rank, ddp, APART, parted),
    HarmOfRanks(by_numbers.no_sync_that_never_ended, ddp, APART, parted),
    HarmOfRanks(by_sharding.fsdp2_over_one_rank, replicated, APART, parted),
    HarmOfRanks(by_habit.replicas_that_begin_unlike, replicated, APART, parted),
    HarmOfRanks(by_gradients.forward_around_ddp, forward_through_ddp, APART, parted_by_a_step),
    HarmOfRanks(by_habit.hook_that_averages_nothing, forward_through_ddp, APART, parted_by_a_step),
    HarmOfRanks(
        by_gradients.averaged_where_there_is_one, averages_kept, "one rank does not step a layer", gradients_missing
    ),
    HarmOfRanks(by_hand.same_samples, ddp, READ_TWICE, samples_read),
    HarmOfRanks(by_hand.shuffled_alike, ddp, READ_TWICE, samples_read),
    HarmOfRanks(by_hand.sampler_of_rank_0, ddp, "half of the samples are never read", different_samples),
    HarmOfRanks(by_numbers.order_by_rank, ddp, "some samples are never read", different_samples),
    HarmOfRanks(by_habit.sampler_over_parts, all_of_both, "samples are never read", different_samples),
    HarmOfRanks(by_numbers.parts_of_unlike_length, ddp, "a rank waits for ever", batches_apart),
)
