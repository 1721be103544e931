"""Errors of a second look: settings that nobody reads, hidden modules, frozen parts, adapters, samples."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler as rates
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, random_split

import prepkit as pk
from tests.audit.by_gradients import batch
from tests.audit.by_libraries import accelerator, llama
from tests.audit.case import WIDTH, Case, adam, divided, net, rows
from tests.audit.odd import Distilled
from tests.audit.odd_pairs import Buckets, EveryOther, Stream


def case(model: nn.Module, optimizer: Any = None, scheduler: Any = None, **given: Any) -> Case:
    return Case(model=model, optimizer=optimizer or adam(model), scheduler=scheduler, **given)


def parameter_misspelt(rank: int, world: int) -> Case:
    model: Any = net()
    model.enter.weight.require_grad = False
    return case(model)


def module_without_its_underscore(rank: int, world: int) -> Case:
    model: Any = net()
    model.blocks.requires_grad = False
    return case(model)


def group_misspelt(rank: int, world: int) -> Case:
    model = net()
    return case(model, torch.optim.AdamW([{"params": model.parameters(), "weigth_decay": 0.0}]))


def rate_on_the_optimizer(rank: int, world: int) -> Case:
    model = net()
    optimizer: Any = adam(model)
    optimizer.lr = 1e-5
    return case(model, optimizer)


def config_misspelt(rank: int, world: int) -> Case:
    model = llama()
    model.config.attention_dropuot = 0.1
    return case(model)


def epoch_misspelt(rank: int, world: int) -> Case:
    sampler: Any = DistributedSampler(rows(), num_replicas=1, rank=0)
    sampler.epochs = 3
    return case(net(), loaders=(DataLoader(rows(), batch_size=4, sampler=sampler),))


def layers_in_a_list(rank: int, world: int) -> Case:
    model: Any = net()
    model.more = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    return case(model)


def heads_in_a_dict(rank: int, world: int) -> Case:
    model: Any = net()
    model.heads = {"words": (nn.Linear(WIDTH, 2),)}
    return case(model)


def weights_in_a_tuple(rank: int, world: int) -> Case:
    model: Any = net()
    model.scales = (nn.Parameter(torch.ones(4)),)
    return case(model)


def gradients_off(rank: int, world: int) -> Case:
    def audit(*given: Any) -> Any:
        with torch.no_grad():
            return pk.audit(*given)

    return case(net(), audit=audit)


def launched_without_a_group(rank: int, world: int) -> Case:
    os.environ.update(RANK="0", WORLD_SIZE="2")
    return case(net())


def samples_in_one_order(rank: int, world: int) -> Case:
    return case(net(), loaders=(DataLoader(rows(), batch_size=4),))


def teacher_that_drops(rank: int, world: int) -> Case:
    return case(Distilled(hidden=False).train())


def norms_of_a_frozen_part(rank: int, world: int) -> Case:
    body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).requires_grad_(requires_grad=False)
    return case(nn.Sequential(body, nn.Linear(WIDTH, 4)))


def norms_of_the_first_of_equal_blocks(rank: int, world: int) -> Case:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)]
    blocks[0].requires_grad_(requires_grad=False)
    return case(nn.Sequential(*blocks))


def teacher_that_drops_and_is_held(rank: int, world: int) -> Case:
    model = Distilled(hidden=False).train()
    return case(model, [torch.optim.AdamW(model.parameters())])


def checkpoints_that_forget(rank: int, world: int) -> Case:
    model = net(dropout=0.1)
    model.blocks[0] = checkpoint_wrapper(model.blocks[0], preserve_rng_state=False)
    return case(model)


def norms_under_checkpoints(rank: int, world: int) -> Case:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    return case(nn.Sequential(checkpoint_wrapper(block), nn.Linear(WIDTH, 4)))


def softmax_before_cross_entropy(rank: int, world: int) -> Case:
    model: Any = nn.Sequential(nn.Linear(WIDTH, 4), nn.Softmax(-1))
    model.loss = nn.CrossEntropyLoss()
    return case(model)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"dropout": 0.1}
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.layer(x), self.config["dropout"], self.training)


def eval_of_a_number_in_the_config(rank: int, world: int) -> Case:
    return case(Functional().eval())


def ticked_before_the_first_step(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    scheduler = rates.CosineAnnealingLR(optimizer, 10)
    scheduler.step()
    return case(model, optimizer, scheduler)


def labels_shifted_twice(rank: int, world: int) -> Case:
    data = [{"input_ids": torch.arange(1, 9), "labels": torch.arange(2, 10)} for _ in range(8)]
    return case(llama(), loaders=(DataLoader(data, batch_size=2, shuffle=True),))  # type: ignore[arg-type]


def pads_without_a_mask(rank: int, world: int) -> Case:
    ids = torch.tensor([0, 0, 0, 5, 6, 7])
    data = [{"input_ids": ids, "labels": torch.where(ids == 0, -100, ids)} for _ in range(8)]
    return case(llama(pad_token_id=0), loaders=(DataLoader(data, batch_size=2, shuffle=True),))  # type: ignore[arg-type]


# --- peft ---


def lora(model: nn.Module | None = None, **given: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model or llama(), LoraConfig(target_modules=["q_proj"], **given)).train()  # type: ignore[arg-type]


def adapters_merged(rank: int, world: int) -> Case:
    model = lora()
    optimizer = adam(model)
    model.merge_adapter()
    return case(model, optimizer)


def adapters_disabled(rank: int, world: int) -> Case:
    model = lora()
    model.base_model.disable_adapter_layers()
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name)
    return case(model)


def adapters_scaled_by_zero(rank: int, world: int) -> Case:
    return case(lora(lora_alpha=0))


def base_unfrozen(rank: int, world: int) -> Case:
    model = lora()
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name or "q_proj" in name)
    return case(model)


def new_head_frozen(rank: int, world: int) -> Case:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0)
    return case(lora(LlamaForSequenceClassification(config)))


class Regresses(nn.Module):
    """A head of the program's own behind a model of transformers."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
        self.body = LlamaModel(LlamaConfig(**sizes, num_attention_heads=2, pad_token_id=0))
        self.says = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 1))


