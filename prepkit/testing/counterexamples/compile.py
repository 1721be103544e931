"""Configs with facts on which rules fire: compilation, checkpointing and loaders."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from prepkit.config import (
    DDP,
    CheckpointBlocks,
    CompileModel,
    Config,
    KeepLoaders,
    ShardLoaders,
    TensorParallel,
    TPLayer,
    TPPlan,
)
from prepkit.facts import ArchitectureFacts
from prepkit.testing.counterexamples.build import env, loaded, of, ranks
from prepkit.testing.tiny import Counterexample, marked, tiny_facts, tiny_model

COUNTEREXAMPLES: dict[str, Callable[[], Counterexample]] = {
    "compile.unknown-mode": lambda: ranks(Config(compile=CompileModel(mode="max-autotun")), world=1),
    "compile.no-backend": lambda: ranks(Config(compile=CompileModel(backend="")), world=1),
    "compile.foreign-backend": lambda: ranks(Config(compile=CompileModel(backend="indctor")), world=1),
    "compile.dynamic-cut": lambda: ranks(
        Config(
            engine=TensorParallel(),
            tp_plan=TPPlan((TPLayer("norm", "replicate"),)),
            compile=CompileModel(dynamic=True),
        ),
        world=2,
    ),
    "compile.switched-off": lambda: env(Config(compile=CompileModel()), variables=(("TORCHDYNAMO_DISABLE", "1"),)),
    "checkpoint.cache": lambda: of(
        Config(checkpointing=CheckpointBlocks()),
        evolve(tiny_model(), architecture=ArchitectureFacts(use_cache=True)),
    ),
    "checkpoint.frozen-input": lambda: (
        Config(),
        tiny_facts(marked(tiny_model(frozen=("embed.weight",)), "reentrant", "layers.0")),
    ),
    "loaders.iterable": lambda: loaded(Config(engine=DDP()), iterable=True, length=None),
    "loaders.custom-batches": lambda: loaded(Config(engine=DDP()), custom_batches=True, batch_size=None),
    "loaders.custom-sampler": lambda: loaded(Config(engine=DDP()), sampler="custom"),
    "loaders.already-distributed": lambda: loaded(Config(engine=DDP()), sampler="distributed"),
    "loaders.no-batch": lambda: loaded(Config(engine=DDP(), loaders=ShardLoaders(drop_last=True)), length=1),
    "loaders.fewer-than-ranks": lambda: loaded(Config(engine=DDP()), length=1),
    "loaders.same-data": lambda: loaded(Config(engine=DDP(), loaders=KeepLoaders())),
}
"""Rule id to a config and facts on which the rule fires."""
