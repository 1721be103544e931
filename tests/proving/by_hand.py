"""Programs that reach for weights and gradients themselves: return weights, write gradients, call what is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attrs import define
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from prepkit.objects.local_part import local
from tests.proving.unusual import seeded, trained
from tests.proving.window import DDP, WIDTH, Net, Window, adam, loop, loss_of, micros, net

# --- what a model returns ---------------------------------------------------------------------------------------------


class Weighs(Net):
    """Returns how far it trusts its loss, which it learns (uncertainty weighting), in whatever ``put`` makes."""

    def __init__(self, put: Callable[[Tensor, Tensor], Any] = lambda out, spread: (out, spread)) -> None:
        super().__init__()
        self.log_sigma, self.put = nn.Parameter(torch.linspace(0.1, 0.4, 4)), put

    def forward(self, x: Tensor) -> Any:
        return self.put(super().forward(x), self.log_sigma)


def uncertain(out: Tensor, spread: Tensor, y: Tensor) -> Tensor:
    return (functional.cross_entropy(out, y, reduction="none") * torch.exp(-spread[y]) + spread[y]).mean()


def a_weight_that_is_returned(rank: int, world: int) -> Window:
    model = DDP(seeded(Weighs))
    return trained(model, loss=lambda model, batch: uncertain(*model(batch[0]), batch[1]))


@define
class Found:
    out: Tensor
    spread: Tensor


def a_weight_in_a_mapping(rank: int, world: int) -> Window:
    model = DDP(seeded(lambda: Weighs(lambda out, spread: {"out": out, "again": [spread, out], "spread": spread})))
    return trained(
        model, loss=lambda model, batch: uncertain(*(model(batch[0])[key] for key in ("out", "spread")), batch[1])
    )


def a_weight_in_an_object(rank: int, world: int) -> Window:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = model(batch[0])
        return uncertain(found.out, found.spread, batch[1])

    return trained(DDP(seeded(lambda: Weighs(Found))), loss=loss)


class Gives(Net):
    def forward(self, x: Tensor) -> Any:
        return torch.distributions.Categorical(logits=super().forward(x))


def a_distribution_that_is_returned(rank: int, world: int) -> Window:
    """An object of a class that neither torch's trees nor dataclasses know."""
    return trained(DDP(seeded(Gives)), loss=lambda model, batch: -model(batch[0]).log_prob(batch[1]).mean())


class Tied(nn.Module):
    """Uses a matrix itself, and returns it, a view of it, a buffer and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner = nn.Linear(WIDTH, 8), nn.Linear(8, 8)
        self.table = nn.Parameter(0.3 * torch.randn(8, 8))
        self.register_buffer("offset", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hidden = torch.tanh(self.enter(x)) @ self.table
        return self.inner(hidden), hidden, self.table, self.table[:4], self.offset, x


def _tied(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out, hidden, table, rows, offset, x = model(batch[0])
    more = hidden.square().mean() + 0.1 * (x @ x.T).tanh().mean()
    return functional.cross_entropy((out + offset) @ table.T @ rows.T, batch[1]) + more


def a_matrix_that_is_used_and_returned(rank: int, world: int) -> Window:
    return trained(DDP(seeded(Tied)), loss=_tied)


class Hidden(Net):
    """Returns what its output is computed from too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.blocks[0](self.enter(x))
        return self.head(self.blocks[1](hidden)), hidden


