"""Errors that were written after the proof was, to see what it makes of those that nobody had in mind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import checkpoint

from tests.proving.window import DDP, WIDTH, Net, Window, adam, loop, loss_of, micros, net


def optimizer_made_before_fsdp2(rank: int, world: int) -> Window:
    model = net()
    before = adam(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2))))
    fully_shard(model)
    return Window(model, lambda: loop(model, before))


def optimizer_made_before_fsdp1(rank: int, world: int) -> Window:
    whole = net()
    optimizer = adam(whole)
    model = FullyShardedDataParallel(whole, device_id=torch.device("cpu"))
    return Window(model, lambda: loop(model, optimizer))


def decayed_by_hand_before_the_step(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1 - 1e-2 * 0.01)
        optimizer.step()

    return Window(model, train)


def _decayed_between(model: nn.Module) -> Window:
    """Weights that are written between two micro-batches, and never put back."""
    optimizer = adam(model)

    def train() -> None:
        for at, batch in enumerate(micros(2)):
            (loss_of(model, batch) / 2).backward()
            with torch.no_grad():
                for param in model.parameters() if at == 0 else ():
                    param.mul_(0.999)
        optimizer.step()

    return Window(model, train)


def decayed_between_micro_batches(rank: int, world: int) -> Window:
    return _decayed_between(DDP(net()))


def decayed_between_micro_batches_under_fsdp2(rank: int, world: int) -> Window:
    model = net()
    for block in model.blocks:
        fully_shard(block)
    return _decayed_between(fully_shard(model))


def decayed_in_the_gradient_and_by_adamw(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.add_(param.detach(), alpha=0.05)
        optimizer.step()

    return Window(model, train)


def decayed_in_the_loss_and_by_adamw(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            decay = sum((param.square().sum() for param in model.parameters()), torch.zeros(()))
            ((loss_of(model, batch) + 0.02 * decay) / 2).backward()
        optimizer.step()

    return Window(model, train)


def _ragged(number: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    for x, y in micros(number):
        keep = torch.arange(6) < (5 if rank == 0 else 2)
        yield x, torch.where(keep, y, -100)


def mean_over_ragged_tokens(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in _ragged(2, rank):
            (loss_of(model, batch) / 2).backward()
        optimizer.step()

    return Window(model, train)


def averaged_weights_put_in_before_the_step(rank: int, world: int) -> Window:
    """A moving average that is swapped in for an evaluation, and never swapped out."""
    model = net()
    fully_shard(model)
    optimizer = adam(model)
    average = [param.detach() * 0.9 for param in model.parameters()]

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        with torch.no_grad():
            for param, mean in zip(model.parameters(), average, strict=True):
                param.copy_(mean)
        optimizer.step()

    return Window(model, train)


def rank_1_in_bfloat16(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=rank == 1):
                loss = loss_of(model, batch) / 2
            loss.backward()
        optimizer.step()

    return Window(model, train)


def rank_1_evaluates(rank: int, world: int) -> Window:
    model = DDP(net(0.3))
    optimizer = adam(model)
    if rank == 1:
        model.eval()
    return Window(model, lambda: loop(model, optimizer))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.register_buffer("mask", (torch.rand(WIDTH) > 0.5).float())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.enter(x)) * self.mask)


def masks_that_differ(rank: int, world: int) -> Window:
    torch.manual_seed(0)
    whole = Masked()
    torch.manual_seed(rank)
    whole.mask = (torch.rand(WIDTH) > 0.5).float()
    model = DDP(whole, broadcast_buffers=False, init_sync=False)
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


class Forgets(Net):
    """Computes its blocks again in the backward, with other masks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        return self.head(x)


def recomputed_with_other_masks(rank: int, world: int) -> Window:
    torch.manual_seed(0)
    model = DDP(Forgets(0.3))
    torch.manual_seed(rank)
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer))


def head_called_beside(rank: int, world: int) -> Window:
    """Two modules that the loop calls one after the other, and one of them is wrapped."""
    whole = net()
    head, whole.head = whole.head, nn.Identity()
    body = DDP(whole)
    optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=1e-2)

    def train() -> None:
        for x, y in micros(2):
            (nn.functional.cross_entropy(head(body(x)), y) / 2).backward()
        optimizer.step()

    return Window(None, train)


def critic_divided_twice(rank: int, world: int) -> Window:
    """Two models with their own optimizers; the second one's loss is divided twice."""
    actor, critic = DDP(net()), DDP(net())
    first, second = adam(actor), adam(critic)

    def train() -> None:
        for batch in micros(3):
            (loss_of(actor, batch) / 3).backward()
            (loss_of(critic, batch) / 9).backward()
        first.step()
        second.step()

    return Window(None, train)


def each_rank_scales_its_loss(rank: int, world: int) -> Window:
    """By its own samples' share, which another line has averaged out already."""
    model = DDP(net())
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer, 2, 2 * (1 + rank)))


def hook_of_the_wrapper_halves_large_ones(rank: int, world: int) -> Window:
    model = DDP(net())

    def shrink(param: Tensor) -> None:
        assert param.grad is not None
        param.grad *= 0.3

    for param in model.module.blocks.parameters():
        param.register_post_accumulate_grad_hook(shrink)
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer, 1))


def gradients_left_from_before(rank: int, world: int) -> Window:
    """A warm-up whose gradients nobody clears."""
    model = DDP(net())
    optimizer = adam(model)
    x, y = next(micros(1, rank=50 + rank))
    nn.functional.cross_entropy(model(x), y).backward()
    return Window(model, lambda: loop(model, optimizer))


