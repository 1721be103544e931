"""Right programs over engines and precisions: none of them may be accused."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import prepkit as pk
from tests.proving.window import DDP, WIDTH, Attends, Block, Window, adam, loop, loss_of, micros, net

CPU = torch.device("cpu")


def _looped(model: nn.Module, number: int = 2, optimizer: Any = None) -> Window:
    stepped = optimizer or adam(model)
    return Window(model, lambda: loop(model, stepped, number))


def ddp(rank: int, world: int) -> Window:
    return _looped(DDP(net()))


def ddp_with_zero_redundancy(rank: int, world: int) -> Window:
    model = DDP(net())
    return _looped(model, optimizer=ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2))


def ddp_with_no_sync(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        first, last = micros(2)
        with model.no_sync():
            (loss_of(model, first) / 2).backward()
        (loss_of(model, last) / 2).backward()
        optimizer.step()

    return Window(model, train)


def ddp_with_dropout(rank: int, world: int) -> Window:
    return _looped(DDP(net(0.3)), 3)


def ddp_with_fp16_hook(rank: int, world: int) -> Window:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = DDP(net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return _looped(model, 1)


def ddp_clipped(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return Window(model, train)


def ddp_float16_clipped(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def train() -> None:
        for batch in micros(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, batch) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)

    return Window(model, train)


def _in_bfloat16(model: nn.Module) -> Window:
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, batch) / 2
            loss.backward()
        optimizer.step()

    return Window(model, train)


def ddp_bfloat16(rank: int, world: int) -> Window:
    return _in_bfloat16(DDP(net()))


def ddp_with_a_weighted_loss(rank: int, world: int) -> Window:
    """The loss carries a factor of its own, which is no number of the run."""
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for x, y in micros(2):
            out = model(x)
            loss = nn.functional.cross_entropy(out, y) + 0.1 * out.square().mean()
            (0.7 * loss / 2).backward()
        optimizer.step()

    return Window(model, train)


def ddp_with_a_summed_loss(rank: int, world: int) -> Window:
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for x, y in micros(2):
            (nn.functional.cross_entropy(model(x), y, reduction="sum") / 12).backward()
        optimizer.step()

    return Window(model, train)


def ddp_two_groups_sgd(rank: int, world: int) -> Window:
    model = DDP(net())
    groups = [
        {"params": model.module.head.parameters(), "lr": 0.5, "weight_decay": 0.1},
        {"params": [*model.module.enter.parameters(), *model.module.blocks.parameters()]},
    ]
    return _looped(model, 2, torch.optim.SGD(groups, lr=0.01, momentum=0.9, nesterov=True))


def ddp_two_optimizers(rank: int, world: int) -> Window:
    model = DDP(net())
    first = torch.optim.Adam(model.module.blocks.parameters(), lr=0.01)
    second = torch.optim.RMSprop([*model.module.enter.parameters(), *model.module.head.parameters()], lr=0.01)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        first.step()
        second.step()

    return Window(model, train)


def ddp_frozen_body(rank: int, world: int) -> Window:
    whole = net()
    whole.blocks.requires_grad_(requires_grad=False)
    return _looped(DDP(whole))


class LowRank(nn.Module):
    """A frozen layer and two small ones beside it, as LoRA has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.b(self.a(x))


def _low_rank() -> nn.Module:
    whole = net().requires_grad_(requires_grad=False)
    torch.manual_seed(5)
    for block in whole.blocks:
        block.inner, block.outer = LowRank(block.inner), LowRank(block.outer)
    torch.manual_seed(10 + dist.get_rank())
    return whole


def ddp_low_rank(rank: int, world: int) -> Window:
    return _looped(DDP(_low_rank()))


def fsdp2_low_rank(rank: int, world: int) -> Window:
    model = _low_rank()
    fully_shard(model)
    return _looped(model)


