"""Configs with facts on which rules fire: the environment, the mesh and the model that arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve

from prepkit.config import BF16, DDP, FSDP2, CheckpointBlocks, CompileModel, Config, Mesh, OffloadToCPU
from prepkit.facts import ModelFacts, UnitFact
from prepkit.testing.tiny import arrived, marked, tiny_facts, tiny_model
from tests.support.counterexamples.build import NAMES, Counterexample, env, of, param, ranks


def _quantised(cfg: Config, *places: str, bitsandbytes: str = "0.50.2", **changes: Any) -> Counterexample:
    """A 4-bit model whose map has these devices."""
    device_map = tuple((path, device) for path, device in zip(("embed", "layers"), places, strict=False))
    usual = tiny_facts(evolve(tiny_model(), quantised="4bit", device_map=device_map), device="cuda")
    return cfg, evolve(usual, env=evolve(usual.env, libraries=(("bitsandbytes", bitsandbytes),), **changes))


def _arrived(engine: FSDP2, model: ModelFacts, **changes: Any) -> Counterexample:
    """A model that is sharded already, on two ranks."""
    return Config(engine=engine, **changes), tiny_facts(model, world=2)


def _sharded(ranks: int = 2, copies: int = 1) -> ModelFacts:
    """The tiny model, cut into its blocks and the root."""
    root = UnitFact(path="", ranks=ranks, copies=copies, reshard_after_forward=False)
    return arrived(tiny_model(), paths=("layers.0", "layers.1"), root=root)


def _rootless(model: ModelFacts) -> ModelFacts:
    return evolve(model, units=model.units[:-1])


COUNTEREXAMPLES: dict[str, Callable[[], Counterexample]] = {
    "environment.world-size": lambda: env(Config(), world_size=0),
    "environment.device": lambda: env(Config(device="cuda")),
    "environment.backend": lambda: ranks(Config(engine=DDP(), backend="nccl")),
    "environment.offload-backend": lambda: env(
        Config(engine=FSDP2(offload=OffloadToCPU()), backend="nccl"), device="cuda", world_size=8
    ),
    "environment.slurm-tasks": lambda: env(Config(), variables=(("SLURM_NTASKS", "16"),)),
    "environment.torch-version": lambda: env(Config(), torch="2.5.1+cu124"),
    "environment.fsdp2-on-cpu": lambda: env(Config(engine=FSDP2()), torch="2.6.0+cpu"),
    "environment.launcher-flag": lambda: env(Config(), variables=(("ACCELERATE_USE_FSDP", "true"),)),
    "mesh.size-below-one": lambda: ranks(Config(engine=FSDP2(), mesh=Mesh(replicate=0))),
    "mesh.two-rests": lambda: ranks(Config(engine=FSDP2(), mesh=Mesh(replicate=-1, shard=-1))),
    "mesh.not-world-size": lambda: ranks(Config(engine=FSDP2(), mesh=Mesh(replicate=3, shard=4))),
    "mesh.single-has-none": lambda: ranks(Config(mesh=Mesh(replicate=2)), world=1),
    "mesh.ddp-does-not-shard": lambda: ranks(Config(engine=DDP(), mesh=Mesh(replicate=2))),
    "mesh.nothing-sharded": lambda: ranks(Config(engine=FSDP2(), mesh=Mesh(replicate=8, shard=1))),
    "mesh.single-many-ranks": lambda: ranks(Config()),
    "mesh.ddp-alone": lambda: ranks(Config(engine=DDP()), world=1),
    "model.already-wrapped": lambda: of(Config(), marked(tiny_model(), "ddp")),
    "model.no-forward": lambda: of(
        Config(engine=DDP()),
        evolve(
            tiny_model(),
            classes=tuple(
                evolve(one, module="torch.nn.modules.container", has_forward=False) if one.name == "Tiny" else one
                for one in tiny_model().classes
            ),
        ),
    ),
    "model.already-autocast": lambda: of(Config(precision=BF16()), marked(tiny_model(), "autocast")),
    "model.already-compiled": lambda: of(Config(compile=CompileModel()), marked(tiny_model(), "compiled")),
    "model.already-checkpointed": lambda: of(
        Config(checkpointing=CheckpointBlocks()), marked(tiny_model(), "checkpointed", "layers.0")
    ),
    "model.sharded-parameters": lambda: of(
        Config(engine=DDP()), tiny_model(extra=(param("norm.bias", cls="DTensor"),))
    ),
    "model.device-map": lambda: (
        Config(engine=FSDP2()),
        tiny_facts(evolve(tiny_model(), device_map=(("embed", "cuda:0"), ("layers", "cuda:1"))), world=2),
    ),
    "model.lazy-parameters": lambda: of(
        Config(), tiny_model(extra=(param("head.bias", shape=(), cls="UninitializedParameter"),))
    ),
    "model.nothing-trainable": lambda: (Config(), tiny_facts(tiny_model(frozen=NAMES), optimizer=False)),
    "sharded.not-to-plan": lambda: _arrived(FSDP2(), _rootless(_sharded())),
    "sharded.differs": lambda: _arrived(FSDP2(), _sharded(ranks=1, copies=2)),
    "sharded.too-late": lambda: _arrived(FSDP2(), _sharded(), checkpointing=CheckpointBlocks()),
    "sharded.kept": lambda: _arrived(FSDP2(reshard_after_forward=False), _sharded()),
    "quantised.spread": lambda: _quantised(
        Config(engine=DDP(), keep_device_map=True), "cuda:0", "cuda:1", world_size=2
    ),
    "quantised.other-device": lambda: _quantised(Config(), "cuda:1"),
    "quantised.on-cpu": lambda: _quantised(Config(), "cuda:0", "cpu", bitsandbytes="0.43.3"),
    "quantised.on-disk": lambda: _quantised(Config(), "disk"),
    "quantised.not-packed": lambda: of(
        Config(), tiny_model(extra=(param("head.packed", shape=(8, 4), cls="Params4bit", requires_grad=False),))
    ),
    "reshard.not-a-factor": lambda: ranks(Config(engine=FSDP2(reshard_after_forward=3))),
}
"""Rule id to a config and facts on which the rule fires."""
