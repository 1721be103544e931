"""Configs with facts on which rules fire: DDP and FSDP1."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from prepkit.config import BF16, DDP, FSDP1, CompileModel, CompressHook, Config, Mesh, PowerSGDHook
from prepkit.testing.tiny import marked, tiny_facts, tiny_model, tiny_optimizer, with_batchnorm
from tests.support.counterexamples.build import NAMES, Counterexample, grouped, param, ranks

_FLAT = FSDP1(use_orig_params=False)


COUNTEREXAMPLES: dict[str, Callable[[], Counterexample]] = {
    "fsdp1.mesh": lambda: ranks(Config(engine=FSDP1(sharding="HYBRID_SHARD"), mesh=Mesh(replicate=8, shard=1))),
    "ddp.bucket-size": lambda: ranks(Config(engine=DDP(bucket_cap_mb=0.0))),
    "ddp.compiled-bucket": lambda: ranks(Config(engine=DDP(bucket_cap_mb=0.5), compile=CompileModel())),
    "ddp.unused-in-static-graph": lambda: ranks(Config(engine=DDP(static_graph=True, find_unused_parameters=True))),
    "ddp.reentrant-unused": lambda: ranks(
        Config(engine=DDP(find_unused_parameters=True)), model=marked(tiny_model(), "reentrant", "layers.0")
    ),
    "ddp.hook-dtype": lambda: ranks(Config(engine=DDP(hook=CompressHook(dtype="bfloat16")))),
    "ddp.powersgd": lambda: ranks(Config(engine=DDP(hook=PowerSGDHook(start_iter=1)))),
    "ddp.sync-batchnorm-on-cpu": lambda: ranks(
        Config(engine=DDP(sync_batchnorm=True)), model=with_batchnorm(tiny_model())
    ),
    "ddp.sync-batchnorm-loses": lambda: (
        Config(engine=DDP(sync_batchnorm=True)),
        tiny_facts(with_batchnorm(tiny_model(extra=(param("norm.shift"),))), world=8, device="cuda"),
    ),
    "ddp.no-batchnorm": lambda: ranks(Config(engine=DDP(sync_batchnorm=True))),
    "fsdp1.mixed-requires-grad": lambda: (
        Config(engine=_FLAT),
        tiny_facts(tiny_model(frozen=("layers.0.attn.weight", "layers.1.attn.weight")), world=8),
    ),
    "fsdp1.unit-in-two-groups": lambda: ranks(
        Config(engine=_FLAT), optimizer=grouped(NAMES[:2] + NAMES[3:], NAMES[2:3])
    ),
    "fsdp1.partial-state": lambda: ranks(
        Config(engine=_FLAT), optimizer=evolve(tiny_optimizer(tiny_model()), stateful=("layers.0.attn.weight",))
    ),
    "fsdp1.compiled-flat": lambda: ranks(Config(engine=_FLAT, compile=CompileModel())),
    "fsdp1.shaped-optimizer": lambda: ranks(
        Config(engine=FSDP1()), optimizer=tiny_optimizer(tiny_model(), "Muon", "torch.optim._muon")
    ),
    "units.ignored-not-found": lambda: ranks(Config(engine=FSDP1(ignored=("layer.*", "heads")))),
    "fsdp1.ignored-trains": lambda: ranks(Config(engine=FSDP1(ignored=("layers.*",)))),
    "fsdp1.sync-on-cpu": lambda: ranks(Config(engine=FSDP1(sync_module_states=True))),
    "fsdp1.offload-on-cpu": lambda: ranks(Config(engine=FSDP1(offload=True))),
    "fsdp1.buffer-dtype-ignored": lambda: ranks(Config(engine=FSDP1(buffer_dtype="bfloat16"))),
    "units.ignored-dtype": lambda: (
        Config(engine=FSDP1(ignored=("head",)), precision=BF16()),
        tiny_facts(tiny_model(frozen=("head.weight",)), world=8),
    ),
    "fsdp1.frozen-gradients": lambda: (
        Config(engine=FSDP1()),
        tiny_facts(tiny_model(frozen=("layers.0.mlp.weight", "layers.1.mlp.weight")), world=8),
    ),
    "fsdp1.tied-gradients": lambda: (
        Config(engine=FSDP1(sharding="NO_SHARD"), precision=BF16(), accumulation=2),
        tiny_facts(tiny_model(tied=True), world=8),
    ),
    "fsdp1.no-shard": lambda: ranks(Config(engine=FSDP1(sharding="NO_SHARD"))),
}
"""Rule id to a config and facts on which the rule fires."""
