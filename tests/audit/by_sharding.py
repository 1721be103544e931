"""Errors that people make with torch's shards: FSDP1, FSDP2 and tensor parallelism, on two ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.audit.case import Block, Case, adam, divided, net

CPU = torch.device("cpu")


def sharded(model: nn.Module) -> nn.Module:
    """By torch's guide: every block, then the root."""
    for block in model.get_submodule("blocks").children():
        fully_shard(block)
    return fully_shard(model)


def flattened(model: nn.Module, use_orig_params: bool = True) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=use_orig_params, device_id=CPU
    )


def cut(model: nn.Module) -> nn.Module:
    """The head over both ranks, its input and output whole."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    plan = {"enter": ColwiseParallel(), "blocks.0.inner": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def fsdp1_after_the_optimizer(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    return Case(model=flattened(model, use_orig_params=False), optimizer=optimizer)


def fsdp2_after_the_optimizer(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    return Case(model=sharded(model), optimizer=optimizer)


def fsdp2_over_one_rank(rank: int, world: int) -> Case:
    model = net()
    mesh = DeviceMesh("cpu", [rank], _init_backend=True) if world == 1 else _own_mesh(rank, world)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Case(model=model, optimizer=adam(model))


def _own_mesh(rank: int, world: int) -> DeviceMesh:
    whole = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
    return whole["shards"]


def fsdp1_hybrid_of_n_by_1(rank: int, world: int) -> Case:
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
    model = FullyShardedDataParallel(
        net(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=CPU,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
    )
    return Case(model=model, optimizer=adam(model))


def fsdp2_in_one_unit(rank: int, world: int) -> Case:
    model = fully_shard(net())
    return Case(model=model, optimizer=adam(model))


def fsdp1_in_one_unit(rank: int, world: int) -> Case:
    model = FullyShardedDataParallel(net(), use_orig_params=True, device_id=CPU)
    return Case(model=model, optimizer=adam(model))


def fsdp1_under_checkpoints(rank: int, world: int) -> Case:
    model = net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(FullyShardedDataParallel(block, use_orig_params=True, device_id=CPU))
    model = FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU)
    return Case(model=model, optimizer=adam(model))


def fsdp2_leaves_the_head(rank: int, world: int) -> Case:
    model = net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, ignored_params=set(model.head.parameters()))
    return Case(model=model, optimizer=adam(model))


def buffer_of_one_rank_under_fsdp2(rank: int, world: int) -> Case:
    model = sharded(net())
    model.get_buffer("scale").fill_(1.0 + rank)
    return Case(model=model, optimizer=adam(model))


def tensor_ranks_with_other_samples(rank: int, world: int) -> Case:
    model = cut(net())
    return Case(model=model, optimizer=adam(model), loaders=(divided(rank, world),))


def tensor_ranks_with_other_dropout(rank: int, world: int) -> Case:
    model = cut(net(dropout=0.1))
    torch.manual_seed(rank)
    return Case(model=model, optimizer=adam(model))


def replicated_part_of_tensor_ranks_differs(rank: int, world: int) -> Case:
    model = cut(net())
    model.get_parameter("head.weight").data += rank
    return Case(model=model, optimizer=adam(model))