class Tied(nn.Module):
    """A language model with one matrix at both ends, which returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Embedding(16, WIDTH)
        self.block = Block(0.0)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.enter.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.block(self.enter(ids)))
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return found


def _tied(wrap: Callable[[nn.Module], nn.Module]) -> Window:
    torch.manual_seed(0)
    model = wrap(Tied())
    optimizer = adam(model)

    def train() -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            ids = torch.randint(16, (3, 8), generator=generator)
            (model(ids, labels=ids)["loss"] / 2).backward()
        optimizer.step()

    return Window(model, train)


def ddp_tied_that_returns_its_loss(rank: int, world: int) -> Window:
    return _tied(DDP)


def fsdp2_tied(rank: int, world: int) -> Window:
    return _tied(fully_shard)


def fsdp1_tied(rank: int, world: int) -> Window:
    return _tied(lambda model: FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True))


def ddp_checkpointed(rank: int, world: int) -> Window:
    whole = net(0.2)
    apply_activation_checkpointing(whole, check_fn=lambda one: isinstance(one, Block))
    return _looped(DDP(whole))


def ddp_batch_norm(rank: int, world: int) -> Window:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)))
    return _looped(model)


def fsdp2(rank: int, world: int) -> Window:
    model = net()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return _looped(model)


def fsdp2_without_sync_between(rank: int, world: int) -> Window:
    model = net(0.1)
    fully_shard(model)
    optimizer = adam(model)

    def train() -> None:
        for at, batch in enumerate(micros(3)):
            model.set_requires_gradient_sync(at == 2)
            (loss_of(model, batch) / 3).backward()
        optimizer.step()

    return Window(model, train)


def fsdp2_bfloat16(rank: int, world: int) -> Window:
    model = net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return _looped(model)


def fsdp2_offloaded(rank: int, world: int) -> Window:
    model = net()
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return _looped(model)


def fsdp2_clipped(rank: int, world: int) -> Window:
    model = net()
    fully_shard(model)
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return Window(model, train)


def fsdp2_clipped_by_hand_over_all_parts(rank: int, world: int) -> Window:
    """Shards and a layer that is whole on every rank, by the norm of all of them."""
    model = net()
    whole = [*model.blocks[-1].parameters()]
    fully_shard(model, ignored_params=set(whole))
    optimizer = adam(model)

    def train() -> None:
        loss_of(model, next(micros(1))).backward()
        parts = [param.grad.to_local() for param in model.parameters() if isinstance(param.grad, DTensor)]
        for param in whole:
            assert param.grad is not None
            dist.all_reduce(param.grad)
            param.grad /= world
        square = torch.stack([part.square().sum() for part in parts]).sum()
        dist.all_reduce(square)
        grads = [param.grad for param in whole if param.grad is not None]
        norm = (square + sum(grad.square().sum() for grad in grads)).sqrt()
        for part in (*parts, *grads):
            part.mul_(0.1 / norm)
        optimizer.step()

    return Window(model, train)


def fsdp2_hybrid(rank: int, world: int) -> Window:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = net()
    fully_shard(model, mesh=mesh)
    return _looped(model)


def _fsdp1(**options: Any) -> FullyShardedDataParallel:
    return FullyShardedDataParallel(net(), device_id=CPU, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def fsdp1(rank: int, world: int) -> Window:
    return _looped(_fsdp1())


def fsdp1_original_params(rank: int, world: int) -> Window:
    return _looped(_fsdp1(use_orig_params=True))


def fsdp1_not_sharded(rank: int, world: int) -> Window:
    return _looped(_fsdp1(sharding_strategy=ShardingStrategy.NO_SHARD))


def fsdp1_bfloat16(rank: int, world: int) -> Window:
    return _looped(_fsdp1(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)))


def fsdp1_clipped(rank: int, world: int) -> Window:
    model = _fsdp1()
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2):
            (loss_of(model, batch) / 2).backward()
        model.clip_grad_norm_(0.1)
        optimizer.step()

    return Window(model, train)


TENSOR = {"inner": ColwiseParallel(), "outer": RowwiseParallel()}


def tensor_parallel(rank: int, world: int) -> Window:
    mesh = init_device_mesh("cpu", (world,))
    model = net()
    for block in model.blocks:
        parallelize_module(block, mesh, TENSOR)
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2, rank=0):
            (loss_of(model, batch) / 2).backward()
        optimizer.step()

    return Window(model, train)


class Sequence(nn.Module):
    """Tokens, whose places ranks share, and classes for each."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.up = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 16)
        self.down, self.last, self.head = nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.enter(ids))
        return self.head(self.last(x + self.down(self.up(x).relu())))


