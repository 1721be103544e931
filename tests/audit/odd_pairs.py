"""Right programs of unusual shape on two ranks: who divides, who averages and who holds what in other ways."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    random_split,
)

import prepkit as pk
from tests.audit.by_gradients import batch
from tests.audit.by_libraries import accelerator, llama
from tests.audit.by_sharding import flattened, sharded
from tests.audit.case import WIDTH, Case, adam, divided, net, rows
from tests.audit.odd import Distilled, Experts


class EveryOther(Sampler[int]):
    """Splits by rank, in words of its own."""

    def __init__(self, first: int, step: int) -> None:
        self.first, self.step = first, step

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, 32, self.step))

    def __len__(self) -> int:
        return len(range(self.first, 32, self.step))


class Buckets(Sampler[list[int]]):
    """Batches of its own, split by the rank of the process."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(32, generator=torch.Generator().manual_seed(5)).tolist()
        mine = order[dist.get_rank() :: dist.get_world_size()]
        return iter([mine[at : at + 4] for at in range(0, len(mine), 4)])

    def __len__(self) -> int:
        return 4


class Stream(IterableDataset[Tensor]):
    """Divides itself, by numbers that it is given or by the process group."""

    def __init__(self, rank: int | None = None, world: int = 2) -> None:
        self.place = None if rank is None else (rank, world)

    def __iter__(self) -> Iterator[Tensor]:
        rank, world = self.place or (dist.get_rank(), dist.get_world_size())
        return (torch.full((WIDTH,), float(at)) for at in range(rank, 32, world))


