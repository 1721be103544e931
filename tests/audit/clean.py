"""Programs with nothing wrong, prepared as the libraries' own guides do it: an audit finds nothing above a note."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import lr_scheduler as rates
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from tests.audit.by_gradients import averaged_by_hand
from tests.audit.by_habit import ByItsRank, stream, stream_prepared, undispatched
from tests.audit.by_libraries import accelerator, engine_of, llama
from tests.audit.by_sharding import CPU, cut, flattened, sharded
from tests.audit.case import WIDTH, Block, Case, adam, divided, net, rows
from tests.audit.odd import ODD_LIBRARIES, ODD_ONE
from tests.audit.odd_pairs import ODD_TWO, ODD_TWO_LIBRARIES


@frozen
class CleanProgram:
    """One program, the library that prepares it, and on how many ranks."""

    make: Callable[[int, int], Case]
    library: str
    ranks: int

    @property
    def id(self) -> str:
        return f"clean_{self.make.__name__}"


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def trained(model: nn.Module, rank: int, world: int) -> Case:
    return Case(model=model, optimizer=adam(model), loaders=(divided(rank, world),))


# --- torch, one process ---


def alone(rank: int, world: int) -> Case:
    model = net(dropout=0.1)
    return Case(model=model, optimizer=adam(model), loaders=(DataLoader(rows(), batch_size=4, shuffle=True),))


def alone_with_a_schedule(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=16)
    return Case(model=model, optimizer=optimizer, scheduler=scheduler, loaders=(DataLoader(rows(), batch_size=4),))


def alone_with_warm_up_from_zero(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    return Case(model=model, optimizer=optimizer, scheduler=scheduler)


def ticked_after(steps: int, ticks: int, scheduler: Any, model: nn.Module) -> Case:
    optimizer = scheduler.optimizer
    for _ in range(steps):
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
    for at in range(ticks):
        scheduler.step(*([at / ticks] if isinstance(scheduler, rates.CosineAnnealingWarmRestarts) else []))
    return Case(model=model, optimizer=optimizer, scheduler=scheduler)


def ticked_behind_steps_that_a_scaler_refused(rank: int, world: int) -> Case:
    model = net()
    return ticked_after(2, 12, rates.CosineAnnealingLR(adam(model), 100), model)


def ticked_by_the_part_of_an_epoch(rank: int, world: int) -> Case:
    model = net()
    return ticked_after(4, 40, rates.CosineAnnealingWarmRestarts(adam(model), 100), model)


def compiled(rank: int, world: int) -> Case:
    model = net()
    model.compile()
    return Case(model=model, optimizer=adam(model))


def compiled_around(rank: int, world: int) -> Case:
    model = torch.compile(net())
    assert isinstance(model, nn.Module)
    return Case(model=model, optimizer=adam(model))


def checkpointed(rank: int, world: int) -> Case:
    model = net(dropout=0.1)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return Case(model=model, optimizer=adam(model))


def frozen_body(rank: int, world: int) -> Case:
    model = net()
    model.blocks.requires_grad_(requires_grad=False).eval()
    return Case(model=model, optimizer=adam(model))


def two_optimizers(rank: int, world: int) -> Case:
    model = net()
    head = {id(param) for param in model.head.parameters()}
    body = [param for param in model.parameters() if id(param) not in head]
    return Case(model=model, optimizer=[torch.optim.AdamW(body), torch.optim.SGD(model.head.parameters(), lr=0.1)])


def frozen_in_low_precision(rank: int, world: int) -> Case:
    model = net()
    model.blocks.requires_grad_(requires_grad=False).bfloat16()
    return Case(model=model, optimizer=adam(model))


def loss_with_a_weight_of_its_own(rank: int, world: int) -> Case:
    model = net()
    temperature = nn.Parameter(torch.ones(()))
    return Case(model=model, optimizer=torch.optim.AdamW([*model.parameters(), temperature]))


# --- torch, two processes ---


def plain_ddp(rank: int, world: int) -> Case:
    return trained(ddp(net(dropout=0.1)), rank, world)


def ddp_frozen_first(rank: int, world: int) -> Case:
    model = net()
    model.blocks.requires_grad_(requires_grad=False)
    return trained(ddp(model), rank, world)


def ddp_of_a_subset(rank: int, world: int) -> Case:
    model = ddp(net())
    mine = Subset(rows(), range(rank, 32, world))
    return Case(model=model, optimizer=adam(model), loaders=(DataLoader(mine, batch_size=4, shuffle=True),))


def ddp_of_rows_of_its_own(rank: int, world: int) -> Case:
    model, order = ddp(net()), torch.randperm(32, generator=torch.Generator().manual_seed(1))[rank::world]
    mine = TensorDataset(*(one[order] for one in rows().tensors))
    return Case(model=model, optimizer=adam(model), loaders=(DataLoader(mine, batch_size=4, shuffle=True),))


def ddp_with_batch_norm(rank: int, world: int) -> Case:
    model = nn.Sequential(net(), nn.BatchNorm1d(4))
    return trained(ddp(nn.SyncBatchNorm.convert_sync_batchnorm(model) if rank < 0 else model), rank, world)


def ddp_compiled(rank: int, world: int) -> Case:
    model = torch.compile(ddp(net()))
    assert isinstance(model, nn.Module)
    return trained(model, rank, world)


def ddp_checkpointed(rank: int, world: int) -> Case:
    model = net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return trained(ddp(model), rank, world)


def fsdp1(rank: int, world: int) -> Case:
    return trained(flattened(net(dropout=0.1)), rank, world)


def fsdp1_flat(rank: int, world: int) -> Case:
    return trained(flattened(net(), use_orig_params=False), rank, world)


def fsdp1_mixed(rank: int, world: int) -> Case:
    model = FullyShardedDataParallel(
        net(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        device_id=CPU,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
    )
    return trained(model, rank, world)


def fsdp1_checkpointed(rank: int, world: int) -> Case:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = flattened(net())
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return trained(model, rank, world)


def fsdp2(rank: int, world: int) -> Case:
    return trained(sharded(net(dropout=0.1)), rank, world)


def fsdp2_mixed(rank: int, world: int) -> Case:
    model = net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return trained(fully_shard(model, mp_policy=policy), rank, world)


def fsdp2_hybrid(rank: int, world: int) -> Case:
    model = net()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return trained(fully_shard(model, mesh=mesh), rank, world)


def fsdp2_checkpointed_and_compiled(rank: int, world: int) -> Case:
    model = net()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
        model.blocks[index].compile()
        fully_shard(model.blocks[index])
    return trained(fully_shard(model), rank, world)


def tensor_parallel(rank: int, world: int) -> Case:
    model = cut(net(dropout=0.1))
    torch.manual_seed(3)
    return Case(model=model, optimizer=adam(model), loaders=(divided(0, 1),))


# --- accelerate ---


def accelerated(rank: int, world: int) -> Case:
    ours = accelerator()
    model = net()
    optimizer = adam(model)
    loader = DataLoader(rows(), batch_size=4, shuffle=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))
    model, optimizer, loader, scheduler = ours.prepare(model, optimizer, loader, scheduler)
    return Case(model=model, optimizer=optimizer, scheduler=scheduler, loaders=(loader,))


def accelerated_mixed(rank: int, world: int) -> Case:
    ours = accelerator(mixed_precision="bf16")
    model = net()
    model, optimizer, loader = ours.prepare(model, adam(model), DataLoader(rows(), batch_size=4))
    return Case(model=model, optimizer=optimizer, loaders=(loader,))


def accelerated_accumulation(rank: int, world: int) -> Case:
    ours = accelerator(gradient_accumulation_steps=2)
    model = net()
    model, optimizer, loader = ours.prepare(model, adam(model), DataLoader(rows(), batch_size=4))
    return Case(model=model, optimizer=optimizer, loaders=(loader,))


def accelerated_llama(rank: int, world: int) -> Case:
    ours = accelerator()
    model = llama()
    model, optimizer, loader = ours.prepare(model, adam(model), DataLoader(rows(), batch_size=4))
    return Case(model=model, optimizer=optimizer, loaders=(loader,))


def stream_dispatched(rank: int, world: int) -> Case:
    return stream(-1, world)


class Drawn(IterableDataset[Any]):
    """Samples without an end, of a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield torch.randn(WIDTH, generator=generator), 0


