"""Configs with facts on which rules fire: float8 and XLA."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from prepkit.config import (
    DDP,
    FP8,
    FSDP2,
    MSAMP,
    XLA,
    AdamW,
    ClipNorm,
    CompileModel,
    Config,
    Intent,
    Mesh,
    MXFP8BlockScaling,
    TorchAO,
    TransformerEngine,
)
from prepkit.facts import ArchitectureFacts
from prepkit.testing.tiny import CLASSES, tiny_model
from tests.support.counterexamples.build import Counterexample, changed_model, env, float8, with_loader

_AO = Config(precision=FP8(backend=TorchAO()))


_TE = Config(precision=FP8(backend=TransformerEngine()))


_MSAMP = Config(precision=FP8(backend=MSAMP()))


_FLOAT8 = tuple(
    evolve(cls, name="Float8Linear", module="torchao.float8.float8_linear") if cls.name == "Embedding" else cls
    for cls in CLASSES
)


COUNTEREXAMPLES: dict[str, Callable[[], Counterexample]] = {
    "fp8.library-missing": lambda: float8(_AO, libraries=()),
    "fp8.library-too-old": lambda: float8(_AO, libraries=(("torchao", "0.6.0"),)),
    "fp8.unsupported-device": lambda: float8(_AO, capability=(8, 6)),
    "fp8.unsupported-blocks": lambda: float8(
        Config(precision=FP8(backend=TransformerEngine(recipe=MXFP8BlockScaling()))), capability=(9, 0)
    ),
    "fp8.recipe-on-cpu": lambda: float8(
        Config(precision=FP8(backend=TorchAO(recipe="rowwise_with_gw_hp", emulate=True))), device="cpu"
    ),
    "fp8.skip-not-found": lambda: float8(Config(precision=FP8(backend=TorchAO(skip=("model.layers.*.attn",))))),
    "fp8.nothing-to-convert": lambda: changed_model(float8(_AO), params=tiny_model(width=4, vocab=8).params),
    "fp8.already-converted": lambda: changed_model(float8(_AO), classes=_FLOAT8),
    "fp8.tensor-parallel": lambda: changed_model(float8(_AO), architecture=ArchitectureFacts(tp_size=2)),
    "fp8.idle-in-eval": lambda: float8(evolve(_TE, intent=Intent.INFERENCE), optimizer=False),
    "fp8.launcher-flag": lambda: env(Config(), variables=(("ACCELERATE_FP8_BACKEND", "te"),)),
    "fp8.engine": lambda: float8(Config(engine=XLA(), precision=_AO.precision), device="cpu"),
    "fp8.all-gather": lambda: float8(
        Config(engine=DDP(), precision=FP8(backend=TorchAO(float8_all_gather=True))), world=2
    ),
    "fp8.msamp-engine": lambda: float8(evolve(_MSAMP, engine=FSDP2()), world=2),
    "fp8.msamp-optimizer": lambda: float8(evolve(_MSAMP, optimizer=AdamW()), optimizer=False),
    "fp8.msamp-clip": lambda: float8(evolve(_MSAMP, clip=ClipNorm(1.0))),
    "fp8.optimizer-missing": lambda: float8(_TE, optimizer=False),
    "fp8.msamp-deprecated": lambda: float8(_MSAMP),
    "xla.library-missing": lambda: float8(Config(engine=XLA()), device="cpu", libraries=()),
    "xla.mesh": lambda: float8(Config(engine=XLA(), mesh=Mesh()), device="cpu"),
    "xla.loaders": lambda: with_loader(float8(Config(engine=XLA()), device="cpu", world=2)),
    "xla.compile": lambda: float8(Config(engine=XLA(), compile=CompileModel()), device="cpu"),
}
"""Rule id to a config and facts on which the rule fires."""
