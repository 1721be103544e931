"""Errors that people make with torch alone, one rank or many. Each function is a program up to its first step."""

from __future__ import annotations

import copy
import types

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.data import DataLoader, DistributedSampler

from tests.audit.case import WIDTH, Case, adam, net, rows


def optimizer_of_the_copy(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    return Case(model=copy.deepcopy(model), optimizer=optimizer)


def head_replaced(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    model.head = nn.Linear(WIDTH, 8)
    return Case(model=model, optimizer=optimizer)


def unfrozen_later(rank: int, world: int) -> Case:
    model = net()
    model.blocks.requires_grad_(requires_grad=False)
    optimizer = adam(model)
    model.blocks.requires_grad_(requires_grad=True)
    return Case(model=model, optimizer=optimizer)


def all_frozen(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    return Case(model=model.requires_grad_(requires_grad=False), optimizer=optimizer)


def trained_state_left_behind(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    moved = copy.deepcopy(model)
    optimizer.param_groups[0]["params"] = list(moved.parameters())
    return Case(model=moved, optimizer=optimizer)


def two_optimizers_one_parameter(rank: int, world: int) -> Case:
    model = net()
    return Case(model=model, optimizer=[adam(model), torch.optim.SGD(model.head.parameters(), lr=0.1)])


def still_in_eval(rank: int, world: int) -> Case:
    model = net(dropout=0.1).eval()
    return Case(model=model, optimizer=adam(model))


def part_still_in_eval(rank: int, world: int) -> Case:
    model = net(dropout=0.1)
    model.blocks.eval()
    return Case(model=model, optimizer=adam(model))


def float16_weights(rank: int, world: int) -> Case:
    model = net().half()
    return Case(model=model, optimizer=adam(model))


def bfloat16_weights(rank: int, world: int) -> Case:
    model = net().bfloat16()
    return Case(model=model, optimizer=adam(model, lr=1e-5))


def one_block_in_another_dtype(rank: int, world: int) -> Case:
    model = net()
    model.blocks[1].double()
    return Case(model=model, optimizer=adam(model))


def checkpointed_twice(rank: int, world: int) -> Case:
    model = net()
    model.blocks[0] = checkpoint_wrapper(checkpoint_wrapper(model.blocks[0]))
    return Case(model=model, optimizer=adam(model))


def checkpointed_inside_checkpointed(rank: int, world: int) -> Case:
    model = net()
    model.blocks[0].inner = checkpoint_wrapper(model.blocks[0].inner)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    return Case(model=model, optimizer=adam(model))


def checkpointed_as_a_whole(rank: int, world: int) -> Case:
    model = checkpoint_wrapper(net())
    return Case(model=model, optimizer=adam(model))


def forward_of_the_original(rank: int, world: int) -> Case:
    model = net()
    inner = model.forward
    model.forward = lambda x: inner(x).float()  # type: ignore[method-assign]
    copied = copy.deepcopy(model)  # its weights are new, its forward still runs the old ones
    return Case(model=copied, optimizer=adam(copied))


def forward_bound_to_the_original(rank: int, world: int) -> Case:
    model, other = net(), net()
    other.forward = types.MethodType(type(model).forward, model)  # type: ignore[method-assign]
    return Case(model=other, optimizer=adam(other))


def ticked_with_each_micro_batch(rank: int, world: int) -> Case:
    """Seven steps of four micro-batches."""
    model = net()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    for _ in range(7):
        for _ in range(4):
            model(torch.randn(2, WIDTH)).square().mean().backward()
            scheduler.step()
        optimizer.step()
        optimizer.zero_grad()
    return Case(model=model, optimizer=optimizer, scheduler=scheduler)


def scheduler_of_another_optimizer(rank: int, world: int) -> Case:
    model = net()
    first, second = adam(model), adam(model)
    return Case(model=model, optimizer=second, scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(first, 10))


def rate_of_zero(rank: int, world: int) -> Case:
    model = net()
    return Case(model=model, optimizer=adam(model, lr=0.0))


def schedule_run_out(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=4)
    return Case(model=model, optimizer=optimizer, scheduler=scheduler, loaders=(DataLoader(rows(), batch_size=4),))


def buffer_never_filled(rank: int, world: int) -> Case:
    model = net()
    model.scale.fill_(float("nan"))
    return Case(model=model, optimizer=adam(model))


def half_on_meta(rank: int, world: int) -> Case:
    model = net()
    model.head = nn.Linear(WIDTH, 4, device="meta")
    return Case(model=model, optimizer=adam(model))


def compile_switched_off(rank: int, world: int) -> Case:
    model = net()
    torch._dynamo.config.disable = True  # TORCHDYNAMO_DISABLE=1 sets the same
    for block in model.blocks:
        block.compile()
    return Case(model=model, optimizer=adam(model))


def no_wrapper(rank: int, world: int) -> Case:
    model = net()
    return Case(model=model, optimizer=adam(model))


def head_beside_ddp(rank: int, world: int) -> Case:
    inner = net()
    head = nn.Linear(4, 4)
    model = nn.Sequential(nn.parallel.DistributedDataParallel(inner), head)
    for param in head.parameters():
        torch.distributed.broadcast(param.data, 0)
    return Case(model=model, optimizer=adam(model))


def unfrozen_after_ddp(rank: int, world: int) -> Case:
    model = net()
    model.blocks.requires_grad_(requires_grad=False)
    wrapped = nn.parallel.DistributedDataParallel(model)
    model.blocks.requires_grad_(requires_grad=True)
    return Case(model=wrapped, optimizer=adam(wrapped))


def frozen_after_ddp(rank: int, world: int) -> Case:
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    model.blocks.requires_grad_(requires_grad=False)
    return Case(model=wrapped, optimizer=adam(wrapped))


def head_replaced_after_ddp(rank: int, world: int) -> Case:
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    model.head = nn.Linear(WIDTH, 4)
    for param in model.head.parameters():
        torch.distributed.broadcast(param.data, 0)
    return Case(model=wrapped, optimizer=adam(wrapped))


def ddp_in_ddp(rank: int, world: int) -> Case:
    wrapped = nn.parallel.DistributedDataParallel(nn.parallel.DistributedDataParallel(net()))
    return Case(model=wrapped, optimizer=adam(wrapped))


def weights_read_on_rank_0_after_ddp(rank: int, world: int) -> Case:
    wrapped = nn.parallel.DistributedDataParallel(net())
    if rank == 0:
        wrapped.load_state_dict({name: value + 1 for name, value in wrapped.state_dict().items()})
    return Case(model=wrapped, optimizer=adam(wrapped))


def one_bit_of_one_rank(rank: int, world: int) -> Case:
    wrapped = nn.parallel.DistributedDataParallel(net())
    if rank == 1:
        wrapped.module.head.weight.data.view(torch.int32)[2, 3] ^= 1
    return Case(model=wrapped, optimizer=adam(wrapped))


def buffer_of_one_rank(rank: int, world: int) -> Case:
    wrapped = nn.parallel.DistributedDataParallel(net(), broadcast_buffers=False)
    wrapped.module.scale.fill_(1.0 + rank)
    return Case(model=wrapped, optimizer=adam(wrapped))


def frozen_on_one_rank(rank: int, world: int) -> Case:
    model = net()
    model.head.weight.requires_grad_(requires_grad=rank == 0)
    return Case(model=model, optimizer=adam(model))


def rate_by_rank(rank: int, world: int) -> Case:
    wrapped = nn.parallel.DistributedDataParallel(net())
    return Case(model=wrapped, optimizer=adam(wrapped, lr=1e-3 * (rank + 1)))


def same_samples(rank: int, world: int) -> Case:
    wrapped = nn.parallel.DistributedDataParallel(net())
    return Case(model=wrapped, optimizer=adam(wrapped), loaders=(DataLoader(rows(), batch_size=4),))


def shuffled_alike(rank: int, world: int) -> Case:
    wrapped = nn.parallel.DistributedDataParallel(net())
    return Case(model=wrapped, optimizer=adam(wrapped), loaders=(DataLoader(rows(), batch_size=4, shuffle=True),))


def sampler_of_rank_0(rank: int, world: int) -> Case:
    wrapped = nn.parallel.DistributedDataParallel(net())
    sampler = DistributedSampler(rows(), num_replicas=world, rank=0)
    return Case(model=wrapped, optimizer=adam(wrapped), loaders=(DataLoader(rows(), batch_size=4, sampler=sampler),))


def sampler_of_one_process(rank: int, world: int) -> Case:
    wrapped = nn.parallel.DistributedDataParallel(net())
    sampler = DistributedSampler(rows(), num_replicas=1, rank=0)
    return Case(model=wrapped, optimizer=adam(wrapped), loaders=(DataLoader(rows(), batch_size=4, sampler=sampler),))


def dropout_alike(rank: int, world: int) -> Case:
    wrapped = nn.parallel.DistributedDataParallel(net(dropout=0.1))
    torch.manual_seed(0)
    return Case(model=wrapped, optimizer=adam(wrapped))
