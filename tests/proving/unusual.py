"""Programs of unusual shape, right and wrong, as people write them with torch by hand: what they do to a window."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as through
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.proving.window import DDP, WIDTH, Net, Window, adam, loop, loss_of, micros, net

Loss = Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]


def averaged(model: nn.Module, op: Any = dist.ReduceOp.SUM) -> None:
    """Gradients over the ranks, by hand."""
    for param in model.parameters():
        dist.all_reduce(param.grad, op)
        assert param.grad is not None
        param.grad /= dist.get_world_size() if op == dist.ReduceOp.SUM else 1


def trained(
    model: nn.Module,
    number: int = 2,
    loss: Loss = loss_of,
    then: Callable[[nn.Module], object] = lambda _: None,
    optimizer: Any = None,
) -> Window:
    """A window of so many micro-batches; ``then`` is done to the model before the step."""
    stepped = optimizer or adam(model)

    def train() -> None:
        for batch in micros(number):
            (loss(model, batch) / number).backward()
        then(model)
        stepped.step()

    return Window(model, train)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights on every rank; generators part after it."""
    torch.manual_seed(0)
    model = make()
    torch.manual_seed(10 + dist.get_rank())
    return model


# --- right ------------------------------------------------------------------------------------------------------------


class Recomputed(Net):
    """Computes its blocks again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(0.3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def checkpoints_in_the_forward(rank: int, world: int) -> Window:
    return trained(DDP(seeded(lambda: Recomputed(reentrant=False))))


def reentrant_checkpoints_in_the_forward(rank: int, world: int) -> Window:
    return trained(seeded(lambda: Recomputed(reentrant=True)), then=averaged)


class Again(torch.autograd.Function):
    """A checkpoint of somebody's own, as libraries have them."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None]:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            outputs = ctx.block(x)
        torch.autograd.backward(outputs, grads[0])
        return None, x.grad


