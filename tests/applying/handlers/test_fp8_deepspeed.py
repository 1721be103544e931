"""Float8 under DeepSpeed: torchao for real on two CPU processes, TransformerEngine and MS-AMP through their doubles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch.optim import AdamW

from prepkit.api import apply
from prepkit.config import (
    DDP,
    FP8,
    MSAMP,
    ClipNorm,
    Config,
    DeepSpeed,
    DelayedScaling,
    TorchAO,
    TransformerEngine,
)
from prepkit.objects import names
from tests.support import library_doubles
from tests.support.deepspeed_cpu import lean
from tests.support.fp8_model import FITTING, TOKENS, loss_of, planned, seeded
from tests.support.gang import Gang

pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")

AO = FP8(backend=TorchAO(emulate=True))
TE = FP8(backend=TransformerEngine(recipe=DelayedScaling()))
HERE = ("fp8.unsupported-device",)
"""The doubles run on the CPU, where the rule rightly refuses the real libraries."""


def asked(precision: FP8, stage: int = 2) -> Config:
    return Config(engine=DeepSpeed(stage=stage, micro_batch=2), precision=precision, clip=ClipNorm(1.0))


def train(rank: int, world: int, cfg: Config) -> dict[str, Any]:
    """Losses of four steps, and what stands there afterwards."""
    lean()
    model = seeded()
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    made = planned(cfg, model, optimizer, world_size=world, device="cpu")
    ready = apply(made, model=model, optimizer=optimizer)
    part, losses = TOKENS.chunk(world)[rank], []
    for _ in range(4):
        loss = loss_of(ready.model, part)
        ready.backward(loss)
        ready.step()
        losses.append(loss.item())
    converted = [path for path, m in names.named_modules(ready.model).items() if type(m).__name__ == "Float8Linear"]
    return {"losses": losses, "converted": tuple(converted), "steps": [type(one.step).__name__ for one in made.steps]}


@pytest.fixture(scope="module")
def expected(gang2: Gang) -> torch.Tensor:
    """What DDP learns in float8, mean of both ranks."""
    found = gang2.run(train, Config(engine=DDP(), precision=AO, clip=ClipNorm(1.0)), timeout=120)
    return torch.tensor([one["losses"] for one in found]).mean(0)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_learns_in_torchaos_float8_what_ddp_learns_in_it(gang2: Gang, expected: torch.Tensor, stage: int) -> None:
    found = gang2.run(train, asked(AO, stage), timeout=120)
    torch.testing.assert_close(torch.tensor([one["losses"] for one in found]).mean(0), expected, rtol=0.02, atol=0.0)
    assert expected[-1] < expected[0] - 0.2
    assert found[0]["converted"] == FITTING
    assert found[0]["steps"][2:5] == ["ConvertFP8Linears", "CastForward", "InitializeDeepSpeed"]


def under_engine(rank: int, world: int) -> dict[str, Any]:
    """One step under TransformerEngine's double."""
    lean()
    with pytest.MonkeyPatch.context() as patched:
        calls = library_doubles.transformer_engine(patched)
        model = seeded()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        made = planned(evolve(asked(TE), overrides=HERE), model, optimizer, world_size=world, device="cpu")
        ready = apply(made, model=model, optimizer=optimizer)
        out = ready.model(TOKENS.chunk(world)[rank])
        before = model.layers[0].inner.weight.detach().clone()  # type: ignore[union-attr]  # a ModuleList of Blocks
        ready.backward(loss_of(ready.model, TOKENS.chunk(world)[rank]))
        ready.step()
        ready.model.eval()
        ready.model(TOKENS)
        return {
            "calls": [call[:2] for call in calls],
            "layer": type(model.layers[0].inner).__module__,  # type: ignore[union-attr]
            "trains": not torch.equal(before, model.layers[0].inner.weight.detach()),  # type: ignore[union-attr]
            "returns": out.dtype,
            "steps": [type(one.step).__name__ for one in made.steps],
            "failed": [str(check) for check in ready.attestation.failed],
        }


def test_transformer_engines_layers_train_under_zero(gang2: Gang) -> None:
    for found in gang2.run(under_engine, timeout=120):
        assert found["calls"] == [("autocast", True), ("autocast", True), ("autocast", False)]
        assert found["layer"] == "transformer_engine.pytorch"
        assert found["trains"]
        assert found["returns"] == torch.float32
        convert, cast, autocast, rebind = found["steps"][2:6]
        assert (convert, cast, autocast) == ("ConvertTransformerEngine", "CastForward", "AutocastFP8Forward")
        assert rebind == "RebindOptimizer"
        assert found["failed"] == []


def under_msamp(rank: int, world: int) -> dict[str, Any]:
    """What MS-AMP's double is called with, and what it leaves."""
    lean()
    with pytest.MonkeyPatch.context() as patched:
        calls = library_doubles.msamp(patched)
        model = seeded()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        cfg = evolve(asked(FP8(backend=MSAMP(opt_level="O1"))), overrides=HERE)
        made = planned(cfg, model, optimizer, world_size=world, device="cpu")
        ready = apply(made, model=model, optimizer=optimizer)
        return {
            "calls": calls,
            "engine": type(ready.model).__name__,
            "tied": model.head.weight is model.embed.weight,
            "failed": [str(check) for check in ready.attestation.failed],
            "layouts": {one.name: (one.cls, one.dtype) for one in made.layout},
            "masters": made.owners.master_weights,
        }


def test_ms_amps_own_initialize_takes_the_place_of_deepspeeds(gang2: Gang) -> None:
    for found in gang2.run(under_msamp, timeout=120):
        assert found["calls"] == [("deepspeed.initialize", "AdamW", {"enabled": True, "opt_level": "O1"})]
        assert found["engine"] == "MSAMPDeepSpeedEngine"
        assert found["tied"]  # MS-AMP alone would tear them apart
        assert found["failed"] == []
        assert found["layouts"]["layers.0.gate.weight"] == ("ScalingParameter", "float16")
        assert found["layouts"]["embed.weight"] == ("Parameter", "bfloat16")
        assert found["masters"] == "none: MS-AMP keeps scaled float16 weights"
