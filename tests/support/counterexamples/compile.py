"""Configs with facts on which rules fire: compilation, checkpointing and loaders."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from prepkit.config import (
    DDP,
    FSDP2,
    CheckpointBlocks,
    CompileModel,
    Config,
    EachLoader,
    KeepLoaders,
    ShardLoaders,
    TensorParallel,
    TPLayer,
    TPPlan,
)
from prepkit.facts import ArchitectureFacts
from prepkit.testing.tiny import marked, tiny_facts, tiny_loader, tiny_model, with_batchnorm
from tests.support.counterexamples.build import Counterexample, env, loaded, of, ranks

COUNTEREXAMPLES: dict[str, Callable[[], Counterexample]] = {
    "entry-points.unknown": lambda: of(
        Config(engine=FSDP2(), entry_points=("generat",)), evolve(tiny_model(), methods=("features", "generate"))
    ),
    "entry-points.left-out": lambda: of(
        Config(engine=FSDP2(), entry_points=("features",)), evolve(tiny_model(), methods=("features", "generate"))
    ),
    "compile.unknown-mode": lambda: ranks(Config(compile=CompileModel(mode="max-autotun")), world=1),
    "compile.no-backend": lambda: ranks(Config(compile=CompileModel(backend="")), world=1),
    "compile.foreign-backend": lambda: ranks(Config(compile=CompileModel(backend="indctor")), world=1),
    "compile.options": lambda: ranks(
        Config(compile=CompileModel(mode="max-autotune", options={"trace.enabled": True})), world=1
    ),
    "compile.unknown-option": lambda: env(Config(compile=CompileModel(options={"max_autotun": True})), torch="2.13.0"),
    "compile.recompile-limit": lambda: ranks(Config(compile=CompileModel(recompile_limit=0)), world=1),
    "compile.dynamic-cut": lambda: ranks(
        Config(
            engine=TensorParallel(),
            tp_plan=TPPlan((TPLayer("norm", "replicate"),)),
            compile=CompileModel(dynamic=True),
        ),
        world=2,
    ),
    "compile.switched-off": lambda: env(Config(compile=CompileModel()), variables=(("TORCHDYNAMO_DISABLE", "1"),)),
    "precision.casts-nothing": lambda: ranks(Config(engine=FSDP2(cast_forward_inputs=False))),
    "checkpoint.every": lambda: of(Config(checkpointing=CheckpointBlocks(every=4)), tiny_model()),
    "checkpoint.operator": lambda: of(Config(checkpointing=CheckpointBlocks(keep_ops=("mm",))), tiny_model()),
    "checkpoint.offload-compiled": lambda: env(
        Config(checkpointing=CheckpointBlocks(offload=True), compile=CompileModel())
    ),
    "checkpoint.offload-on-cpu": lambda: ranks(
        Config(checkpointing=CheckpointBlocks(offload=True), device="cpu"), world=1
    ),
    "checkpoint.kept-on-device": lambda: env(
        Config(checkpointing=CheckpointBlocks(offload=True, keep_ops=("aten.mm",)))
    ),
    "checkpoint.cache": lambda: of(
        Config(checkpointing=CheckpointBlocks()),
        evolve(tiny_model(), architecture=ArchitectureFacts(use_cache=True)),
    ),
    "checkpoint.frozen-input": lambda: (
        Config(),
        tiny_facts(marked(tiny_model(frozen=("embed.weight",)), "reentrant", "layers.0")),
    ),
    "loaders.count": lambda: loaded(Config(engine=DDP(), loaders=EachLoader((ShardLoaders(), KeepLoaders())))),
    "loaders.foreign": lambda: loaded(
        Config(engine=DDP()),
        name="list",
        foreign=True,
        sampler="custom",
        custom_batches=True,
        batch_size=None,
        length=None,
    ),
    "loaders.own-iteration": lambda: loaded(Config(engine=DDP()), name="Prefetcher", own_iteration=True),
    "loaders.out-of-order": lambda: loaded(Config(engine=DDP()), in_order=False, workers=2),
    "loaders.split-batches": lambda: loaded(
        Config(engine=DDP(), loaders=ShardLoaders(split_batches=True)), batch_size=5
    ),
    "loaders.already-distributed": lambda: loaded(Config(engine=DDP()), sampler="distributed"),
    "loaders.no-batch": lambda: loaded(Config(engine=DDP(), loaders=ShardLoaders(drop_last=True)), length=1),
    "loaders.last-round": lambda: (
        Config(engine=DDP()),
        tiny_facts(with_batchnorm(tiny_model()), world=2, loader=tiny_loader(length=66)),
    ),
    "loaders.fewer-than-ranks": lambda: loaded(Config(engine=DDP()), length=1),
    "loaders.same-data": lambda: loaded(Config(engine=DDP(), loaders=KeepLoaders())),
}
"""Rule id to a config and facts on which the rule fires."""
