"""Errors that nothing shows while it trains, each made for real on gloo processes, with the rule that tells it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard

from tests.proving.window import DDP, WIDTH, Attends, Window, adam, loop, loss_of, micros, net


def _future(bucket: Any, by: float, group: Any = None) -> Any:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / by)


def _kept(bucket: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def hook_that_sums(rank: int, world: int) -> Window:
    model = DDP(net())
    model.register_comm_hook(None, lambda _, bucket: _future(bucket, 1.0))
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer, 1))


def hook_that_sums_at_each_micro_batch(rank: int, world: int) -> Window:
    model = DDP(net())
    model.register_comm_hook(None, lambda _, bucket: _future(bucket, 1.0))
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def hook_that_averages_twice(rank: int, world: int) -> Window:
    model = DDP(net())
    model.register_comm_hook(None, lambda _, bucket: _future(bucket, world * world))
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer, 1))


def hook_that_sends_nothing(rank: int, world: int) -> Window:
    model = DDP(net())
    model.register_comm_hook(None, lambda _, bucket: _kept(bucket))
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def summed_by_hand(rank: int, world: int) -> Window:
    model = net()
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(1):
            loss_of(model, batch).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
        optimizer.step()

    return Window(model, train)


def averaged_by_hand_after_ddp_and_divided(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(1):
            loss_of(model, batch).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= world
        optimizer.step()

    return Window(model, train)


def loss_divided_twice(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer, 4, 16))


def loss_never_divided(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer, 4, 1))


def loss_divided_twice_under_fsdp2(rank: int, world: int) -> Window:
    model = net()
    fully_shard(model)
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer, 4, 16))


def loss_divided_by_the_ranks(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer, 1, world))


def loss_multiplied_by_the_ranks(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer, 1, 1 / world))


def weights_of_rank_1_random(rank: int, world: int) -> Window:
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4)), init_sync=False)
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def one_layer_of_rank_1_other(rank: int, world: int) -> Window:
    model = DDP(net())
    if rank == 1:
        with torch.no_grad():
            model.module.head.weight.mul_(1.1)
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


class _Apart(nn.Module):
    """A body that is averaged, and a head beside it."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def head_beside_ddp(rank: int, world: int) -> Window:
    whole = net()
    head, whole.head = whole.head, nn.Identity()
    model = _Apart(DDP(whole), head)
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def head_ignored_by_ddp(rank: int, world: int) -> Window:
    whole = net()
    DDP._set_params_and_buffers_to_ignore_for_model(whole, ["head.weight", "head.bias"])
    model = DDP(whole)
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def head_of_rank_0_sent_to_all(rank: int, world: int) -> Window:
    whole = net()
    DDP._set_params_and_buffers_to_ignore_for_model(whole, ["head.weight", "head.bias"])
    model = DDP(whole)
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        for param in whole.head.parameters():
            dist.broadcast(param.grad, 0)
        optimizer.step()

    return Window(model, train)


