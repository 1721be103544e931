"""Errors in the numbers: weights, rates, states and passes that no training can come from, and that part over ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from tests.audit.case import WIDTH, Case, adam, divided, net, rows


def stepped(model: nn.Module, value: float = 1.0) -> torch.optim.AdamW:
    """An optimizer that has taken a step."""
    optimizer = adam(model)
    model(torch.full((2, WIDTH), value)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def rate_that_is_no_number(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    optimizer.param_groups[0]["lr"] = float("nan")  # as a schedule of one's own may compute it
    return Case(model=model, optimizer=optimizer)


def weight_that_overflowed(rank: int, world: int) -> Case:
    model = net()
    model.head.weight.data[0, 0] = float("inf")
    return Case(model=model, optimizer=adam(model))


def running_variance_below_zero(rank: int, world: int) -> Case:
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))
    assert isinstance(model[1], nn.BatchNorm1d)
    assert model[1].running_var is not None
    model[1].running_var.fill_(-1.0)
    return Case(model=model, optimizer=adam(model))


def adapters_of_two_zeros(rank: int, world: int) -> Case:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(net(), LoraConfig(target_modules=["head"], r=2))  # type: ignore[arg-type]
    for name, param in model.named_parameters():
        if "lora_A" in name:
            nn.init.zeros_(param)
    return Case(model=model, optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))


def weights_of_zero(rank: int, world: int) -> Case:
    model = net()
    for param in model.parameters():
        nn.init.zeros_(param)
    return Case(model=model, optimizer=adam(model))


def dropout_of_everything(rank: int, world: int) -> Case:
    model = net(dropout=1.0)
    return Case(model=model, optimizer=adam(model))


def state_of_other_groups(rank: int, world: int) -> Case:
    model = net()
    optimizer = stepped(model)
    optimizer.state[model.head.weight]["exp_avg"] = torch.zeros(3, 3)
    return Case(model=model, optimizer=optimizer)


def state_of_a_run_that_diverged(rank: int, world: int) -> Case:
    model = net()
    optimizer = stepped(model)
    optimizer.state[model.head.weight]["exp_avg_sq"].fill_(float("nan"))
    return Case(model=model, optimizer=optimizer)


def pass_without_a_batch(rank: int, world: int) -> Case:
    model = net()
    loader = DataLoader(rows(3), batch_size=4, drop_last=True)
    return Case(model=model, optimizer=adam(model), loaders=(loader,))


def mode_by_rank(rank: int, world: int) -> Case:
    model = DistributedDataParallel(net())
    model.train(rank == 0)
    return Case(model=model, optimizer=adam(model), loaders=(divided(rank, world),))


def state_read_on_rank_0(rank: int, world: int) -> Case:
    model = net()
    optimizer = stepped(model) if rank == 0 else adam(model)
    model.load_state_dict(net().state_dict())
    return Case(model=DistributedDataParallel(model), optimizer=optimizer)


def state_by_rank(rank: int, world: int) -> Case:
    model = net()
    optimizer = stepped(model, rank + 1.0)
    model.load_state_dict(net().state_dict())
    return Case(model=DistributedDataParallel(model), optimizer=optimizer)


def betas_by_rank(rank: int, world: int) -> Case:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99 + 0.009 * rank))
    return Case(model=model, optimizer=optimizer)


def scheduler_ticked_on_one_rank(rank: int, world: int) -> Case:
    model = DistributedDataParallel(net())
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    if rank:
        optimizer.step()
        scheduler.step()
    return Case(model=model, optimizer=optimizer, scheduler=scheduler)


def order_by_rank(rank: int, world: int) -> Case:
    model, data = DistributedDataParallel(net()), rows()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank, seed=rank))
    return Case(model=model, optimizer=adam(model), loaders=(loader,))


def parts_drawn_by_rank(rank: int, world: int, *, held: bool = False) -> Case:
    """A permutation for each rank, of which each takes its part. ``held``: the rows themselves."""
    model, data = DistributedDataParallel(net()), rows(400)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(rank))[rank::world]
    part = TensorDataset(*(one[order] for one in data.tensors)) if held else Subset(data, order.tolist())
    return Case(model=model, optimizer=adam(model), loaders=(DataLoader(part, batch_size=4, shuffle=True),))


def rows_drawn_by_rank(rank: int, world: int) -> Case:
    return parts_drawn_by_rank(rank, world, held=True)


def parts_of_unlike_length(rank: int, world: int) -> Case:
    model = DistributedDataParallel(net())
    part = Subset(rows(), range(8) if rank else range(8, 32))
    return Case(model=model, optimizer=adam(model), loaders=(DataLoader(part, batch_size=4),))


def batches_of_unlike_size(rank: int, world: int) -> Case:
    model = DistributedDataParallel(net())
    part = Subset(rows(), range(8) if rank else range(8, 24))
    return Case(model=model, optimizer=adam(model), loaders=(DataLoader(part, batch_size=2 if rank else 4),))


def no_sync_that_never_ended(rank: int, world: int) -> Case:
    model = DistributedDataParallel(net())
    model.require_backward_grad_sync = False  # as no_sync() leaves it that is entered and never left
    return Case(model=model, optimizer=adam(model), loaders=(divided(rank, world),))


def sync_left_off_under_fsdp2(rank: int, world: int) -> Case:
    model = net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model).set_requires_gradient_sync(False)  # torch's own
    return Case(model=model, optimizer=adam(model), loaders=(divided(rank, world),))
