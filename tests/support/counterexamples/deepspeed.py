"""Configs with facts on which rules fire: DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve

from prepkit.config import BF16, FP8, FP16, MSAMP, ClipValue, Config, DeepSpeed, Mesh, Schedule
from prepkit.facts import SchedulerFacts
from prepkit.testing.tiny import tiny_experts, tiny_facts, tiny_model, tiny_optimizer
from tests.support.counterexamples.build import Counterexample, float8, param


def _deepspeed(json: str = "{}", *, stage: int | None = 2, world: int = 2, **more: Any) -> Counterexample:
    """ZeRO with this JSON; ``more`` are fields of the config, of the engine (``engine_...``) or of the facts."""
    facts = tiny_facts(world=world)
    cfg = Config(engine=DeepSpeed(stage=stage, config=json, micro_batch=4))
    for name, value in more.items():
        if name.startswith("engine_"):
            assert isinstance(cfg.engine, DeepSpeed), "it was made so above"
            changed: Any = {name.removeprefix("engine_"): value}
            cfg = evolve(cfg, engine=evolve(cfg.engine, **changed))
        elif name.startswith("env_"):
            environment: Any = {name.removeprefix("env_"): value}
            facts = evolve(facts, env=evolve(facts.env, **environment))
        elif name in ("model", "optimizer", "scheduler", "loaders"):
            other: Any = {name: value}
            facts = evolve(facts, **other)
        else:
            field: Any = {"optimizer" if name == "spec" else name: value}
            cfg = evolve(cfg, **field)
    return cfg, facts


_MSAMP = Config(precision=FP8(backend=MSAMP()))


COUNTEREXAMPLES: dict[str, Callable[[], Counterexample]] = {
    "deepspeed.not-json": lambda: _deepspeed('{"zero_optimization": {'),
    "deepspeed.removed-key": lambda: _deepspeed('{"zero_optimization": {"mics_shard_size": 8}}'),
    "deepspeed.unknown-key": lambda: _deepspeed('{"gradient_clipp1ng": 1.0}'),
    "deepspeed.wrong-type": lambda: _deepspeed('{"zero_optimization": {"reduce_bucket_size": 15099494.4}}'),
    "deepspeed.wrong-value": lambda: _deepspeed('{"zero_optimization": {"reduce_bucket_size": -5}}'),
    "deepspeed.no-stage": lambda: _deepspeed('{"gradient_clipping": 0.0}', stage=None),
    "deepspeed.stage": lambda: _deepspeed(stage=4),
    "deepspeed.two-places": lambda: _deepspeed('{"gradient_accumulation_steps": 10}'),
    "deepspeed.precision": lambda: _deepspeed('{"fp16": {"enabled": true}}'),
    "deepspeed.stored-16-bit": lambda: _deepspeed(model=tiny_model(dtype="bfloat16")),
    "deepspeed.packed": lambda: _deepspeed(
        model=tiny_model(extra=(param("norm.packed", "float32", requires_grad=False, cls="Params4bit"),)),
        precision=BF16(),
    ),
    "deepspeed.master-weights": lambda: _deepspeed(precision=BF16(master_weights=False)),
    "deepspeed.loss-scale": lambda: _deepspeed(precision=FP16(init_scale=1000.0), env_device="cuda"),
    "deepspeed.clip": lambda: _deepspeed(clip=ClipValue(1.0)),
    "deepspeed.max-grad-norm": lambda: _deepspeed(
        '{"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}', optimizer=None
    ),
    "deepspeed.batch": lambda: _deepspeed(
        '{"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}', world=7, engine_micro_batch=None
    ),
    "deepspeed.no-micro-batch": lambda: _deepspeed(engine_micro_batch=None),
    "deepspeed.hidden-size": lambda: _deepspeed('{"zero_optimization": {"reduce_bucket_size": "auto"}}'),
    "deepspeed.auto": lambda: _deepspeed('{"zero_optimization": {"stage3_max_live_parameters": "auto"}}'),
    "deepspeed.offload": lambda: _deepspeed(stage=2, engine_offload_param="cpu"),
    "deepspeed.offload-optimizer": lambda: _deepspeed(
        engine_offload_optimizer="cpu", optimizer=tiny_optimizer(tiny_model(), "SGD", "torch.optim.sgd")
    ),
    "deepspeed.tensor-parallel": lambda: _deepspeed('{"tensor_parallel": {"autotp_size": 4}}', world=6),
    "deepspeed.sequence-parallel": lambda: _deepspeed('{"sequence_parallel_size": 2}', world=4),
    "deepspeed.turned-off": lambda: _deepspeed('{"fp16": {"enabled": "auto"}, "gradient_clipping": "auto"}'),
    "deepspeed.stage-0-16-bit": lambda: _deepspeed(stage=0, precision=BF16()),
    "deepspeed.msamp": lambda: float8(evolve(_MSAMP, engine=DeepSpeed(stage=3, micro_batch=4)), world=2),
    "deepspeed.installed": lambda: _deepspeed(
        '{"tensor_parallel": {"autotp_size": 2}}', env_libraries=(("deepspeed", "0.15.4"),)
    ),
    "deepspeed.accelerator": lambda: _deepspeed(device="cpu", env_device="cuda"),
    "deepspeed.hpu-lazy": lambda: _deepspeed(engine_offload_optimizer="cpu", env_device="hpu"),
    "deepspeed.mesh": lambda: _deepspeed(mesh=Mesh(replicate=2)),
    "deepspeed.zero-init": lambda: _deepspeed(model=tiny_model(extra=(param("norm.bias", cls="ZeroParameter"),))),
    "deepspeed.scalar": lambda: _deepspeed(stage=3, model=tiny_model(extra=(param("norm.scale", shape=()),))),
    "deepspeed.leaf-modules": lambda: _deepspeed(stage=3, engine_leaf_modules=("Blok",)),
    "deepspeed.leaf-inputs": lambda: _deepspeed(
        stage=3, engine_leaf_modules=("Block",), model=tiny_model(frozen=("embed.weight",))
    ),
    "deepspeed.needs-optimizer": lambda: _deepspeed(optimizer=None),
    "deepspeed.two-optimizers": lambda: _deepspeed('{"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}'),
    "deepspeed.two-schedulers": lambda: _deepspeed(
        '{"scheduler": {"type": "WarmupLR", "params": {}}}',
        scheduler=SchedulerFacts(name="StepLR", drives_optimizer=True),
    ),
    "deepspeed.unknown-type": lambda: _deepspeed('{"optimizer": {"type": "AdamWW"}}', optimizer=None),
    "deepspeed.removed-type": lambda: _deepspeed('{"optimizer": {"type": "OneBitAdam"}}', optimizer=None),
    "deepspeed.missing-key": lambda: _deepspeed('{"scheduler": {"type": "WarmupDecayLR", "params": {}}}'),
    "deepspeed.schedule-alone": lambda: _deepspeed(engine_schedule=Schedule(warmup_steps=10)),
    "deepspeed.scheduler-ticks": lambda: _deepspeed(
        scheduler=SchedulerFacts(name="WarmupLR", drives_optimizer=True), scheduler_ticks=2
    ),
    "deepspeed.untested-optimizer": lambda: _deepspeed(
        '{"zero_allow_untested_optimizer": false}', optimizer=tiny_optimizer(tiny_model(), "SGD", "torch.optim.sgd")
    ),
    "deepspeed.optimizer-state": lambda: _deepspeed(
        optimizer=evolve(tiny_optimizer(tiny_model()), stateful=("norm.weight",))
    ),
    "deepspeed.adagrad": lambda: _deepspeed(
        optimizer=tiny_optimizer(tiny_model(), "Adagrad", "torch.optim.adagrad"),
        scheduler=SchedulerFacts(name="StepLR", drives_optimizer=True),
    ),
    "deepspeed.experts": lambda: _deepspeed(stage=3, model=tiny_experts()),
    "deepspeed.complex": lambda: _deepspeed(stage=1, model=tiny_model(dtype="complex64")),
}
"""Rule id to a config and facts on which the rule fires."""
