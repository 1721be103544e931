"""Errors that show in the gradients at the moment of the first step, and samples that no rank reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.audit.case import WIDTH, Case, adam, net, rows


def batch(rank: int) -> Tensor:
    return torch.full((2, WIDTH), 1.0 + rank)


def gradients_thrown_away(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    model(batch(rank)).sum().backward()
    optimizer.zero_grad()
    return Case(model=model, optimizer=optimizer, at_step=True)


def gradients_clipped_to_nothing(rank: int, world: int) -> Case:
    model = net()
    model(batch(rank)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.0)
    return Case(model=model, optimizer=adam(model), at_step=True)


def part_cut_off_from_the_loss(rank: int, world: int) -> Case:
    model = net()
    entered = model.enter(batch(rank)).detach()
    model.head(entered).sum().backward()
    return Case(model=model, optimizer=adam(model), at_step=True)


def root_of_zero(rank: int, world: int) -> Case:
    model = nn.Linear(WIDTH, 4, bias=False)
    model(torch.zeros(2, WIDTH)).norm(dim=1).sqrt().sum().backward()
    return Case(model=model, optimizer=adam(model), at_step=True)


def forward_around_ddp(rank: int, world: int) -> Case:
    model = DistributedDataParallel(net())
    model.module(batch(rank)).square().sum().backward()
    return Case(model=model, optimizer=adam(model), at_step=True)


def part_that_ddp_waits_for(rank: int, world: int) -> Case:
    model = DistributedDataParallel(net())
    entered = model.module.enter(batch(rank)).detach()
    model.module.head(entered).sum().backward()
    return Case(model=model, optimizer=adam(model), at_step=True)


def averaged_where_there_is_one(rank: int, world: int) -> Case:
    """A rank whose batch leaves the last layer out joins the averages, and forgets to keep what they come to."""
    model = net()
    entered = model.enter(batch(rank))
    (entered if rank else model.head(entered)).square().sum().backward()
    for param in model.parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        torch.distributed.all_reduce(grad)
    return Case(model=model, optimizer=adam(model), at_step=True)


def averaged_by_hand(rank: int, world: int, *, leave_out: str = "") -> Case:
    model = net()
    model(batch(rank)).square().sum().backward()
    for name, param in model.named_parameters():
        if param.grad is not None and name != leave_out:
            torch.distributed.all_reduce(param.grad)
    return Case(model=model, optimizer=adam(model), at_step=True)


def one_left_out_by_hand(rank: int, world: int) -> Case:
    return averaged_by_hand(rank, world, leave_out="head.bias")


def sampler_of_another_world(rank: int, world: int) -> Case:
    model = net()
    sampler: DistributedSampler[Tensor] = DistributedSampler(rows(), num_replicas=4, rank=rank)
    return Case(model=model, optimizer=adam(model), loaders=(DataLoader(rows(), batch_size=4, sampler=sampler),))