def noise_on_the_gradients_of_each_rank(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.add_(torch.randn_like(param), alpha=0.01)
        optimizer.step()

    return Window(model, train)


def scaled_by_each_rank_itself(rank: int, world: int) -> Window:
    """Loss scales that part: an overflow on one rank alone."""
    model = DDP(net())
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0 * (1 + rank))

    def train() -> None:
        for batch in micros(1):
            scaler.scale(loss_of(model, batch)).backward()
        scaler.step(optimizer)

    return Window(model, train)


def sent_in_two_groups_of_layers(rank: int, world: int) -> Window:
    """Blocks that are averaged by hand, and all else forgotten."""
    model = net()
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        for param in model.blocks.parameters():
            dist.all_reduce(param.grad)
            param.grad /= world
        optimizer.step()

    return Window(model, train)


def averaged_after_the_first_of_four(rank: int, world: int) -> Window:
    """``no_sync()`` that is entered and left one micro-batch late."""
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for at, batch in enumerate(micros(4)):
            with model.no_sync() if at else nullcontext():
                (loss_of(model, batch) / 4).backward()
        optimizer.step()

    return Window(model, train)


def trunk_detached_on_rank_1(rank: int, world: int) -> Window:
    model = net()
    if rank == 1:  # the replay runs on rank 0
        model.blocks[-1].register_forward_hook(lambda _, __, output: output.detach() + 0 * output)
    wrapped = DDP(model)
    return Window(wrapped, lambda: loop(wrapped, adam(wrapped)))


def backward_doubled_on_rank_1(rank: int, world: int) -> Window:
    model = net()
    if rank == 1:
        model.blocks[0].register_full_backward_hook(lambda _, grads, __: tuple(2 * one for one in grads))
    wrapped = DDP(model)
    return Window(wrapped, lambda: loop(wrapped, adam(wrapped)))


def forward_scaled_on_rank_1(rank: int, world: int) -> Window:
    model = net()
    if rank == 1:
        model.blocks[0].register_forward_hook(lambda _, __, output: 1.5 * output)
    wrapped = DDP(model)
    return Window(wrapped, lambda: loop(wrapped, adam(wrapped)))


def narrow() -> nn.Module:
    """Ends in one number, whose bias is a multiple of whatever it should be."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1))


def what_is_wrapped_is_compiled_and_called(rank: int, world: int) -> Window:
    whole = narrow()
    compiled: Any = torch.compile(whole, backend="eager")
    model = DDP(whole)
    optimizer = adam(model)

    def train() -> None:
        model.train()
        for x, _ in micros(1):
            compiled(x).square().mean().backward()
        optimizer.step()

    return Window(None, train)


def averaged_after_the_first_of_three(rank: int, world: int) -> Window:
    model = DDP(narrow())
    optimizer = adam(model)

    def train() -> None:
        for at, (x, _) in enumerate(micros(3)):
            model.require_backward_grad_sync = at == 0
            (model(x).square().mean() / 3).backward()
        optimizer.step()

    return Window(model, train)


def flat_buffer_in_another_order_on_rank_1(rank: int, world: int) -> Window:
    model = narrow()
    optimizer = adam(model)

    def train() -> None:
        for x, _ in micros(1):
            model(x).square().mean().backward()
        grads = [one.grad for one in list(model.parameters())[:: -1 if rank else 1] if one.grad is not None]
        flat = torch.cat([one.flatten() for one in grads])
        dist.all_reduce(flat)
        for one, part in zip(grads, (flat / world).split([one.numel() for one in grads]), strict=True):
            one.copy_(part.view_as(one))
        optimizer.step()

    return Window(model, train)


UNSEEN: tuple[tuple[Any, ...], ...] = (
    (optimizer_made_before_fsdp2, "prove.not-stepped"),
    (optimizer_made_before_fsdp1, "prove.not-stepped"),
    (decayed_by_hand_before_the_step, "prove.moved"),
    (decayed_between_micro_batches, "prove.moved", "has changed 14 weights"),
    (decayed_between_micro_batches_under_fsdp2, "prove.moved", "has changed 14 weights"),
    (decayed_in_the_gradient_and_by_adamw, "prove.decay"),
    (decayed_in_the_loss_and_by_adamw, "prove.decay"),
    (mean_over_ragged_tokens, "prove.tokens"),
    (averaged_weights_put_in_before_the_step, "prove.moved"),
    (rank_1_in_bfloat16, "prove.options"),
    (rank_1_evaluates, "prove.options"),
    (masks_that_differ, "prove.first-weights"),
    (recomputed_with_other_masks, "prove.direction"),
    (head_called_beside, "prove.not-averaged"),
    (critic_divided_twice, "prove.accumulation"),
    (each_rank_scales_its_loss, "prove.unlike-losses"),
    (hook_of_the_wrapper_halves_large_ones, "prove.ratio"),
    (gradients_left_from_before, "prove.left-over"),
    (noise_on_the_gradients_of_each_rank, "prove.direction"),
    (scaled_by_each_rank_itself, "prove.options"),
    (sent_in_two_groups_of_layers, "prove.not-averaged"),
    (averaged_after_the_first_of_four, "prove.not-averaged", "averaged up to micro-batch 0 of 4"),
    (forward_scaled_on_rank_1, "prove.unproven", "The forward of rank 1 does not repeat, and that of rank 0"),
    (trunk_detached_on_rank_1, "prove.no-gradient", "no gradient of rank 1"),
    (what_is_wrapped_is_compiled_and_called, "prove.past-wrapper"),
    (averaged_after_the_first_of_three, "prove.not-averaged", "averaged up to micro-batch 0 of 3"),
    (flat_buffer_in_another_order_on_rank_1, "prove.direction"),
    (backward_doubled_on_rank_1, "prove.direction", "1.00 x of rank 0, 2.00 x of rank 1"),
)