def head_beside_a_model_frozen(rank: int, world: int) -> Case:
    return case(lora(Regresses()))


# --- two ranks ---


def replicas_that_begin_unlike(rank: int, world: int) -> Case:
    model = net()
    model.head.weight.data += rank
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return case(fully_shard(model, mesh=mesh), loaders=(divided(rank, world),))


def ddp_inside_ddp(rank: int, world: int) -> Case:
    return case(DistributedDataParallel(nn.Sequential(DistributedDataParallel(net()), nn.Linear(4, 4))))


def sampler_over_parts(rank: int, world: int) -> Case:
    part, _ = random_split(rows(), [16, 16], torch.Generator().manual_seed(rank))
    sampler = DistributedSampler(part, num_replicas=world, rank=rank)
    return case(DistributedDataParallel(net()), loaders=(DataLoader(part, batch_size=4, sampler=sampler),))


def sampler_over_nodes(rank: int, world: int) -> Case:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    part = split_dataset_by_node(Dataset.from_dict({"x": list(range(32))}), rank, world)
    sampler = DistributedSampler(part, num_replicas=world, rank=rank)  # type: ignore[arg-type]
    loader: Any = DataLoader(part, batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    return case(DistributedDataParallel(net()), loaders=(loader,))


def sampler_under_accelerate(rank: int, world: int) -> Case:
    ours = accelerator()
    model = net()
    loader = DataLoader(rows(), batch_size=4, sampler=DistributedSampler(rows(), num_replicas=world, rank=rank))
    model, optimizer, loader = ours.prepare(model, adam(model), loader)
    return case(model, optimizer, loaders=(loader,))


def stream(rank: int, world: int, **given: Any) -> Case:
    """Of four shards, split by rank where the rank is not -1, and prepared by accelerate."""
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node

    data = Dataset.from_dict({"x": list(range(32))}).to_iterable_dataset(num_shards=4)
    data = data if rank < 0 else split_dataset_by_node(data, rank, world)
    model, ours = net(), accelerator(**given)
    model, optimizer, loader = ours.prepare(model, adam(model), DataLoader(data, batch_size=4))  # type: ignore[arg-type]
    return case(model, optimizer, loaders=(loader,))


def nodes_under_a_dispatcher(rank: int, world: int) -> Case:
    return stream(rank, world)


def nodes_under_accelerate(rank: int, world: int) -> Case:
    return stream(rank, world, dataloader_config=undispatched())


def undispatched() -> Any:
    from accelerate.utils import DataLoaderConfiguration

    return DataLoaderConfiguration(dispatch_batches=False)


def hook_that_averages_nothing(rank: int, world: int) -> Case:
    wrapped = DistributedDataParallel(net())

    def nothing(state, bucket):  # type: ignore[no-untyped-def]  # torch reads annotations
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    wrapped.register_comm_hook(None, nothing)
    wrapped(batch(rank)).square().sum().backward()
    return case(wrapped, at_step=True)


def raw_optimizer_under_accumulate(rank: int, world: int) -> Case:
    ours = accelerator(gradient_accumulation_steps=4)
    model = net()
    optimizer = adam(model)
    model = ours.prepare(model)
    with ours.accumulate(model):
        ours.backward(model(batch(rank)).square().sum())
    return case(model, optimizer, at_step=True)


def accumulation_never_used(rank: int, world: int) -> Case:
    ours = accelerator(gradient_accumulation_steps=4)
    model = net()
    model, optimizer = ours.prepare(model, adam(model))
    model.held = [ours.backward]
    ours.backward(model(batch(rank)).square().sum())
    return case(model, optimizer, at_step=True)


def buffers_of_frozen_norms(rank: int, world: int) -> Case:
    norm = nn.BatchNorm1d(WIDTH).requires_grad_(requires_grad=False).eval()
    wrapped = DistributedDataParallel(nn.Sequential(norm, net()), broadcast_buffers=False)
    norm.get_buffer("running_mean").fill_(float(rank))
    return case(wrapped, loaders=(divided(rank, world),))


def own_sampler_of_everything(rank: int, world: int) -> Case:
    loader = DataLoader(rows(), batch_size=4, sampler=EveryOther(0, 1))
    return case(DistributedDataParallel(net()), loaders=(loader,))


def with_replacement_alike(rank: int, world: int) -> Case:
    draws = RandomSampler(rows(), replacement=True, generator=torch.Generator().manual_seed(3))
    return case(DistributedDataParallel(net()), loaders=(DataLoader(rows(), batch_size=4, sampler=draws),))


class ByItsRank(IterableDataset[Any]):
    """Takes its part by what the process says of itself, in one of several words."""

    def __init__(self, word: str) -> None:
        self.word, self.rank, self.world_size = word, 0, 1

    def __iter__(self) -> Iterator[Any]:
        match self.word:
            case "variables":
                rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            case "attributes":
                rank, world = self.rank, self.world_size
            case "torch":
                rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
            case _:
                from accelerate import PartialState

                state = PartialState()
                rank, world = state.process_index, state.num_processes
        return islice(iter([(x, y) for x, y in rows(64)]), rank, None, world)


def stream_prepared(data: IterableDataset[Any], **given: Any) -> Case:
    model, ours = net(), accelerator(**given)
    model, optimizer, loader = ours.prepare(model, adam(model), DataLoader(data, batch_size=4))  # type: ignore[arg-type]
    return case(model, optimizer, loaders=(loader,))


def stream_by_its_rank_under_accelerate(rank: int, world: int) -> Case:
    data = ByItsRank("attributes")
    data.rank, data.world_size = rank, world
    return stream_prepared(data, dataloader_config=undispatched())


def stream_by_torch_under_accelerate(rank: int, world: int) -> Case:
    return stream_prepared(ByItsRank("torch"), dataloader_config=undispatched())


def stream_by_variables_under_accelerate(rank: int, world: int) -> Case:
    return stream_prepared(ByItsRank("variables"), dataloader_config=undispatched())


def stream_by_its_state_under_accelerate(rank: int, world: int) -> Case:
    return stream_prepared(ByItsRank("state"), dataloader_config=undispatched())


def stream_by_its_rank_under_a_dispatcher(rank: int, world: int) -> Case:
    return stream_prepared(ByItsRank("torch"))


def stream_that_nobody_divides(rank: int, world: int) -> Case:
    return case(DistributedDataParallel(net()), loaders=(DataLoader(Stream(0, 1), batch_size=4),))


def batches_of_rank_0(rank: int, world: int) -> Case:
    class First(Buckets):
        def __iter__(self) -> Any:
            return iter([[0, 1], [2, 3]])

    return case(DistributedDataParallel(net()), loaders=(DataLoader(rows(), batch_sampler=First()),))