class InOrder(IterableDataset[Any]):
    """The same samples on every rank, in one order that is drawn."""

    def __iter__(self) -> Iterator[Any]:
        data = rows(64)
        return iter([data[at] for at in torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()])


def stream_drawn_by_rank_under_accelerate(rank: int, world: int) -> Case:
    return stream_prepared(Drawn(rank), dataloader_config=undispatched())


def stream_drawn_by_rank_under_a_dispatcher(rank: int, world: int) -> Case:
    return stream_prepared(Drawn(rank))


def stream_in_one_order_under_accelerate(rank: int, world: int) -> Case:
    return stream_prepared(InOrder(), dataloader_config=undispatched())


def stream_that_divides_itself_beside_accelerate(rank: int, world: int) -> Case:
    """Its loader is not given to accelerate."""
    model, ours = net(), accelerator()
    model, optimizer = ours.prepare(model, adam(model))
    return Case(model=model, optimizer=optimizer, loaders=(DataLoader(ByItsRank("torch"), batch_size=4),))


def stream_divided_by_accelerate(rank: int, world: int) -> Case:
    return stream(-1, world, dataloader_config=undispatched())


# --- transformers and peft ---


def tied_llama(rank: int, world: int) -> Case:
    model = llama(tie_word_embeddings=True)
    return Case(model=model, optimizer=adam(model))


def checkpointed_llama(rank: int, world: int) -> Case:
    model = llama(use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return Case(model=model, optimizer=adam(model))


def llama_under_ddp(rank: int, world: int) -> Case:
    return trained(ddp(llama(tie_word_embeddings=True)), rank, world)


def llama_under_fsdp2(rank: int, world: int) -> Case:
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    return trained(fully_shard(model), rank, world)


def lora(rank: int, world: int) -> Case:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)).train()
    return Case(model=model, optimizer=adam(model))