def activations_that_are_returned_through_the_sink_of_ddp(rank: int, world: int) -> Window:
    """Which hands each output on as a tensor of its own."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        out, hidden = model(batch[0])
        return functional.cross_entropy(out, batch[1]) + 0.1 * hidden.square().mean()

    return trained(DDP(seeded(Hidden), find_unused_parameters=True), loss=loss)


def inputs_that_are_returned_with_their_gradients(rank: int, world: int) -> Window:
    return trained(DDP(seeded(Tied)), loss=lambda model, batch: _tied(model, (batch[0].requires_grad_(), batch[1])))


def two_calls_and_one_loss_of_a_weight(rank: int, world: int) -> Window:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        (out, spread), (other, again) = model(batch[0]), model(-batch[0])
        return uncertain(out, spread, batch[1]) + uncertain(other, again, batch[1])

    return trained(DDP(seeded(Weighs)), loss=loss)


def a_weight_that_is_returned_and_tripled(rank: int, world: int) -> Window:
    model = DDP(seeded(Weighs))
    model.module.log_sigma.register_hook(lambda grad: 3 * grad)
    return trained(model, loss=lambda model, batch: uncertain(*model(batch[0]), batch[1]))


# --- what is written into gradients -----------------------------------------------------------------------------------


def _noise(seed: int, model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        assert param.grad is not None
        param.grad += 0.02 * torch.randn(param.shape, generator=generator)


def the_same_noise_on_all_ranks(rank: int, world: int) -> Window:
    """As of a private optimizer, whose seed all ranks have."""
    return trained(DDP(net()), then=lambda model: _noise(7, model))


def the_same_noise_behind_a_clipping(rank: int, world: int) -> Window:
    def then(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        _noise(7, model)

    return trained(DDP(net()), then=then)


def the_same_noise_before_a_clipping(rank: int, world: int) -> Window:
    def then(model: nn.Module) -> None:
        _noise(7, model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    return trained(DDP(net()), then=then)


def signs_behind_the_backward_under_fsdp2(rank: int, world: int) -> Window:
    def then(model: nn.Module) -> None:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.sign_()

    return trained(fully_shard(net()), then=then)


def the_same_noise_on_scaled_gradients(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer, scaler = adam(model), torch.amp.GradScaler("cpu", init_scale=256.0)

    def train() -> None:
        for batch in micros(2):
            scaler.scale(loss_of(model, batch) / 2).backward()
        scaler.unscale_(optimizer)
        _noise(7, model)
        scaler.step(optimizer)

    return Window(model, train)


def other_noise_on_each_rank(rank: int, world: int) -> Window:
    return trained(DDP(net()), then=lambda model: _noise(rank, model))


def noise_over_gradients_that_a_hook_has_halved(rank: int, world: int) -> Window:
    """What backward has left was wrong already."""
    model = DDP(net())
    model.module.blocks[0].inner.weight.register_hook(torch.sign)
    return trained(model, then=lambda model: _noise(7, model))


# --- who is called ----------------------------------------------------------------------------------------------------


def _clips(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def what_is_wrapped_is_called(rank: int, world: int) -> Window:
    model = DDP(net())
    return Window(None, lambda: trained(model.module).train())


def what_is_wrapped_is_called_and_clipped(rank: int, world: int) -> Window:
    model = DDP(net())
    return Window(None, lambda: trained(model.module, then=_clips).train())


def never_wrapped_and_clipped(rank: int, world: int) -> Window:
    return Window(None, trained(net(), then=_clips).train)


def a_part_of_what_is_wrapped_is_called(rank: int, world: int) -> Window:
    """Each rank trains the blocks alone, by a loss of their own."""
    model = DDP(net())
    optimizer = adam(model.module.blocks[0])

    def train() -> None:
        for x, _ in micros(2):
            (model.module.blocks[0](x).square().mean() / 2).backward()
        optimizer.step()

    return Window(None, train)


# --- by what it is divided --------------------------------------------------------------------------------------------


def sums_divided_by_the_samples_of_all_ranks_under_ddp(rank: int, world: int) -> Window:
    """And not multiplied by the ranks, over which DDP averages; ranks and micro-batches are as many."""
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for x, y in micros(2):
            (functional.cross_entropy(model(x), y, reduction="sum") / 24).backward()
        optimizer.step()

    return Window(model, train)


def sums_of_ragged_samples_divided_by_all_under_ddp(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for size, (x, y) in zip(((4, 2), (3, 1))[rank], micros(2), strict=True):
            (functional.cross_entropy(model(x[:size]), y[:size], reduction="sum") / 10).backward()
        optimizer.step()

    return Window(model, train)


def means_divided_by_ranks_and_micro_batches(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer, by=4))


def _scaled_by_hand(model: nn.Module, *, clips_first: bool) -> Window:
    """A loss scale without a scaler, whose gradients are divided again."""
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (512.0 * loss_of(model, batch) / 2).backward()
        for step in ("clip", "divide") if clips_first else ("divide", "clip"):
            if step == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            else:
                for param in model.parameters():
                    param.grad.div_(512.0)
        optimizer.step()

    return Window(model, train)


def clipped_before_it_is_unscaled_by_hand(rank: int, world: int) -> Window:
    return _scaled_by_hand(DDP(net()), clips_first=True)


def clipped_before_it_is_unscaled_by_hand_under_fsdp2(rank: int, world: int) -> Window:
    model = net()
    fully_shard(model)
    return _scaled_by_hand(model, clips_first=True)


def unscaled_by_hand_and_clipped(rank: int, world: int) -> Window:
    return _scaled_by_hand(DDP(net()), clips_first=False)


# --- gradients that are sent by hand ----------------------------------------------------------------------------------


def _sent_in(low: torch.dtype, by: int) -> Window:
    """All gradients in one bucket, which is cast, summed and divided."""
    model = net()
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        every = [param.grad for param in model.parameters() if param.grad is not None]
        bucket = torch.cat([grad.flatten() for grad in every]).to(low)
        dist.all_reduce(bucket)
        for grad, sent in zip(every, (bucket.float() / by).split([grad.numel() for grad in every]), strict=True):
            grad.copy_(sent.view_as(grad))
        optimizer.step()

    return Window(model, train)


def sent_in_bfloat16(rank: int, world: int) -> Window:
    return _sent_in(torch.bfloat16, world)


def sent_in_float16(rank: int, world: int) -> Window:
    return _sent_in(torch.float16, world)


def summed_in_bfloat16(rank: int, world: int) -> Window:
    return _sent_in(torch.bfloat16, 1)


# --- optimizers of the program's own over parts of weights ------------------------------------------------------------


class Orthogonalizing(torch.optim.Optimizer):
    """Steps matrices by the orthogonal part of their gradients, all else by signs; with or without a look at the whole.

    A learning rate has to be given, and a group says what it is stepped by.
    """

    def __init__(self, params: Any, lr: float, *, whole: bool = False) -> None:
        super().__init__(params, {"lr": lr, "whole": whole, "noise": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                update = self._update(param, whole=group["whole"])
                part = local(param)
                part.add_(update + group["noise"] * torch.randn_like(update), alpha=-group["lr"])

    def _update(self, param: Tensor, *, whole: bool) -> Tensor:
        assert param.grad is not None
        if param.dim() < 2:
            return local(param.grad).sign()
        if not whole or not isinstance(param, DTensor):
            return self._orthogonal(local(param.grad), param)
        full = self._orthogonal(param.grad.full_tensor(), param)
        return distribute_tensor(full, param.device_mesh, param.placements).to_local()

    def _orthogonal(self, grad: Tensor, param: Tensor) -> Tensor:
        kept: Tensor = self.state[param].setdefault("kept", torch.zeros_like(grad))
        kept.mul_(0.9).add_(grad)
        left, _, right = torch.linalg.svd(kept, full_matrices=False)
        return left @ right


class Signed(Orthogonalizing):
    def _update(self, param: Tensor, *, whole: bool) -> Tensor:
        assert param.grad is not None
        return local(param.grad).sign()


class Trusting(Orthogonalizing):
    """As LAMB: by the norm of the weight over that of its update."""

    def _update(self, param: Tensor, *, whole: bool) -> Tensor:
        assert param.grad is not None
        grad, part = local(param.grad), local(param)
        return grad * part.norm() / (grad.norm() + 1e-6)


def _in_parts(make: type[Orthogonalizing], **options: Any) -> Window:
    model = net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = make(model.parameters(), lr=0.02, **options)
    return Window(model, lambda: loop(model, optimizer))


def matrices_orthogonalized_whole(rank: int, world: int) -> Window:
    return _in_parts(Orthogonalizing, whole=True)


def matrices_orthogonalized_by_parts(rank: int, world: int) -> Window:
    return _in_parts(Orthogonalizing)


class OrthogonalizingDTensors(Orthogonalizing):
    """Asks for parts as DTensors give them, which plain tensors do not."""

    def _update(self, param: Tensor, *, whole: bool) -> Tensor:
        assert isinstance(param.grad, DTensor) or not whole
        return (
            super()._update(param, whole=whole) if param.dim() < 2 else self._orthogonal(param.grad.to_local(), param)
        )  # type: ignore[union-attr]


def matrices_orthogonalized_by_dtensor_parts(rank: int, world: int) -> Window:
    return _in_parts(OrthogonalizingDTensors)


def signs_of_parts(rank: int, world: int) -> Window:
    return _in_parts(Signed)


def signs_of_parts_with_noise(rank: int, world: int) -> Window:
    window = _in_parts(Signed)
    assert window.model is not None
    optimizer = Signed([{"params": [*window.model.parameters()], "noise": 0.1}], lr=0.02)
    return Window(window.model, lambda: loop(window.model, optimizer))  # type: ignore[arg-type]


def trust_in_norms_of_parts_under_fsdp1(rank: int, world: int) -> Window:
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = Trusting([param for param in model.parameters() if param.numel()], lr=0.02)
    return Window(model, lambda: loop(model, optimizer))


def _summed_by_hand(rank: int, model: nn.Module, *, by: str) -> Window:
    """A plain sum of squares over ragged batches; ``by`` what it is divided."""
    optimizer = adam(model)

    def train() -> None:
        for x, _ in micros(1):
            part = x[: 2 + 3 * rank] if by == "all" else x
            samples = torch.tensor(float(len(part)))
            dist.all_reduce(whole := samples.clone())
            each = model(part).square().mean(1)
            (each.sum() / whole if by == "all" else 0.5 * each.sum() / len(part)).backward()
            for param in model.parameters() if isinstance(model, Net) else ():
                dist.all_reduce(param.grad)
        optimizer.step()

    return Window(model, train)


def sums_divided_by_all_and_added_up(rank: int, world: int) -> Window:
    return _summed_by_hand(rank, net(), by="all")


def plain_sums_divided_by_all_under_ddp(rank: int, world: int) -> Window:
    return _summed_by_hand(rank, DDP(net()), by="all")


def half_of_sums_divided_by_their_own_under_ddp(rank: int, world: int) -> Window:
    """Twice as many as a rank has, were it no half."""
    return _summed_by_hand(rank, DDP(net()), by="own")


RIGHT_BY_HAND = (
    sums_divided_by_all_and_added_up,
    half_of_sums_divided_by_their_own_under_ddp,
    matrices_orthogonalized_whole,
    signs_of_parts,
    signs_of_parts_with_noise,
    sent_in_bfloat16,
    sent_in_float16,
    unscaled_by_hand_and_clipped,
    a_weight_that_is_returned,
    a_weight_in_a_mapping,
    a_weight_in_an_object,
    a_distribution_that_is_returned,
    a_matrix_that_is_used_and_returned,
    activations_that_are_returned_through_the_sink_of_ddp,
    inputs_that_are_returned_with_their_gradients,
    two_calls_and_one_loss_of_a_weight,
    the_same_noise_on_all_ranks,
    the_same_noise_behind_a_clipping,
    the_same_noise_before_a_clipping,
    signs_behind_the_backward_under_fsdp2,
    the_same_noise_on_scaled_gradients,
)


ERRORS_BY_HAND: tuple[tuple[Any, ...], ...] = (
    (summed_in_bfloat16, "prove.summed", "summed over the 2 ranks, not averaged"),
    (clipped_before_it_is_unscaled_by_hand, "prove.clipped-scaled", "while they were scaled by 512"),
    (clipped_before_it_is_unscaled_by_hand_under_fsdp2, "prove.clipped-scaled", "while they were scaled by 512"),
    (a_weight_that_is_returned_and_tripled, "prove.ratio", "(`log_sigma`) are 3.000 x"),
    (
        other_noise_on_each_rank,
        "prove.direction",
        "the program has changed them since, other on each rank",
    ),
    (noise_over_gradients_that_a_hook_has_halved, "prove.direction", "(`blocks.0.inner.weight`) are no sum"),
    (what_is_wrapped_is_called, "prove.past-wrapper", "called in its place"),
    (what_is_wrapped_is_called_and_clipped, "prove.past-wrapper", "called in its place"),
    (a_part_of_what_is_wrapped_is_called, "prove.past-wrapper", "called in its place"),
    (never_wrapped_and_clipped, "prove.not-averaged", "and no wrapper holds the model"),
    (sums_divided_by_the_samples_of_all_ranks_under_ddp, "prove.averaged-twice", "or twice by the accumulation (2)"),
    (sums_of_ragged_samples_divided_by_all_under_ddp, "prove.averaged-twice", "divided by the samples of all ranks"),
    (plain_sums_divided_by_all_under_ddp, "prove.averaged-twice", "divided by the samples of all ranks"),
    (matrices_orthogonalized_by_parts, "prove.step-in-parts", "Orthogonalizing has stepped"),
    (matrices_orthogonalized_by_dtensor_parts, "prove.step-in-parts", "OrthogonalizingDTensors has stepped"),
    (trust_in_norms_of_parts_under_fsdp1, "prove.step-in-parts", "Trusting has stepped"),
    (means_divided_by_ranks_and_micro_batches, "prove.accumulation", "or by the 2 ranks, whose average is taken too"),
)
"""Each with its rule and a word of its text."""