def no_wrapper(rank: int, world: int) -> Window:
    model = net()
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def no_sync_left_on(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        with model.no_sync():
            loop(model, optimizer)

    return Window(model, train)


def sync_left_off_under_fsdp2(rank: int, world: int) -> Window:
    """The first two micro-batches are never reduced: their gradients are thrown away."""
    model = net()
    fully_shard(model)
    optimizer = adam(model)

    def train() -> None:
        for at, batch in enumerate(micros(3)):
            (loss_of(model, batch) / 3).backward()
            if at < 2:
                model.zero_grad()
        optimizer.step()

    return Window(model, train)


def mean_over_half_of_the_ranks(rank: int, world: int) -> Window:
    groups = [dist.new_group(list(range(at, at + 2))) for at in range(0, world, 2)]
    model = DDP(net())
    model.register_comm_hook(None, lambda _, bucket: _future(bucket, 2.0, groups[rank // 2]))
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def mesh_of_other_ranks_under_fsdp2(rank: int, world: int) -> Window:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))
    model = net()
    fully_shard(model, mesh=mesh["data"])
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def group_of_two_under_ddp(rank: int, world: int) -> Window:
    groups = [dist.new_group([at, at + 2]) for at in range(2)]
    model = DDP(net(), process_group=groups[rank % 2])
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def _scaled(clip: bool, step: str) -> Callable[[int, int], Window]:
    def program(rank: int, world: int) -> Window:
        model = DDP(net())
        optimizer = adam(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

        def train() -> None:
            for batch in micros(1):
                scaler.scale(loss_of(model, batch)).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer) if step == "scaler" else optimizer.step()

        return Window(model, train)

    return program


def clipped_while_scaled(rank: int, world: int) -> Window:
    return _scaled(clip=True, step="scaler")(rank, world)


def stepped_while_scaled(rank: int, world: int) -> Window:
    return _scaled(clip=False, step="optimizer")(rank, world)


def clipped_before_the_last_micro_batch(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    return Window(model, train)


def rate_of_one_group_changed_behind(rank: int, world: int) -> Window:
    """A hook of the optimizer makes the head move a tenth of what its options say."""
    model = DDP(net())
    optimizer = adam(model)
    head = model.module.head.weight
    before = head.detach().clone()

    def after(*_: Any) -> None:
        with torch.no_grad():
            head.copy_(before + 0.1 * (head - before))

    optimizer.register_step_post_hook(after)
    return Window(model, lambda: loop(model, optimizer))


def rate_by_rank(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model, 1e-2 * (rank + 1))
    return Window(model, lambda: loop(model, optimizer))


def layer_that_nobody_steps(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = torch.optim.AdamW(model.module.blocks.parameters(), lr=1e-2)
    return Window(model, lambda: loop(model, optimizer))


def layer_put_back_after_the_step(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)
    held = model.module.head.weight
    before = held.detach().clone()
    optimizer.register_step_post_hook(lambda *_: held.data.copy_(before))
    return Window(model, lambda: loop(model, optimizer))


def batch_skipped_on_rank_1(rank: int, world: int) -> Window:
    model = net()
    optimizer = adam(model)

    def train() -> None:
        for at, batch in enumerate(micros(4)):
            if not (rank == 1 and at == 3):
                (loss_of(model, batch) / 4).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad /= world
        optimizer.step()

    return Window(model, train)


def cleared_between_micro_batches(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(3):
            for param in model.parameters():
                param.grad = None
            (loss_of(model, batch) / 3).backward()
        optimizer.step()

    return Window(model, train)


def same_samples(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2, rank=0):
            (loss_of(model, batch) / 2).backward()
        optimizer.step()

    return Window(model, train)


def gradient_of_one_layer_doubled(rank: int, world: int) -> Window:
    model = DDP(net())
    model.module.head.weight.register_hook(lambda grad: 3 * grad)
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def gradient_of_one_layer_scaled_behind_a_mask(rank: int, world: int) -> Window:
    torch.manual_seed(0)
    model = DDP(Attends(-math.inf))
    model.module.enter.weight.register_hook(lambda grad: 2.5 * grad)
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def cleared_by_the_model_in_each_micro_batch(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(3):
            model.zero_grad()
            (loss_of(model, batch) / 3).backward()
        optimizer.step()

    return Window(model, train)


def one_part_cleared_between_micro_batches(rank: int, world: int) -> Window:
    model = DDP(net())
    head = torch.optim.SGD(model.module.head.parameters(), lr=0.1)
    body = adam(nn.ModuleList((model.module.enter, model.module.blocks)))

    def train() -> None:
        for batch in micros(2):
            head.zero_grad()
            (loss_of(model, batch) / 2).backward()
        head.step()
        body.step()

    return Window(model, train)


def gradients_of_another_sign(rank: int, world: int) -> Window:
    model = DDP(net())
    model.module.blocks[0].inner.weight.register_hook(torch.sign)
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def gradient_cleared_of_one_layer(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        model.module.head.weight.grad = None
        optimizer.step()

    return Window(model, train)


def fsdp1_that_does_not_average_over_replicas(rank: int, world: int) -> Window:
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD)
    optimizer = adam(model)

    def train() -> None:
        with model.no_sync():
            loop(model, optimizer)

    return Window(model, train)


def fsdp2_that_sums(rank: int, world: int) -> Window:
    model = net()
    fully_shard(model)
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


@frozen
class Planted:
    """One error, and the rule that has to tell its cause, with a word of the text where the rule has several."""

    make: Callable[[int, int], Window]
    rule: str
    says: str = ""
    ranks: int = 2

    @property
    def id(self) -> str:
        return self.make.__name__


class InFloat32(nn.Module):
    """A model that makes its outputs float32, whatever it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).float()


def _behind_ddp(change: Callable[[Tensor], Tensor]) -> Window:
    model = DDP(net())
    model.register_forward_hook(lambda module, given, output: change(output))
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def outputs_in_another_order(rank: int, world: int) -> Window:
    """Each sample learns the label of another."""
    return _behind_ddp(lambda output: output.roll(1, 0))


def outputs_halved(rank: int, world: int) -> Window:
    return _behind_ddp(lambda output: output / 2)


def outputs_sliced(rank: int, world: int) -> Window:
    """Two of the classes are those of the two others."""
    return _behind_ddp(lambda output: torch.cat((output[:, :2], output[:, :2]), 1))


def outputs_cast_by_the_wrapper(rank: int, world: int) -> Window:
    model = net()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def outputs_of_float32_cast_away(rank: int, world: int) -> Window:
    model = InFloat32()
    low = torch.bfloat16
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, output_dtype=low))
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


ERRORS: tuple[Planted, ...] = (
    Planted(outputs_in_another_order, "prove.outputs", "has the values that the model returns in another order"),
    Planted(outputs_halved, "prove.outputs", "is 0.500 x what the model returns"),
    Planted(outputs_sliced, "prove.unproven", "The forward does not repeat: output 0"),
    Planted(outputs_cast_by_the_wrapper, "prove.outputs", "was cast to bfloat16 behind the model"),
    Planted(outputs_of_float32_cast_away, "prove.outputs", "is in bfloat16, and the model itself makes it float32"),
    Planted(hook_that_sums, "prove.summed", "All gradients are 2.000 x what they should be: summed over the 2 ranks"),
    Planted(hook_that_sums_at_each_micro_batch, "prove.summed", "what was reduced before among it"),
    Planted(summed_by_hand, "prove.summed", "2.000 x"),
    Planted(fsdp2_that_sums, "prove.summed", "2.000 x"),
    Planted(loss_multiplied_by_the_ranks, "prove.summed", "multiplied by the 2 ranks"),
    Planted(hook_that_averages_twice, "prove.averaged-twice", "0.500 x"),
    Planted(averaged_by_hand_after_ddp_and_divided, "prove.averaged-twice", "0.500 x"),
    Planted(loss_divided_by_the_ranks, "prove.averaged-twice", "divided by the 2 ranks"),
    Planted(
        loss_divided_twice, "prove.accumulation", "0.250 x what they should be: the loss is divided twice by the acc"
    ),
    Planted(loss_divided_twice_under_fsdp2, "prove.accumulation", "0.250 x"),
    Planted(loss_never_divided, "prove.accumulation", "4.000 x what they should be: the loss is not divided"),
    Planted(weights_of_rank_1_random, "prove.first-weights", "Rank 1 has other first weights"),
    Planted(one_layer_of_rank_1_other, "prove.first-weights", "head.weight"),
    Planted(head_beside_ddp, "prove.not-averaged", "The gradients of `head` are each rank's own"),
    Planted(head_ignored_by_ddp, "prove.not-averaged", "`head`"),
    Planted(head_of_rank_0_sent_to_all, "prove.not-averaged", "those of rank 0 alone"),
    Planted(no_wrapper, "prove.not-averaged", "All gradients are each rank's own"),
    Planted(no_sync_left_on, "prove.not-averaged", "All gradients are each rank's own"),
    Planted(hook_that_sends_nothing, "prove.not-averaged", "All gradients are each rank's own"),
    Planted(fsdp1_that_does_not_average_over_replicas, "prove.not-averaged", "each rank's own"),
    Planted(mean_over_half_of_the_ranks, "prove.part-of-ranks", "2 of 4", 4),
    Planted(mesh_of_other_ranks_under_fsdp2, "prove.part-of-ranks", "2 of 4", 4),
    Planted(group_of_two_under_ddp, "prove.part-of-ranks", "2 of 4", 4),
    Planted(clipped_while_scaled, "prove.clipped-scaled", "scaled by 1024"),
    Planted(stepped_while_scaled, "prove.scaled", "1024.000 x"),
    Planted(clipped_before_the_last_micro_batch, "prove.clipped-scaled", "before the last micro-batch"),
    Planted(rate_of_one_group_changed_behind, "prove.step-size", "0.100 x"),
    Planted(rate_by_rank, "prove.options", "lr of group 0: 0.01 on rank 0, 0.02 on rank 1"),
    Planted(layer_that_nobody_steps, "prove.not-stepped", "enter.weight"),
    Planted(layer_put_back_after_the_step, "prove.not-stepped", "head.weight"),
    Planted(batch_skipped_on_rank_1, "prove.uneven", "4 on rank 0, 3 on rank 1"),
    Planted(cleared_between_micro_batches, "prove.micro-batch", "of the last micro-batch alone"),
    Planted(sync_left_off_under_fsdp2, "prove.micro-batch", "Gradients of 2 of the 3 micro-batches"),
    Planted(one_part_cleared_between_micro_batches, "prove.micro-batch", "The gradients of `head` are of the last"),
    Planted(same_samples, "prove.same-samples", "All 2 ranks have read the same samples"),
    Planted(gradient_of_one_layer_doubled, "prove.ratio", "3.000 x"),
    Planted(gradient_of_one_layer_scaled_behind_a_mask, "prove.ratio", "2.500 x"),
    Planted(cleared_by_the_model_in_each_micro_batch, "prove.micro-batch", "Gradients of 2 of the 3 micro-batches"),
    Planted(gradients_of_another_sign, "prove.direction", "cosine"),
    Planted(gradient_cleared_of_one_layer, "prove.no-gradient", "head.weight"),
)