def lora_checkpointed(rank: int, world: int) -> Case:
    from peft import LoraConfig, get_peft_model

    model = llama(use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"])).train()
    return Case(model=model, optimizer=adam(model))


def lora_under_ddp(rank: int, world: int) -> Case:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"])).train()
    return trained(ddp(model), rank, world)


def trainer(rank: int, world: int) -> Case:
    import tempfile

    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[], per_device_train_batch_size=2)
        ours = Trainer(model=llama(), args=arguments, train_dataset=data)
    ours.create_optimizer_and_scheduler(num_training_steps=24)
    return Case(
        model=ours.model.train(),
        optimizer=ours.optimizer,
        scheduler=ours.lr_scheduler,
        loaders=(ours.get_train_dataloader(),),
    )


# --- DeepSpeed ---


def zero(stage: int, rank: int, world: int) -> Case:
    model = net()
    engine, optimizer, *_ = engine_of(model, stage, optimizer=adam(model))
    return Case(model=engine, optimizer=optimizer, loaders=(divided(rank, world),))


def zero_0(rank: int, world: int) -> Case:
    return zero(0, rank, world)


def zero_1(rank: int, world: int) -> Case:
    return zero(1, rank, world)


def zero_2(rank: int, world: int) -> Case:
    return zero(2, rank, world)


def zero_3(rank: int, world: int) -> Case:
    return zero(3, rank, world)


def zero_1_bfloat16(rank: int, world: int) -> Case:
    model = net()
    engine, optimizer, *_ = engine_of(model, 1, optimizer=adam(model), config={"bf16": {"enabled": True}})
    return Case(model=engine, optimizer=optimizer, loaders=(divided(rank, world),))


def zero_1_with_its_scheduler(rank: int, world: int) -> Case:
    model = net()
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    engine, optimizer, _, scheduler = engine_of(model, 1, optimizer=adam(model), config={"scheduler": schedule})
    return Case(model=engine, optimizer=optimizer, scheduler=scheduler, loaders=(divided(rank, world),))


def narrow(rank: int, world: int) -> Case:
    model = nn.Linear(WIDTH, 2)
    return Case(model=model, optimizer=adam(model))


_ONE = (
    *(alone, alone_with_a_schedule, alone_with_warm_up_from_zero, compiled, compiled_around, checkpointed, frozen_body),
    *(ticked_behind_steps_that_a_scaler_refused, ticked_by_the_part_of_an_epoch),
    *(two_optimizers, frozen_in_low_precision, loss_with_a_weight_of_its_own, narrow),
)
_TWO = (
    *(
        plain_ddp,
        ddp_frozen_first,
        ddp_of_a_subset,
        ddp_of_rows_of_its_own,
        ddp_with_batch_norm,
        ddp_compiled,
        ddp_checkpointed,
    ),
    *(fsdp1, fsdp1_flat, fsdp1_mixed, fsdp1_checkpointed),
    *(fsdp2, fsdp2_mixed, fsdp2_hybrid, fsdp2_checkpointed_and_compiled, tensor_parallel),
)

CLEAN: tuple[CleanProgram, ...] = (
    *(CleanProgram(make, "torch", 1) for make in _ONE),
    *(CleanProgram(make, "torch", 2) for make in _TWO),
    CleanProgram(averaged_by_hand, "torch", 2),
    *(
        CleanProgram(make, "accelerate", 2)
        for make in (accelerated, accelerated_mixed, accelerated_accumulation, accelerated_llama)
    ),
    *(
        CleanProgram(make, "accelerate", 2)
        for make in (
            *(stream_drawn_by_rank_under_accelerate, stream_drawn_by_rank_under_a_dispatcher),
            *(stream_in_one_order_under_accelerate, stream_that_divides_itself_beside_accelerate),
        )
    ),
    *(CleanProgram(make, "datasets", 2) for make in (stream_dispatched, stream_divided_by_accelerate)),
    *(CleanProgram(make, "transformers", 1) for make in (tied_llama, checkpointed_llama, trainer)),
    *(CleanProgram(make, "transformers", 2) for make in (llama_under_ddp, llama_under_fsdp2)),
    *(CleanProgram(make, "peft", 1) for make in (lora, lora_checkpointed)),
    CleanProgram(lora_under_ddp, "peft", 2),
    *(
        CleanProgram(make, "deepspeed", 2)
        for make in (zero_0, zero_1, zero_2, zero_3, zero_1_bfloat16, zero_1_with_its_scheduler)
    ),
    *(CleanProgram(make, "torch", 1) for make in ODD_ONE),
    *(CleanProgram(make, library, 1) for make, library in ODD_LIBRARIES),
    *(CleanProgram(make, "torch", 2) for make in ODD_TWO),
    *(CleanProgram(make, library, 2) for make, library in ODD_TWO_LIBRARIES),
)
"""Every one, with its library and how many ranks it runs on."""
