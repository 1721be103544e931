"""Float8: which optimizers MS-AMP takes, and patterns of layers that stay wide."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import FP8, MSAMP, Config, TorchAO, TransformerEngine
from prepkit.testing.tiny import tiny_facts, tiny_model, tiny_optimizer
from tests.support.rule_findings import mended, rule_ids


@pytest.mark.parametrize(
    ("name", "module", "taken"),
    [
        ("Adam", "torch.optim.adam", True),
        ("AdamW", "torch.optim.adamw", True),
        ("FusedAdam", "deepspeed.ops.adam.fused_adam", True),
        ("Adam", "apex.optimizers.adam", False),
        ("AdamW", "deepspeed.ops.adam", False),
        ("FusedAdam", "apex.optimizers.fused_adam", False),
        ("SGD", "torch.optim.sgd", False),
    ],
)
def test_ms_amp_takes_the_adams_of_torch_and_the_fused_one_of_deepspeed(name: str, module: str, taken: bool) -> None:
    facts = evolve(tiny_facts(device="cuda"), optimizer=tiny_optimizer(tiny_model(), name, module))
    assert ("fp8.msamp-optimizer" not in rule_ids(Config(precision=FP8(backend=MSAMP())), facts)) is taken


@pytest.mark.parametrize("backend", [TorchAO, TransformerEngine])
def test_mending_keeps_the_patterns_that_match(backend: type[TorchAO | TransformerEngine]) -> None:
    cfg = Config(precision=FP8(backend=backend(skip=("head", "hed", "layers.*.mlp"))))
    kept = mended("fp8.skip-not-found", cfg).precision
    assert kept == FP8(backend=backend(skip=("head", "layers.*.mlp")))