def _by_places(world: int, *, parallel_loss: bool) -> Window:
    """Norms over a part of the places each, whose gradients torch leaves partial."""
    model, rows = Sequence(), Shard(1)
    plan: dict[str, Any] = {
        "enter": RowwiseParallel(input_layouts=Replicate(), output_layouts=rows, use_local_output=False),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows, use_local_output=False),
        "last": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=rows,
            output_layouts=Shard(-1) if parallel_loss else Replicate(),
            use_local_output=not parallel_loss,
        ),
    }
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, foreach=False)

    def train() -> None:
        for at in range(2):
            ids = torch.randint(12, (4, 7), generator=torch.Generator().manual_seed(at))
            with loss_parallel() if parallel_loss else nullcontext():
                loss = nn.functional.cross_entropy(model(ids[:, :6]).flatten(0, 1), ids[:, 1:].flatten())
                (loss / 2).backward()
        optimizer.step()

    return Window(model, train)


def sequence_parallel(rank: int, world: int) -> Window:
    return _by_places(world, parallel_loss=False)


def sequence_parallel_with_a_parallel_loss(rank: int, world: int) -> Window:
    return _by_places(world, parallel_loss=True)


def tensor_parallel_in_fsdp2(rank: int, world: int) -> Window:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = net()
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], TENSOR)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(2, rank=rank // 2):
            (loss_of(model, batch) / 2).backward()
        optimizer.step()

    return Window(model, train)


def _prepared(cfg: pk.Config, dropout: float = 0.0) -> Window:
    """A window of prepkit's own loop."""
    model = net(dropout)
    ready = pk.apply(pk.build_plan(cfg, model))

    def train() -> None:
        for batch in micros(cfg.accumulation):
            ready.backward(loss_of(ready.model, batch))
            ready.step()

    return Window(ready.model, train)


def ddp_gan(rank: int, world: int) -> Window:
    """A generator and a critic, each with its optimizer; the critic's loss is given what the generator has made."""
    torch.manual_seed(0)
    maker, critic = DDP(nn.Linear(WIDTH, WIDTH)), DDP(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)))
    first, second = adam(critic), adam(maker)

    def train() -> None:
        for x, _ in micros(1):
            fake = maker(x)
            (critic(fake.detach()).mean() - critic(x).mean()).backward()
            first.step()
            first.zero_grad()
            (-critic(fake).mean()).backward()
            second.step()

    return Window(None, train)


def ddp_with_a_mask_of_infinity(rank: int, world: int) -> Window:
    torch.manual_seed(0)
    return _looped(DDP(Attends(-math.inf)))


def ddp_bfloat16_with_a_mask_of_the_lowest_number(rank: int, world: int) -> Window:
    torch.manual_seed(0)
    return _in_bfloat16(DDP(Attends(torch.finfo(torch.float32).min)))


def ddp_compiled(rank: int, world: int) -> Window:
    model = DDP(net())
    model.compile(backend="aot_eager")
    return _looped(model)


def fsdp2_compiled(rank: int, world: int) -> Window:
    model = net()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return _looped(fully_shard(model))


def ddp_peft(rank: int, world: int) -> Window:
    from peft import LoraConfig, get_peft_model

    return _looped(DDP(get_peft_model(net(), LoraConfig(r=2, target_modules=["inner", "outer"]))))  # type: ignore[arg-type]  # it takes any module


def ddp_averaged_weights(rank: int, world: int) -> Window:
    """A moving average beside the model, which nothing trains."""
    model = DDP(net())
    mean = torch.optim.swa_utils.AveragedModel(model)
    optimizer = adam(model)

    def train() -> None:
        loop(model, optimizer)
        mean.update_parameters(model)

    return Window(None, train)


def ddp_ragged_and_weighed_by_hand(rank: int, world: int) -> Window:
    """A sum over the tokens that count, divided by the tokens of all ranks and micro-batches."""
    model = DDP(net())
    optimizer = adam(model)

    def train() -> None:
        for x, y in micros(2):
            kept = torch.where(torch.arange(6) < (5 if rank == 0 else 2), y, -100)
            loss = nn.functional.cross_entropy(model(x), kept, reduction="sum")
            (loss * world / (2 * (5 + 2 * (world - 1)))).backward()
        optimizer.step()

    return Window(model, train)


def by_hand_weighed_by_samples(rank: int, world: int) -> Window:
    """Batches of unequal sizes, whose mean gradients are weighted by their samples: a mean over all samples."""
    model = net()
    optimizer = adam(model)

    def train() -> None:
        for x, _ in micros(1):
            part = x[: 2 + 3 * rank]
            model(part).square().mean().backward()
            samples = torch.tensor(float(len(part)))
            dist.all_reduce(whole := samples.clone())
            for param in model.parameters():
                assert param.grad is not None
                param.grad *= samples / whole
                dist.all_reduce(param.grad)
        optimizer.step()

    return Window(model, train)


