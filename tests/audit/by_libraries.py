"""Errors that people make with accelerate, transformers, peft and DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.audit.case import Case, adam, net, rows


def accelerator(**given: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=True, **given)


def llama(**given: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, **given)
    return LlamaForCausalLM(config).train()


# --- accelerate ---


def scheduler_for_prepared_batches(rank: int, world: int) -> Case:
    ours = accelerator()
    model = net()
    optimizer = adam(model)
    model, optimizer, loader = ours.prepare(model, optimizer, DataLoader(rows(), batch_size=4, shuffle=True))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, 3 * len(loader))
    return Case(model=model, optimizer=optimizer, scheduler=ours.prepare(scheduler), loaders=(loader,))


def model_not_prepared(rank: int, world: int) -> Case:
    ours = accelerator()
    model = net()
    optimizer, loader = ours.prepare(adam(model), DataLoader(rows(), batch_size=4))
    return Case(model=model, optimizer=optimizer, loaders=(loader,))


def loader_not_prepared(rank: int, world: int) -> Case:
    ours = accelerator()
    model = net()
    model, optimizer = ours.prepare(model, adam(model))
    return Case(model=model, optimizer=optimizer, loaders=(DataLoader(rows(), batch_size=4),))


def prepared_by_two_accelerators(rank: int, world: int) -> Case:
    first = accelerator().prepare(net())
    vars(first).pop("_is_accelerate_prepared", None)
    wrapped = nn.parallel.DistributedDataParallel(first)
    return Case(model=wrapped, optimizer=adam(wrapped))


def scheduler_of_an_optimizer_never_prepared(rank: int, world: int) -> Case:
    ours = accelerator()
    model = net()
    other = adam(model)
    model, optimizer, scheduler = ours.prepare(
        model, adam(model), torch.optim.lr_scheduler.CosineAnnealingLR(other, 10)
    )
    return Case(model=model, optimizer=optimizer, scheduler=scheduler)


# --- transformers and peft ---


def tie_that_broke(rank: int, world: int) -> Case:
    model = llama(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return Case(model=model, optimizer=adam(model))


def adapter_loaded_for_inference(rank: int, world: int) -> Case:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], inference_mode=True)
    model = get_peft_model(llama(), config).train()
    return Case(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3))


def lora_under_reentrant_checkpoints(rank: int, world: int) -> Case:
    from peft import LoraConfig, get_peft_model

    model = llama(use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"])).train()
    for hook in [*getattr(model.base_model.model, "_require_grads_hooks", ())]:
        hook.remove()
    model.base_model.model.disable_input_require_grads()
    return Case(model=model, optimizer=adam(model))


def trainer_given_another_models_optimizer(rank: int, world: int) -> Case:
    import tempfile

    from transformers import Trainer, TrainingArguments

    optimizer = adam(llama())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, use_cpu=True, report_to=[])
        trainer = Trainer(model=llama(), args=arguments, optimizers=(optimizer, None))
    return Case(model=trainer.model, optimizer=trainer.optimizer)


# --- DeepSpeed ---


def engine_of(model: nn.Module, stage: int, **given: Any) -> Any:
    from tests.support.deepspeed_cpu import lean

    lean()
    import deepspeed
    from deepspeed.utils import groups

    for name in [name for name in vars(groups) if name.startswith("_") and name.endswith("_GROUP")]:
        setattr(groups, name, None)  # of a default group that has ended
    groups.mpu = None  # as AutoTP leaves it
    deepspeed.comm.comm.cdb = None
    section = given.pop("config", {})
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        **section,
    }
    return deepspeed.initialize(model=model, config=config, **given)


def two_schedulers(rank: int, world: int) -> Case:
    model = net()
    optimizer = adam(model)
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    engine, optimizer, *_ = engine_of(model, 1, optimizer=optimizer, config={"scheduler": schedule})
    ours = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer.optimizer, 10)
    return Case(model=engine, optimizer=optimizer, scheduler=ours)


def loader_of_another_batch_size(rank: int, world: int) -> Case:
    from tests.audit.case import divided

    model = net()
    engine, optimizer, *_ = engine_of(model, 1, optimizer=adam(model))
    return Case(model=engine, optimizer=optimizer, loaders=(divided(rank, world, batch=8),))


def stepped_past_the_engine(rank: int, world: int) -> Case:
    model = net()
    engine, *_ = engine_of(model, 1, optimizer=adam(model))
    return Case(model=engine, optimizer=torch.optim.SGD(engine.module.parameters(), lr=0.1))


def two_who_accumulate(rank: int, world: int) -> Case:
    loader = accelerator(gradient_accumulation_steps=4).prepare(DataLoader(rows(), batch_size=4))
    model = net()
    engine, optimizer, *_ = engine_of(model, 1, optimizer=adam(model))
    return Case(model=engine, optimizer=optimizer, loaders=(loader,))
