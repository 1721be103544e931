"""Configs with facts on which rules fire: the optimizer, the precision and single values."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from prepkit.config import BF16, DDP, FP16, FSDP2, SGD, AdamW, ClipNorm, ClipValue, Config, DeepSpeed, Intent
from prepkit.facts import GroupFact, SchedulerFacts
from prepkit.testing.tiny import tiny_facts, tiny_model, tiny_optimizer
from tests.support.counterexamples.build import NAMES, WHOLE, Counterexample, env, of, optimized, ranks

COUNTEREXAMPLES: dict[str, Callable[[], Counterexample]] = {
    "optimizer.foreign-parameters": lambda: optimized(Config(), groups=(GroupFact(slots=(None, None, *NAMES)),)),
    "optimizer.held-twice": lambda: optimized(Config(), groups=(WHOLE, GroupFact(slots=("norm.weight",)))),
    "optimizer.two": lambda: optimized(Config(optimizer=AdamW())),
    "optimizer.for-inference": lambda: optimized(Config(intent=Intent.INFERENCE)),
    "optimizer.keeps-own-list": lambda: optimized(Config(engine=FSDP2()), name="LBFGS", keeps_own_list=True),
    "optimizer.unfinished": lambda: optimized(Config(), name="Lookahead", unfinished=("Lookahead",)),
    "optimizer.cannot-shard": lambda: optimized(
        Config(engine=FSDP2()), name="PagedAdamW8bit", module="bitsandbytes.optim.adamw"
    ),
    "scheduler.other-optimizer": lambda: ranks(
        Config(), world=1, scheduler=SchedulerFacts(name="StepLR", drives_optimizer=False)
    ),
    "scheduler.without-optimizer": lambda: ranks(
        Config(optimizer=SGD()), 1, optimizer=None, scheduler=SchedulerFacts(name="StepLR", drives_optimizer=False)
    ),
    "optimizer.none": lambda: ranks(Config(), world=1, optimizer=None),
    "optimizer.misses-parameters": lambda: optimized(Config(), groups=(GroupFact(slots=NAMES[1:]),)),
    "optimizer.frozen-parameters": lambda: (
        Config(),
        evolve(tiny_facts(tiny_model(frozen=NAMES[:1])), optimizer=tiny_optimizer(tiny_model())),
    ),
    "precision.bf16-unsupported": lambda: env(Config(precision=BF16()), device="cuda", capability=(7, 0)),
    "precision.fp16-unsupported": lambda: env(Config(precision=FP16())),
    "precision.fp16-trains-fp16": lambda: (
        Config(precision=FP16(master_weights=False)),
        tiny_facts(tiny_model(dtype="float16"), device="cuda"),
    ),
    "precision.loss-scale": lambda: env(Config(precision=FP16(growth_factor=1.0)), device="cuda"),
    "precision.float16": lambda: ranks(Config(engine=FSDP2(), precision=BF16(reduce_dtype="float16"))),
    "precision.reduce-dtype-ignored": lambda: ranks(Config(engine=DDP(), precision=BF16(reduce_dtype="bfloat16"))),
    "precision.steps-in-16-bit": lambda: of(Config(), tiny_model(dtype="bfloat16")),
    "precision.no-master-weights": lambda: of(
        Config(precision=BF16(master_weights=False)), tiny_model(dtype="bfloat16")
    ),
    "scheduler.factory": lambda: ranks(
        Config(), world=1, scheduler=SchedulerFacts(name="halving", drives_optimizer=False, factory=True)
    ),
    "values.average-each": lambda: ranks(Config(engine=DeepSpeed(stage=1, micro_batch=1), average_each=True)),
    "values.accumulation": lambda: ranks(Config(accumulation=0), world=1),
    "values.global-batch": lambda: ranks(Config(global_batch=0), world=1),
    "values.clip": lambda: ranks(Config(clip=ClipValue(-1.0)), world=1),
    "values.norm-type": lambda: ranks(Config(clip=ClipNorm(1.0, norm_type=0.0)), world=1),
    "values.scheduler-ticks": lambda: ranks(Config(scheduler_ticks=-1), world=1),
    "values.total-steps": lambda: ranks(Config(total_steps=0), world=1),
    "values.timeout": lambda: ranks(Config(timeout_s=0.0), world=1),
    "values.optimizer": lambda: ranks(Config(optimizer=AdamW(betas=(0.9, 1.0))), world=1, optimizer=None),
    "values.nesterov": lambda: ranks(Config(optimizer=SGD(nesterov=True)), world=1, optimizer=None),
    "environment.torch-unknown": lambda: env(Config(engine=FSDP2()), torch=""),
    "overrides.unknown": lambda: ranks(Config(overrides=("mesh.single-many-rank",)), world=1),
}
"""Rule id to a config and facts on which the rule fires."""