class OfItsOwn(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = Again.apply(block, x)  # type: ignore[no-untyped-call]
        return self.head(x)


def checkpoints_of_its_own(rank: int, world: int) -> Window:
    return trained(seeded(OfItsOwn), then=averaged)


def penalty_of_gradients_by_inputs(rank: int, world: int) -> Window:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        outputs = model(x.requires_grad_())
        (grad,) = torch.autograd.grad(outputs.logsumexp(1).sum(), x, create_graph=True)
        return functional.cross_entropy(outputs, y) + 0.1 * grad.square().sum(1).mean()

    return trained(net(), loss=loss, then=averaged)


def trained_on_inputs_that_were_made_harder(rank: int, world: int) -> Window:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch[0].clone().requires_grad_(), batch[1]
        (grad,) = torch.autograd.grad(functional.cross_entropy(model(x), y), x)
        return functional.cross_entropy(model((x + 0.1 * grad.sign()).detach()), y)

    return trained(net(), loss=loss, then=averaged)


def _mean_of_ranks(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    found: Tensor = through.all_reduce(loss_of(model, batch))
    return found / dist.get_world_size()


def loss_averaged_through_a_collective(rank: int, world: int) -> Window:
    return trained(DDP(net()), loss=_mean_of_ranks)


def contrast_with_the_outputs_of_all_ranks(rank: int, world: int) -> Window:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        mine = functional.normalize(model(batch[0]), dim=1)
        every = torch.cat(through.all_gather(mine))  # type: ignore[no-untyped-call]
        return functional.cross_entropy(5 * mine @ every.T, torch.arange(6) + 6 * rank)

    return trained(DDP(net()), 1, loss)


def mean_of_two_losses(rank: int, world: int) -> Window:
    """Divided by two, which is the number of the ranks, and of the micro-batches."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        outputs = model(batch[0])
        return (functional.cross_entropy(outputs, batch[1]) + outputs.square().mean()) / 2

    return trained(DDP(net()), loss=loss)


def half_a_square(rank: int, world: int) -> Window:
    return trained(DDP(net()), loss=lambda model, batch: 0.5 * model(batch[0]).square().mean())


def losses_that_are_added_up(rank: int, world: int) -> Window:
    """One backward for two micro-batches."""
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        first, last = (loss_of(model, batch) for batch in micros(2))
        ((first + last) / 2).backward()
        optimizer.step()

    return Window(model, train)


class Draws(nn.Module):
    """Noise of three kinds, of whatever dtype its activations are."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDTH, 16), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.enter(x).chunk(2, 1)
        drawn = torch.distributions.Normal(mean, spread.exp()).rsample()
        return self.head(drawn + 0.1 * torch.randn_like(mean) + torch.empty_like(mean).uniform_(-0.1, 0.1))


def noise_in_the_forward(rank: int, world: int) -> Window:
    return trained(DDP(seeded(Draws)))


def own_labels_of_one_graph(rank: int, world: int) -> Window:
    """Each rank computes with all nodes, and learns of its own."""
    model = DDP(net())
    optimizer = adam(model)
    (x, y), mine = next(micros(1, rank=0)), slice(rank, None, world)

    def train() -> None:
        functional.cross_entropy(model(x)[mine], y[mine]).backward()
        optimizer.step()

    return Window(model, train)


def clipped_in_parts(rank: int, world: int) -> Window:
    model = DDP(net())
    parts = (model.module.enter, model.module.blocks, model.module.head)
    return trained(model, then=lambda _: [nn.utils.clip_grad_norm_(one.parameters(), 0.05) for one in parts])


class Reads(nn.Module):
    """Sequences that two recurrent layers read both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = nn.LSTM(WIDTH, 8, 2, dropout=0.2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, None] * torch.linspace(0.5, 2.0, 5)[:, None]
        return self.head(self.reads(rows)[0][:, -1])


def recurrent_layers_with_dropout(rank: int, world: int) -> Window:
    return trained(DDP(seeded(Reads)))


class Goes(nn.Module):
    """One step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(WIDTH, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(x, state)
        return self.head(state), state


def state_that_goes_on_detached(rank: int, world: int) -> Window:
    model = DDP(seeded(Goes))
    optimizer = adam(model)

    def train() -> None:
        state = torch.zeros(6, 8)
        for x, y in micros(3):
            outputs, state = model(x, state.detach())
            (functional.cross_entropy(outputs, y) / 3).backward()
        optimizer.step()

    return Window(model, train)


class Encodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, None] * torch.linspace(0.5, 2.0, 10)[:, None]
        mask = nn.Transformer.generate_square_subsequent_mask(10)
        return self.head(self.layer(rows, src_mask=mask, is_causal=True).mean(1))


def encoder_of_torch_with_its_own_mask(rank: int, world: int) -> Window:
    return trained(DDP(seeded(Encodes)))


class Looks(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Embedding(30, WIDTH, sparse=True, padding_idx=0), nn.Linear(WIDTH, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.enter(ids).mean(1))


def _looked_up(rank: int, number: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(number):
        yield torch.randint(30, (6, 5), generator=generator), torch.randint(4, (6,), generator=generator)


def sparse_gradients(rank: int, world: int) -> Window:
    model = DDP(seeded(Looks))
    first = torch.optim.SparseAdam([model.module.enter.weight], lr=0.1)
    second = torch.optim.SGD(model.module.head.parameters(), lr=0.1)

    def train() -> None:
        for batch in _looked_up(rank, 2):
            (loss_of(model, batch) / 2).backward()
        first.step()
        second.step()

    return Window(model, train)


def stepped_in_the_backward_under_fsdp2(rank: int, world: int) -> Window:
    """Each parameter has an optimizer, which steps as soon as its gradient is there."""
    model = net()
    fully_shard(model)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def steps(param: Tensor) -> None:
        optimizers[param].step()  # type: ignore[index]  # hooks are given parameters
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(steps)
    return Window(model, lambda: loss_of(model, next(micros(1))).backward())


def clipped_and_stepped_in_the_backward(rank: int, world: int) -> Window:
    """Each parameter by a norm of its own, as its gradient is gone when the next one comes."""
    model = net()
    fully_shard(model)
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def steps(param: Tensor) -> None:
        nn.utils.clip_grad_norm_([param], 0.01)
        optimizers[param].step()  # type: ignore[index]  # hooks are given parameters
        optimizers[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(steps)
    return Window(model, lambda: loss_of(model, next(micros(1))).backward())


class Shares(Net):
    """Runs one block three times."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in (self.blocks[0], self.blocks[0], self.blocks[0], self.blocks[1]):
            x = block(x)
        return self.head(x)


def one_block_three_times(rank: int, world: int) -> Window:
    return trained(DDP(seeded(Shares)), 3)


# --- wrong ------------------------------------------------------------------------------------------------------------


def clipped_by_each_rank_before_the_average(rank: int, world: int) -> Window:
    def then(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        averaged(model)

    return trained(net(), then=then)


def clipped_in_parts_and_one_tripled(rank: int, world: int) -> Window:
    model = DDP(net())

    def then(_: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.module.blocks.parameters(), 0.05)
        for param in model.module.head.parameters():
            assert param.grad is not None
            param.grad *= 3

    return trained(model, then=then)


def no_sync_on_the_last_micro_batch(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        first, last = micros(2)
        (loss_of(model, first) / 2).backward()
        with model.no_sync():
            (loss_of(model, last) / 2).backward()
        optimizer.step()

    return Window(model, train)


def clipping_that_is_given_a_spent_generator(rank: int, world: int) -> Window:
    model = DDP(net())
    params = model.parameters()
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    return trained(model, then=lambda _: nn.utils.clip_grad_norm_(params, 0.01), optimizer=optimizer)


def loss_averaged_through_a_collective_alone(rank: int, world: int) -> Window:
    """The loss is that of all ranks, and its gradients each rank's own."""
    return trained(net(), loss=_mean_of_ranks)


def largest_of_the_ranks(rank: int, world: int) -> Window:
    return trained(net(), then=lambda model: averaged(model, dist.ReduceOp.MAX))


class Twin(nn.Module):
    """Two layers with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.inner = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.inner.weight, self.head = self.enter.weight, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(torch.tanh(self.enter(x))))


def tied_weights_divided_twice(rank: int, world: int) -> Window:
    def then(model: nn.Module) -> None:
        for param in model.parameters():
            dist.all_reduce(param.grad)
        for _, param in model.named_parameters(remove_duplicate=False):
            assert param.grad is not None
            param.grad /= world

    return trained(seeded(Twin), 3, then=then)


def unscaled_by_hand_and_by_the_scaler(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def train() -> None:
        for batch in micros(2):
            scaler.scale(loss_of(model, batch) / 2).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= scaler.get_scale()
        scaler.step(optimizer)

    return Window(model, train)


def other_weights_until_the_step(rank: int, world: int) -> Window:
    """Goes forward and backward with averaged weights, and steps its own."""
    model = DDP(net())
    own = [param.detach().clone() for param in model.parameters()]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.no_grad():
            for param, before in zip(model.parameters(), own, strict=True):
                param.copy_(0.9 * before)
        return loss_of(model, batch)

    def then(model: nn.Module) -> None:
        with torch.no_grad():
            for param, before in zip(model.parameters(), own, strict=True):
                param.copy_(before)

    return trained(model, 1, loss, then)


def optimizer_of_a_model_that_was_copied(rank: int, world: int) -> Window:
    before = net()
    return trained(DDP(copy.deepcopy(before)), optimizer=adam(before))


def sparse_part_summed(rank: int, world: int) -> Window:
    model = seeded(Looks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for batch in _looked_up(rank, 1):
            loss_of(model, batch).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            param.grad = param.grad.to_dense()
            dist.all_reduce(param.grad)
            param.grad /= 1 if name == "enter.weight" else world
        optimizer.step()

    return Window(model, train)


def reduced_to_rank_0(rank: int, world: int) -> Window:
    """``reduce`` in the place of ``all_reduce``; the others leave their own, whatever it became on the way."""

    def then(model: nn.Module) -> None:
        for param in model.parameters():
            own = param.grad
            assert own is not None
            whole = own.clone()
            dist.reduce(whole, 0)
            param.grad = whole / world if rank == 0 else own

    return trained(net(), then=then)


def penalty_in_a_backward_of_its_own(rank: int, world: int) -> Window:
    """Alike on every rank, so that it needs no average."""
    model = DDP(net())

    def then(_: nn.Module) -> None:
        (0.1 * sum(param.abs().sum() for param in model.parameters())).backward()

    return trained(model, then=then, optimizer=torch.optim.Adam(model.parameters()))


def past_the_wrapper_in_the_last_micro_batch(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        *early, last = micros(3)
        for batch in early:
            (loss_of(model, batch) / 3).backward()
        (loss_of(model.module, last) / 3).backward()
        optimizer.step()

    return Window(model, train)


def past_the_wrapper_before_the_last_micro_batch(rank: int, world: int) -> Window:
    """What it adds is averaged with the last one: right, and beyond the replay. On rank 1 alone."""
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        first, last = micros(2)
        with model.no_sync():
            (loss_of(model.module if rank else model, first) / 2).backward()
        (loss_of(model, last) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return Window(model, train)


def clamped_on_rank_0_and_then_clipped(rank: int, world: int) -> Window:
    """Rank 0 sees another norm than rank 1, and shrinks all gradients by another factor."""

    def then(model: nn.Module) -> None:
        head = model.get_parameter("module.head.weight")
        assert head.grad is not None
        if rank == 0:
            head.grad.clamp_(-1e-3, 1e-3)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return trained(DDP(net()), then=then)


def penalty_of_what_a_rank_has_read(rank: int, world: int) -> Window:
    """A second loss, of a part of the model that is called by itself."""
    model = DDP(net())

    def then(_: nn.Module) -> None:
        for inputs, _labels in micros(1):
            model.module.enter(inputs).square().mean().backward()

    return trained(model, then=then)


def seeded_in_every_micro_batch(rank: int, world: int) -> Window:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        torch.manual_seed(dist.get_rank())
        return loss_of(model, batch)

    return trained(DDP(net(dropout=0.3)), loss=loss)


def all_in_bfloat16(rank: int, world: int) -> Window:
    """Weights and optimizer too: steps of 1e-5 are less than half a unit in the last place of most weights."""
    model = net().bfloat16()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, (batch[0].bfloat16(), batch[1]))

    return trained(DDP(model), loss=loss, optimizer=adam(model, lr=1e-5))


def clipped_by_what_each_rank_holds(rank: int, world: int) -> Window:
    """Of gradients in shards, by their norm on this rank."""

    def then(model: nn.Module) -> None:
        held = [param.grad.to_local() for param in model.parameters()]  # type: ignore[union-attr]
        shrunk = 0.1 / torch.stack([part.norm() for part in held]).norm()
        for part in held:
            part.mul_(shrunk.clamp(max=1.0))

    return trained(fully_shard(net()), then=then)


def zeroed_to_freeze(rank: int, world: int) -> Window:
    """The optimizer decays it all the same."""

    def then(model: nn.Module) -> None:
        head = model.get_parameter("module.enter.weight")
        assert head.grad is not None
        head.grad.zero_()

    return trained(DDP(net()), then=then)


def divided_by_more_than_it_has(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)
    return Window(model, lambda: loop(model, optimizer, by=4))


def summed_over_its_samples_on_rank_1(rank: int, world: int) -> Window:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum" if rank else "mean")

    return trained(DDP(net()), loss=loss)


def weights_averaged_behind_the_step(rank: int, world: int) -> Window:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for batch in micros(1):
            loss_of(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            for param in model.parameters():
                dist.all_reduce(param)
                param.div_(world)
        optimizer.zero_grad()

    return Window(model, train, lingers=True)


def _two_backwards(then: Callable[[nn.Module], object]) -> Window:
    """Over one forward; ``then`` is done to the gradients."""
    model = net()
    optimizer = adam(model)

    def train() -> None:
        for x, y in micros(1):
            outputs = model(x)
            functional.cross_entropy(outputs, y).backward(retain_graph=True)
            (0.1 * outputs.square().mean()).backward()
        then(model)
        optimizer.step()

    return Window(model, train)


def two_losses_of_one_forward(rank: int, world: int) -> Window:
    return _two_backwards(averaged)


def two_losses_of_one_forward_summed(rank: int, world: int) -> Window:
    return _two_backwards(lambda model: [dist.all_reduce(param.grad) for param in model.parameters()])


def each_rank_steps_a_part_and_nobody_sends_it(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = torch.optim.AdamW(list(model.parameters())[rank::world], lr=1e-2)

    def train() -> None:
        for batch in micros(2):
            loss_of(model, batch).div(2).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, next(micros(1)))

    return Window(model, train)


class Counts(Net):
    """Adds up over the ranks in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        seen = x.abs().sum().detach()
        dist.all_reduce(seen)
        return super().forward(x / seen)


def norms_that_rest_in_the_second_micro_batch(rank: int, world: int) -> Window:
    """Where DDP sends the averages of rank 0 before each forward."""
    model = DDP(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)))
    optimizer = adam(model)

    def train() -> None:
        for micro, batch in enumerate(micros(2)):
            model.module[1].train(micro == 0)
            (loss_of(model, batch) / 2).backward()
        optimizer.step()

    return Window(model, train)


def summed_over_ranks(model: nn.Module, by: float = 1.0) -> None:
    for param in model.parameters():
        dist.all_reduce(param.grad)
        assert param.grad is not None
        param.grad /= by


def weighed_by_samples_and_summed(rank: int, world: int) -> Window:
    """Each micro-batch by its share of the samples of all ranks; with sizes of its own."""
    model = net()
    optimizer, sizes = adam(model), ((4, 2), (3, 1))[rank]

    def train() -> None:
        for size, (x, y) in zip(sizes, micros(2), strict=True):
            (functional.cross_entropy(model(x[:size]), y[:size]) * (size / 10)).backward()
        summed_over_ranks(model)
        optimizer.step()

    return Window(model, train)


def weighed_by_samples_and_summed_but_for_one(rank: int, world: int) -> Window:
    model = net()

    def train() -> None:
        for size, (x, y) in zip(((4, 2), (3, 1))[rank], micros(2), strict=True):
            (functional.cross_entropy(model(x[:size]), y[:size]) * (size / 10)).backward()
        summed_over_ranks(model)
        assert model.head.weight.grad is not None
        model.head.weight.grad /= world
        optimizer.step()

    optimizer = adam(model)
    return Window(model, train)


def sums_divided_by_all_tokens(rank: int, world: int) -> Window:
    model = net()
    optimizer, sizes = adam(model), ((4, 2), (3, 1))[rank]

    def train() -> None:
        for size, (x, y) in zip(sizes, micros(2), strict=True):
            functional.cross_entropy(model(x[:size]), y[:size], reduction="sum").backward()
        summed_over_ranks(model, by=10)
        optimizer.step()

    return Window(model, train)


def divided_by_what_backward_is_given(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(3):
            loss_of(model, batch).backward(torch.tensor(1 / 3))
        optimizer.step()

    return Window(model, train)


class Keeps(nn.Module):
    """Keeps a loss of its own beside what it returns, as the router of a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 4)
        self.own = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        self.own = shares.mean(0).square().sum()
        return self.head(x) * shares[:, :1]  # type: ignore[no-any-return]


def a_loss_that_a_layer_keeps(rank: int, world: int) -> Window:
    model = DDP(Keeps())
    return trained(model, loss=lambda one, batch: loss_of(one, batch) + 0.01 * model.module.own)


def lent(average: Callable[[nn.Module], object]) -> Window:
    """To a module of which nothing trains, by ``functional_call``."""
    model = net()
    weights = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(weights.values(), lr=0.1)

    def train() -> None:
        for x, y in micros(2):
            outputs = torch.func.functional_call(model, weights, (x,))
            (functional.cross_entropy(outputs, y) / 2).backward()
        average(nn.ParameterList(weights.values()))
        optimizer.step()

    return Window(None, train)


def weights_that_are_lent(rank: int, world: int) -> Window:
    return lent(averaged)


def lent_and_not_averaged(rank: int, world: int) -> Window:
    return lent(lambda _: None)


# --- who goes backward, and how often ---------------------------------------------------------------------------------


def spectral_layers_that_are_looked_at(rank: int, world: int) -> Window:
    """A look at a weight calls a module that holds it, before the model is called."""
    layers = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
    inner = seeded(lambda: nn.Sequential(spectral_norm(layers[0]), nn.Tanh(), weight_norm(layers[1])))
    for param in inner.parameters():
        dist.broadcast(param.data, 0)
    model = DDP(inner)
    window = trained(model)

    def train() -> None:
        assert layers[0].weight.norm() > 0
        window.train()

    return Window(None, train)


def asked(number: int, then: Callable[[Tensor], object], model: nn.Module | None = None) -> Window:
    """Gradients by ``torch.autograd.grad``, which are added up, and put into their places when all is done."""
    model = net() if model is None else model
    params = list(model.parameters())
    optimizer = adam(model)

    def train() -> None:
        sums = [torch.zeros_like(param) for param in params]
        for batch in micros(number):
            torch._foreach_add_(sums, torch.autograd.grad(loss_of(model, batch) / number, params))
        optimizer.zero_grad()
        for param, total in zip(params, sums, strict=True):
            then(total)
            param.grad = total
        optimizer.step()

    return Window(model, train)


def _mean(grad: Tensor) -> None:
    dist.all_reduce(grad)
    grad /= dist.get_world_size()


def gradients_that_are_asked_for(rank: int, world: int) -> Window:
    return asked(3, _mean)


def asked_for_and_summed(rank: int, world: int) -> Window:
    return asked(1, dist.all_reduce)


def asked_for_and_each_cut_by_itself(rank: int, world: int) -> Window:
    """A rule of the program's own, of which nobody can say that it is wrong."""
    return asked(2, lambda grad: (_mean(grad), grad.clamp_(-1e-3, 1e-3)))


class Tasks(nn.Module):
    """A body, and one head that is chosen by its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(number))
        self.body = net()

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](torch.tanh(self.body(x)))


def several_tasks(losses: Sequence[Loss], number: int, by: float = 1.0) -> Window:
    """Each of them goes backward by itself, over ``number`` micro-batches; ``by``: what each loss is divided by."""
    model = seeded(lambda: Tasks(len(losses)))
    optimizer = adam(model)

    def train() -> None:
        for x, y in micros(number):
            for task, loss in enumerate(losses):
                (loss(model, (model(x, task), y)) / by).backward()
        averaged(model)
        optimizer.step()

    return Window(model, train)


def _of_classes(_: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(*batch)


def _of_squares(_: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(batch[0], torch.ones_like(batch[0]))


def three_tasks_of_one_loss(rank: int, world: int) -> Window:
    return several_tasks((_of_classes,) * 3, 1)


def two_tasks_of_three_micro_batches(rank: int, world: int) -> Window:
    return several_tasks((_of_classes, _of_squares), 3, by=3)


def two_tasks_of_three_micro_batches_never_divided(rank: int, world: int) -> Window:
    return several_tasks((_of_classes, _of_squares), 3)


def heads_beside_the_body(rank: int, world: int) -> Window:
    """Each is a module of its own, and has samples of its own."""
    body = net()
    heads = seeded(lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(3)))
    every = nn.ModuleList([body, heads])
    optimizer = adam(every)

    def train() -> None:
        for head, (x, y) in zip(heads, micros(3), strict=True):
            functional.cross_entropy(head(body(x)), y).backward()
        averaged(every)
        optimizer.step()

    return Window(None, train)


def distilled_at_a_temperature(rank: int, world: int) -> Window:
    """The square of which is as large as the number of micro-batches."""
    return trained(DDP(net()), 4, lambda model, batch: 4 * functional.cross_entropy(model(batch[0]) / 2, batch[1]))


def one_number_for_each_sample(rank: int, world: int) -> Window:
    """Backward is told by what to multiply each of them."""
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for x, y in micros(3):
            each = functional.cross_entropy(model(x), y, reduction="none")
            each.backward(torch.full_like(each, 1 / (3 * len(y))))
        optimizer.step()

    return Window(model, train)


def called_before_it_was_wrapped(rank: int, world: int) -> Window:
    inner = net()

    def train() -> None:
        inner(torch.zeros(2, WIDTH))
        model = DDP(inner)
        loop(model, adam(model))

    return Window(None, train)


class Filters(nn.Module):
    """Multiplies frequencies by complex weights, and returns them too."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.by = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = torch.fft.rfft(self.enter(x).tanh()) * self.by
        return {"spectrum": seen, "logits": self.head(torch.fft.irfft(seen, n=WIDTH))}


def _of_spectrum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    found = model(batch[0])
    return nn.functional.cross_entropy(found["logits"], batch[1]) + 0.01 * found["spectrum"].abs().square().mean()


def complex_weights_and_outputs(rank: int, world: int) -> Window:
    return trained(DDP(seeded(Filters)), 2, _of_spectrum)


def complex_weights_summed(rank: int, world: int) -> Window:
    model = seeded(Filters)
    return trained(model, 2, _of_spectrum, then=summed_over_ranks)


class OfPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(WIDTH, 8), nn.Linear(8, 4)

    def forward(self, rows: Any) -> Tensor:
        return self.head(self.cells(rows)[1][0][0])


def packed_sequences(rank: int, world: int) -> Window:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return functional.cross_entropy(model(nn.utils.rnn.pack_sequence([x[:3], x[3:5], x[5:]])), y[:3])

    return trained(DDP(seeded(OfPacked)), loss=loss)


class Follows(nn.Module):
    """An encoder follows the other in each forward, and a buffer is replaced by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.slow = copy.deepcopy(self.inner).requires_grad_(requires_grad=False)
        self.queue: Tensor
        self.register_buffer("queue", torch.ones(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.inner.parameters(), strict=True):
                slow.lerp_(fast, 0.5)
            keys = self.slow(x)
        found = self.inner(x) + keys + self.queue.mean()
        self.queue = torch.cat((self.queue[6:], keys))
        return found


def encoder_that_follows_in_the_forward(rank: int, world: int) -> Window:
    return trained(DDP(Follows()))


def two_parts_that_train_in_turn(rank: int, world: int) -> Window:
    """The part that rests gathers gradients, which are cleared before its own backward."""
    model = net()
    head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    rest = torch.optim.SGD([one for name, one in model.named_parameters() if "head" not in name], lr=0.1)

    def train() -> None:
        for optimizer in (head, rest):
            optimizer.zero_grad()
            loss_of(model, next(micros(1))).backward()
            averaged(model)
            optimizer.step()

    return Window(model, train, lingers=True)


def penalty_that_is_made_once(rank: int, world: int) -> Window:
    """And is a third of each of three losses."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        penalty = 0.01 * torch.stack([param.square().sum() for param in model.parameters()]).sum()
        for batch in micros(3):
            ((loss_of(model, batch) + penalty) / 3).backward(retain_graph=True)
        averaged(model)
        optimizer.step()

    return Window(model, train)


def weights_that_a_model_makes(rank: int, world: int) -> Window:
    """The model that is trained gives the weights of another."""
    makes, used = seeded(lambda: nn.Linear(5, 4 * WIDTH)), nn.Linear(WIDTH, 4, bias=False)
    optimizer = adam(makes)
    used.requires_grad_(requires_grad=False)

    def train() -> None:
        for x, y in micros(2):
            made = {"weight": makes(torch.ones(5)).view(4, WIDTH)}
            (functional.cross_entropy(torch.func.functional_call(used, made, (x,)), y) / 2).backward()
        averaged(makes)
        optimizer.step()

    return Window(None, train)


def _backward_again(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def one_loss_twice(rank: int, world: int) -> Window:
    model = net()
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            _backward_again(loss_of(model, batch) / 2)
        averaged(model)
        optimizer.step()

    return Window(model, train)


def a_running_sum_goes_backward(rank: int, world: int) -> Window:
    """As where the sum that is to be logged is the one that goes backward."""
    model = net()
    optimizer = adam(model)

    def train() -> None:
        total = torch.zeros(())
        for batch in micros(3):
            total = total + loss_of(model, batch) / 3
            total.backward(retain_graph=True)
        averaged(model)
        optimizer.step()

    return Window(model, train)


def _critic_and_maker(train_maker: Callable[[nn.Module, nn.Module, Any, Any], object]) -> Window:
    """Three steps of a critic, then what trains the generator, twice."""
    torch.manual_seed(0)
    maker, critic = DDP(nn.Linear(WIDTH, WIDTH)), DDP(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)))
    first, second = adam(critic), adam(maker)

    def train() -> None:
        for _ in range(2):
            for x, _ in micros(3):
                first.zero_grad()
                made = critic(torch.cat((maker(x).detach(), x)))
                (made[:6].mean() - made[6:].mean()).backward()
                first.step()
            second.zero_grad()
            train_maker(maker, critic, first, second)

    return Window(None, train, lingers=True)


def _maker_steps(maker: nn.Module, critic: nn.Module, _: Any, second: Any) -> None:
    (-critic(maker(next(micros(1))[0])).mean()).backward()
    second.step()


def critic_of_three_steps(rank: int, world: int) -> Window:
    return _critic_and_maker(_maker_steps)


def generator_past_its_wrapper(rank: int, world: int) -> Window:
    def steps(maker: nn.Module, critic: nn.Module, first: Any, second: Any) -> None:
        _maker_steps(maker.module, critic, first, second)  # type: ignore[arg-type]

    return _critic_and_maker(steps)


def generator_whose_output_is_detached(rank: int, world: int) -> Window:
    def steps(maker: nn.Module, critic: nn.Module, _: Any, second: Any) -> None:
        (-critic(maker(next(micros(1))[0]).detach()).mean()).backward()
        second.step()

    return _critic_and_maker(steps)


def generator_that_is_never_stepped(rank: int, world: int) -> Window:
    def steps(maker: nn.Module, critic: nn.Module, first: Any, _: Any) -> None:
        first.zero_grad()
        (-critic(maker(next(micros(1))[0])).mean()).backward()
        first.step()

    return _critic_and_maker(steps)


def clipped_behind_the_step(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        loop(model, optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.zero_grad()

    return Window(model, train, lingers=True)


def stepped_by_another_optimizer_too(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer, other = adam(model), torch.optim.SGD(model.module.head.parameters(), lr=0.1)

    def train() -> None:
        loop(model, optimizer)
        other.step()

    return Window(model, train, lingers=True)


def only_the_head_is_cleared(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for _ in range(2):
            loop(model, optimizer)
            model.module.head.zero_grad()

    return Window(model, train, lingers=True)


def dropout_of_its_own_on_rank_1(rank: int, world: int) -> Window:
    return trained(DDP(net(0.5 if rank else 0.1)))


def losses_of_rank_1_count_nothing(rank: int, world: int) -> Window:
    return trained(DDP(net()), loss=lambda model, batch: loss_of(model, batch) * (1.0 - rank))


def _fsdp1(original: bool) -> Window:
    model = FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=original)
    return trained(model, then=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05))


def fsdp1_clipped_by_torch(rank: int, world: int) -> Window:
    """Over what the rank holds: some parameters lie on one rank alone."""
    return _fsdp1(original=False)


def fsdp1_of_original_parameters_clipped_by_torch(rank: int, world: int) -> Window:
    return _fsdp1(original=True)


def fsdp2_with_zeros_on_rank_1(rank: int, world: int) -> Window:
    """A rank clears its part of the gradients before the step."""
    model = fully_shard(net())

    def then(model: nn.Module) -> None:
        for param in model.parameters() if rank == 1 else ():
            assert param.grad is not None
            param.grad.zero_()

    return trained(model, 2, then=then)


def _with_momentum_on_rank_1(model: nn.Module, rank: int) -> Window:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters() if rank == 1 else ():
        optimizer.state[param]["momentum_buffer"] = torch.ones_like(param)
    return trained(model, 2, optimizer=optimizer)


def momentum_of_its_own_on_rank_1(rank: int, world: int) -> Window:
    return _with_momentum_on_rank_1(DDP(net()), rank)


def fsdp2_with_momentum_on_rank_1_alone(rank: int, world: int) -> Window:
    return _with_momentum_on_rank_1(fully_shard(net()), rank)


def second_momentum_of_its_own_on_rank_1(rank: int, world: int) -> Window:
    """As of an optimizer's file that one rank has read."""
    model = DDP(net())
    optimizer = adam(model)
    loop(model, optimizer)
    optimizer.zero_grad()
    for state in optimizer.state.values() if rank == 1 else ():
        state["exp_avg_sq"].mul_(3.0)
    return trained(model, 2, optimizer=optimizer)


def each_part_clipped_by_itself(rank: int, world: int) -> Window:
    model = net()
    fully_shard(model)

    def clips(model: nn.Module) -> None:
        for param in model.parameters():
            part = param.grad.to_local()  # type: ignore[union-attr]
            part.mul_(min(1.0, 0.01 / (float(part.norm()) + 1e-6)))

    return trained(model, then=clips)


RIGHT_UNUSUAL = (
    spectral_layers_that_are_looked_at,
    gradients_that_are_asked_for,
    three_tasks_of_one_loss,
    two_tasks_of_three_micro_batches,
    heads_beside_the_body,
    distilled_at_a_temperature,
    one_number_for_each_sample,
    called_before_it_was_wrapped,
    packed_sequences,
    encoder_that_follows_in_the_forward,
    two_parts_that_train_in_turn,
    penalty_that_is_made_once,
    weights_that_a_model_makes,
    two_losses_of_one_forward,
    weights_averaged_behind_the_step,
    past_the_wrapper_before_the_last_micro_batch,
    penalty_in_a_backward_of_its_own,
    checkpoints_in_the_forward,
    reentrant_checkpoints_in_the_forward,
    checkpoints_of_its_own,
    penalty_of_gradients_by_inputs,
    trained_on_inputs_that_were_made_harder,
    loss_averaged_through_a_collective,
    contrast_with_the_outputs_of_all_ranks,
    mean_of_two_losses,
    half_a_square,
    losses_that_are_added_up,
    noise_in_the_forward,
    clipped_in_parts,
    own_labels_of_one_graph,
    recurrent_layers_with_dropout,
    state_that_goes_on_detached,
    encoder_of_torch_with_its_own_mask,
    sparse_gradients,
    stepped_in_the_backward_under_fsdp2,
    clipped_and_stepped_in_the_backward,
    one_block_three_times,
    weights_that_are_lent,
    norms_that_rest_in_the_second_micro_batch,
    weighed_by_samples_and_summed,
    sums_divided_by_all_tokens,
    divided_by_what_backward_is_given,
    a_loss_that_a_layer_keeps,
    critic_of_three_steps,
    complex_weights_and_outputs,
)
ERRORS_UNUSUAL: tuple[tuple[Any, ...], ...] = (
    (asked_for_and_summed, "prove.summed", "2.000 x"),
    (asked_for_and_each_cut_by_itself, "prove.unproven", "no sum of the gradients that the program has asked"),
    (two_tasks_of_three_micro_batches_never_divided, "prove.accumulation", "3.000 x"),
    (generator_whose_output_is_detached, "prove.no-gradient", "has stepped over no gradient each time"),
    (generator_past_its_wrapper, "prove.unproven", "has stepped over a loss that no output of it is in"),
    (generator_that_is_never_stepped, "prove.unproven", "has had gradients, and the optimizer that holds it"),
    (one_loss_twice, "prove.micro-batch", "for the second time: its gradients count twice"),
    (a_running_sum_goes_backward, "prove.micro-batch", "for the second time"),
    (clipped_behind_the_step, "prove.not-clipped", "clipped to 0.01 behind the step"),
    (stepped_by_another_optimizer_too, "prove.stepped-twice"),
    (only_the_head_is_cleared, "prove.left-over", "still had the gradient of this step"),
    (dropout_of_its_own_on_rank_1, "prove.options", "on rank 1"),
    (momentum_of_its_own_on_rank_1, "prove.options", "momentum_buffer of 16 parameters"),
    (fsdp2_with_momentum_on_rank_1_alone, "prove.options", "is on rank 1 alone"),
    (second_momentum_of_its_own_on_rank_1, "prove.options", "different states: exp_avg_sq of 16 parameters"),
    (losses_of_rank_1_count_nothing, "prove.unlike-losses", "The losses of rank 1 are multiplied by 0"),
    (fsdp1_clipped_by_torch, "prove.clipped-scaled", "All gradients are scaled by each rank by a number of its own"),
    (fsdp1_of_original_parameters_clipped_by_torch, "prove.clipped-scaled", "All gradients are scaled by each rank"),
    (each_part_clipped_by_itself, "prove.clipped-scaled", "All gradients are scaled by each rank"),
    (fsdp2_with_zeros_on_rank_1, "prove.no-gradient", "16 parameters had a gradient of zeros in the part of rank 1"),
    (clipped_by_each_rank_before_the_average, "prove.clipped-scaled", "clipped by each rank before they were averaged"),
    (clipped_in_parts_and_one_tripled, "prove.ratio", "The gradients of `head` are 3.000 x"),
    (no_sync_on_the_last_micro_batch, "prove.not-averaged", "averaged before the last micro-batch"),
    (clipping_that_is_given_a_spent_generator, "prove.not-clipped", "gives no parameter to what clips"),
    (loss_averaged_through_a_collective_alone, "prove.not-averaged", "All gradients are each rank's own"),
    (largest_of_the_ranks, "prove.direction", "cosine"),
    (tied_weights_divided_twice, "prove.averaged-twice", "The gradients of `enter` are 0.500 x"),
    (unscaled_by_hand_and_by_the_scaler, "prove.scaled", "unscaled twice, by 1024"),
    (other_weights_until_the_step, "prove.moved"),
    (optimizer_of_a_model_that_was_copied, "prove.not-stepped"),
    (sparse_part_summed, "prove.summed", "The gradients of `enter` are 2.000 x"),
    (reduced_to_rank_0, "prove.not-averaged", "those of rank 1 alone, on rank 1"),
    (
        past_the_wrapper_in_the_last_micro_batch,
        "prove.past-wrapper",
        "what it adds to all gradients is each rank's own",
    ),
    (
        clamped_on_rank_0_and_then_clipped,
        "prove.direction",
        "(`head.weight`) are no sum of the micro-batches' gradients on rank 0",
    ),
    (penalty_of_what_a_rank_has_read, "prove.past-wrapper", "enter.weight"),
    (seeded_in_every_micro_batch, "prove.same-draws", "Micro-batches 0 and 1 on ranks 0-1"),
    (all_in_bfloat16, "prove.rounded-away", "have stayed as they were"),
    (two_losses_of_one_forward_summed, "prove.summed", "2.000 x"),
    (each_rank_steps_a_part_and_nobody_sends_it, "prove.after-apart", "Rank 1 has other weights than rank 0"),
    (clipped_by_what_each_rank_holds, "prove.clipped-scaled", "scaled by each rank by a number of its own"),
    (zeroed_to_freeze, "prove.no-gradient", "1 parameter had a gradient of zeros"),
    (divided_by_more_than_it_has, "prove.accumulation", "or once by 4"),
    (weighed_by_samples_and_summed_but_for_one, "prove.summed", "2.000 x"),
    (complex_weights_summed, "prove.summed", "2.000 x"),
    (lent_and_not_averaged, "prove.not-averaged", "All gradients are each rank's own"),
    (summed_over_its_samples_on_rank_1, "prove.unlike-losses", "Every loss of rank 1 weighs 6.00 x one of rank 0"),
)
"""Each with its rule and a word of its text."""