class Shard(Dataset[Tensor]):
    """Reads a part that nobody can see from outside."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), float(index * dist.get_world_size() + dist.get_rank()))


def read(loader: Any, model: nn.Module | None = None) -> Case:
    wrapped = DistributedDataParallel(net()) if model is None else model
    return Case(model=wrapped, optimizer=adam(wrapped), loaders=(loader,))


def own_sampler(rank: int, world: int) -> Case:
    return read(DataLoader(rows(), batch_size=4, sampler=EveryOther(rank, world)))


def own_batch_sampler(rank: int, world: int) -> Case:
    return read(DataLoader(rows(), batch_sampler=Buckets()))


def with_replacement_by_rank(rank: int, world: int) -> Case:
    draws = torch.Generator().manual_seed(rank)
    return read(DataLoader(rows(), 4, sampler=RandomSampler(rows(), replacement=True, num_samples=16, generator=draws)))


def weighted_by_rank(rank: int, world: int) -> Case:
    return read(DataLoader(rows(), 4, sampler=WeightedRandomSampler([1.0] * 32, 16)))  # seeds part after the weights


def stream_that_divides_itself(rank: int, world: int) -> Case:
    return read(DataLoader(Stream(rank, world), batch_size=4))


def stream_by_the_group(rank: int, world: int) -> Case:
    return read(DataLoader(Stream(), batch_size=4))


def stream_of_workers(rank: int, world: int) -> Case:
    return read(DataLoader(Stream(), batch_size=4, num_workers=1))


def data_by_the_group(rank: int, world: int) -> Case:
    return read(DataLoader(Shard(), batch_size=4, shuffle=True))


def halves_of_a_split(rank: int, world: int) -> Case:
    halves = random_split(rows(), [16, 16], torch.Generator().manual_seed(0))
    return read(DataLoader(halves[rank], batch_size=4, shuffle=True))


def datasets_by_node(rank: int, world: int) -> Case:
    from datasets import Dataset as Table
    from datasets.distributed import split_dataset_by_node

    table = split_dataset_by_node(Table.from_dict({"x": list(range(32))}), rank, world)
    return read(DataLoader(table, batch_size=4, shuffle=True))


def uneven_inside_join(rank: int, world: int) -> Case:
    wrapped = DistributedDataParallel(net())
    Join([wrapped])  # as `with Join([wrapped]):` sets it; torch takes it back at the end of the block
    return read(DataLoader(Subset(rows(), range(8) if rank else range(8, 32)), batch_size=4), wrapped)


def two_ddp(rank: int, world: int) -> Case:
    model = nn.ModuleDict({name: DistributedDataParallel(net()) for name in ("generator", "discriminator")})
    return Case(model=model, optimizer=[adam(one) for one in model.values()], loaders=(divided(rank, world),))


def unused_under_find_unused(rank: int, world: int) -> Case:
    wrapped = DistributedDataParallel(Experts(), find_unused_parameters=True)
    wrapped(batch(rank)).square().sum().backward()
    return Case(model=wrapped, optimizer=adam(wrapped), at_step=True)


def compressed(rank: int, world: int) -> Case:
    wrapped = DistributedDataParallel(net(), gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    wrapped(batch(rank)).square().sum().backward()
    return Case(model=wrapped, optimizer=adam(wrapped), at_step=True)


def accumulated_under_no_sync(rank: int, world: int) -> Case:
    wrapped = DistributedDataParallel(net())
    with wrapped.no_sync():
        wrapped(batch(rank)).square().sum().backward()
    wrapped(batch(rank)).square().sum().backward()
    return Case(model=wrapped, optimizer=adam(wrapped), at_step=True)


def average_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)


def averaged_out_of_sight(rank: int, world: int) -> Case:
    """Audited before its loop, from the module that averages."""
    model = net()
    return Case(model=model, optimizer=adam(model), loaders=(divided(rank, world),), audit=audit_from_here)


def audit_from_here(*given: Any) -> Any:
    return pk.audit(*given)


def averaged_by_hooks(rank: int, world: int) -> Case:
    model = net()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda held: dist.all_reduce(held.grad))
    return Case(model=model, optimizer=adam(model), loaders=(divided(rank, world),))


def divided_optimizer(rank: int, world: int) -> Case:
    wrapped = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-3)
    return Case(model=wrapped, optimizer=optimizer, loaders=(divided(rank, world),))


def norms_without_buffers(rank: int, world: int) -> Case:
    model = nn.Sequential(net(), nn.GroupNorm(2, 4), nn.LayerNorm(4))
    return read(divided(rank, world), DistributedDataParallel(model, broadcast_buffers=False))


def norms_of_each_rank(rank: int, world: int) -> Case:
    model = DistributedDataParallel(nn.Sequential(net(), nn.BatchNorm1d(4)), broadcast_buffers=False)
    model(torch.randn(8, WIDTH) + rank)
    return read(divided(rank, world), model)


def teacher_under_ddp(rank: int, world: int) -> Case:
    return read(divided(rank, world), DistributedDataParallel(Distilled(hidden=False)))


def ema_on_rank_0(rank: int, world: int) -> Case:
    made: Any = DistributedDataParallel(net())
    made.averages = [copy.deepcopy(made.module)] if rank == 0 else []
    return read(divided(rank, world), made)


def experts_of_each_rank(rank: int, world: int) -> Case:
    model = Experts()
    for expert in model.experts:
        nn.init.normal_(expert.weight, std=0.1 * (rank + 1))
    ignored = [name for name, _ in model.named_parameters() if "experts" in name]
    torch.manual_seed(0)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    nn.init.zeros_(model.enter.bias)
    return read(divided(rank, world), DistributedDataParallel(model))


def encoder_and_decoder(rank: int, world: int) -> Case:
    model = nn.Sequential(DistributedDataParallel(nn.Linear(WIDTH, WIDTH)), DistributedDataParallel(net()))
    model(batch(rank)).square().sum().backward()
    return Case(model=model, optimizer=adam(model), at_step=True)


def compiled_inside_ddp(rank: int, world: int) -> Case:
    model = net()
    model.compile()
    return read(divided(rank, world), DistributedDataParallel(model, static_graph=True))


def fsdp1_at_step(rank: int, world: int) -> Case:
    model = flattened(net())
    model(batch(rank)).square().sum().backward()
    return Case(model=model, optimizer=adam(model), at_step=True)


def fsdp1_of_an_embedding(rank: int, world: int) -> Case:
    """Its weight is a plain attribute there, and ``_weight`` an argument of its class."""
    model = flattened(nn.Sequential(nn.Embedding(8, WIDTH), net()), use_orig_params=False)
    model(torch.arange(8) % (rank + 4)).square().sum().backward()
    return Case(model=model, optimizer=adam(model), at_step=True)


def fsdp1_without_shards(rank: int, world: int) -> Case:
    model = FullyShardedDataParallel(
        net(), use_orig_params=True, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD
    )
    return read(divided(rank, world), model)


def fsdp2_with_a_frozen_part(rank: int, world: int) -> Case:
    model = net()
    model.enter.requires_grad_(requires_grad=False)
    model = sharded(model)  # type: ignore[assignment]
    model(batch(rank)).square().sum().backward()
    return Case(model=model, optimizer=adam(model), at_step=True)


def shards_within_tensor_ranks(rank: int, world: int) -> Case:
    """Plain norms and heads: tensor ranks compute the same gradients, and data ranks average them."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = net()
    parallelize_module(model, mesh["tp"], {"enter": ColwiseParallel(), "blocks.0.inner": RowwiseParallel()})
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    torch.manual_seed(rank // 2)
    return Case(model=model, optimizer=adam(model), loaders=(divided(rank // 2, world // 2),))


def replicas_of_shards(rank: int, world: int) -> Case:
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    model = net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return read(divided(rank, world), fully_shard(model, mesh=mesh))


def stages(rank: int, world: int) -> Case:
    whole = nn.ModuleDict({f"stage{at}": nn.Linear(WIDTH, WIDTH) for at in range(world)})
    model = nn.ModuleDict({f"stage{rank}": whole[f"stage{rank}"]})
    return Case(model=model, optimizer=adam(model), loaders=(DataLoader(rows(), batch_size=4),))


def batches_split_by_accelerate(rank: int, world: int) -> Case:
    from accelerate import DataLoaderConfiguration

    ours = accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    model = net()
    model, optimizer, loader = ours.prepare(model, adam(model), DataLoader(rows(), batch_size=4, shuffle=True))
    return Case(model=model, optimizer=optimizer, loaders=(loader,))


def two_models_of_accelerate(rank: int, world: int) -> Case:
    ours = accelerator()
    one, other = net(), net()
    both = ours.prepare(one, other, adam(one), adam(other), DataLoader(rows(), batch_size=4, shuffle=True))
    return Case(model=nn.ModuleList(both[:2]), optimizer=list(both[2:4]), loaders=both[4:])


def llama_with_an_unused_tower(rank: int, world: int) -> Case:
    model = llama()
    model.tower = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
    return read(divided(rank, world), DistributedDataParallel(model))


ODD_TWO = (
    *(own_sampler, own_batch_sampler, with_replacement_by_rank, weighted_by_rank, stream_that_divides_itself),
    *(stream_by_the_group, stream_of_workers, data_by_the_group, halves_of_a_split, uneven_inside_join, two_ddp),
    *(unused_under_find_unused, compressed, accumulated_under_no_sync, averaged_by_hooks, divided_optimizer),
    *(averaged_out_of_sight, norms_without_buffers, norms_of_each_rank, teacher_under_ddp, ema_on_rank_0),
    *(encoder_and_decoder, compiled_inside_ddp, fsdp1_at_step, fsdp1_without_shards, fsdp2_with_a_frozen_part),
    fsdp1_of_an_embedding,
    *(experts_of_each_rank, shards_within_tensor_ranks, replicas_of_shards, stages),
)
ODD_TWO_LIBRARIES = (
    *((make, "accelerate") for make in (batches_split_by_accelerate, two_models_of_accelerate)),
    (llama_with_an_unused_tower, "transformers"),
    (datasets_by_node, "datasets"),
)