def ddp_spectral_norm_called_between(rank: int, world: int) -> Window:
    """Each forward changes buffers that the next one uses, also one that nothing goes backward from."""
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    model = DDP(nn.Sequential(normed, nn.SiLU(), nn.Linear(WIDTH, 4)))
    optimizer = adam(model)

    def train() -> None:
        for batch in micros(3):
            with torch.no_grad():
                model(batch[0])
            (loss_of(model, batch) / 3).backward()
        optimizer.step()

    return Window(model, train)


ADAM = pk.optim.AdamW(lr=1e-2)


def prepkit_ddp(rank: int, world: int) -> Window:
    return _prepared(pk.Config(engine=pk.DDP(), optimizer=ADAM, accumulation=2, clip=pk.ClipNorm(0.1)), 0.1)


def prepkit_ddp_bfloat16(rank: int, world: int) -> Window:
    return _prepared(pk.Config(engine=pk.DDP(), optimizer=ADAM, accumulation=2, precision=pk.BF16()))


def prepkit_fsdp2(rank: int, world: int) -> Window:
    return _prepared(pk.Config(engine=pk.FSDP2(), optimizer=ADAM, accumulation=3, precision=pk.BF16()))


def prepkit_fsdp1(rank: int, world: int) -> Window:
    return _prepared(pk.Config(engine=pk.FSDP1(), optimizer=ADAM, accumulation=2))


@frozen
class Right:
    make: Callable[[int, int], Window]
    ranks: int = 2

    @property
    def id(self) -> str:
        return self.make.__name__


class Returns(nn.Module):
    """A model that casts what it returns, and returns more than the loss needs."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = net(), dtype

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out = self.inner(x)
        return out.to(self.dtype), {"mean": out.detach().mean(), "first": x[:2], "best": out.argmax(1)}


def _returning(model: nn.Module) -> Window:
    optimizer = adam(model)

    def train() -> None:
        for x, y in micros(3):
            (nn.functional.cross_entropy(model(x)[0].float(), y) / 3).backward()
        optimizer.step()

    return Window(model, train)


def ddp_of_a_model_that_casts_its_outputs(rank: int, world: int) -> Window:
    return _returning(DDP(Returns(torch.bfloat16)))


def fsdp2_in_bfloat16_of_a_model_that_returns_float32(rank: int, world: int) -> Window:
    model = Returns(torch.float32)
    low = torch.bfloat16
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32))
    return _returning(model)


RIGHT: tuple[Right, ...] = (
    *map(
        Right,
        (
            ddp,
            ddp_with_no_sync,
            ddp_with_dropout,
            ddp_with_fp16_hook,
            ddp_of_a_model_that_casts_its_outputs,
            fsdp2_in_bfloat16_of_a_model_that_returns_float32,
            ddp_clipped,
            ddp_float16_clipped,
            ddp_bfloat16,
            ddp_with_a_weighted_loss,
            ddp_with_a_summed_loss,
            ddp_two_groups_sgd,
            ddp_two_optimizers,
            ddp_frozen_body,
            ddp_low_rank,
            ddp_tied_that_returns_its_loss,
            ddp_checkpointed,
            ddp_batch_norm,
            ddp_spectral_norm_called_between,
            ddp_gan,
            ddp_with_a_mask_of_infinity,
            ddp_bfloat16_with_a_mask_of_the_lowest_number,
            ddp_compiled,
            ddp_peft,
            ddp_averaged_weights,
            ddp_ragged_and_weighed_by_hand,
            by_hand_weighed_by_samples,
            fsdp2_compiled,
            fsdp2,
            fsdp2_low_rank,
            fsdp2_tied,
            fsdp2_without_sync_between,
            fsdp2_bfloat16,
            fsdp2_offloaded,
            fsdp2_clipped,
            fsdp2_clipped_by_hand_over_all_parts,
            fsdp1,
            fsdp1_tied,
            fsdp1_original_params,
            fsdp1_not_sharded,
            fsdp1_bfloat16,
            fsdp1_clipped,
            tensor_parallel,
            sequence_parallel,
            sequence_parallel_with_a_parallel_loss,
            prepkit_ddp,
            prepkit_ddp_bfloat16,
            prepkit_fsdp2,
            prepkit_fsdp1,
        ),
    ),
    Right(fsdp2_hybrid, 4),
    Right(tensor_parallel_in_fsdp2, 4),
    Right(ddp_with_zero_redundancy),
)
