"""Public DeepSpeed configs: each gives a config that DeepSpeed accepts, or findings that say why not. None crashes."""

from __future__ import annotations

import csv
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from prepkit.config import (
    BF16,
    FP16,
    AdamW,
    ClipNorm,
    Config,
    DeepSpeed,
    KeepLoaders,
    Precision,
    Schedule,
)
from prepkit.facts import ArchitectureFacts, Facts
from prepkit.findings import Finding, errors
from prepkit.plan import Plan
from prepkit.planner import plan
from prepkit.resolve.deepspeed import data as deepspeed_json
from prepkit.steps import InitializeDeepSpeed
from prepkit.testing.tiny import tiny_facts, tiny_loader, tiny_model
from tests.support.deepspeed_cpu import lean
from tests.support.single_step import gloo_alone

CORPUS = Path(__file__).resolve().parents[4] / "shared" / "corpus"
INDEX = CORPUS / "index.csv"

pytestmark = pytest.mark.skipif(not INDEX.exists(), reason="the corpus of public configs is not beside the repository")


def rows() -> list[dict[str, str]]:
    if not INDEX.exists():
        return []
    with INDEX.open() as file:
        return [row for row in csv.DictReader(file) if row["kind"] == "deepspeed"]


FILES = [row["file"] for row in rows()]


def data_of(file: str) -> dict[str, Any]:
    name = CORPUS / (file if (CORPUS / file).exists() else f"{file}.json")
    found: dict[str, Any] = json.loads(name.read_text())
    return found


def asked(data: dict[str, Any]) -> tuple[Config, Facts]:
    """prepkit's own config with the numbers that the file repeats, as a user would write it to agree with the file."""

    def said(path: str, default: Any) -> Any:
        value = deepspeed_json.look(data, path, default)
        return default if value == "auto" else value

    clip = said("gradient_clipping", 0.0)
    auto = '"auto"' in json.dumps(data.get("optimizer", {}))
    numbers = '"auto"' in json.dumps(data.get("scheduler", {}))
    sized = any(said(key, None) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
    made = "optimizer" in data
    steps = said("gradient_accumulation_steps", None)
    whole, micro = said("train_batch_size", None), said("train_micro_batch_size_per_gpu", None)
    tensor = max(1, said("tensor_parallel.autotp_size", 1))
    if steps is None:
        steps = whole // micro if whole and micro else 1
    ranks = max(1, whole // (micro * steps)) if whole and micro and isinstance(steps, int) else 1
    scaled = said("fp16.enabled", default=False) is True
    masters = not said("bf16.bf16_master_weights_and_grads", default=False)
    precision: Precision = None
    if said("bf16.enabled", default=False) is True:
        precision = BF16(master_weights=masters)
    if scaled:
        scale, window = said("fp16.initial_scale_power", 16), said("fp16.loss_scale_window", 1000)
        precision = FP16(init_scale=2.0**scale, growth_interval=window)
    cfg = Config(
        engine=DeepSpeed(
            stage=None if "zero_optimization" in data else 0,
            config=data,
            schedule=Schedule(warmup_steps=10, total_steps=100) if numbers else None,
        ),
        loaders=KeepLoaders(),
        precision=precision,
        clip=ClipNorm(float(clip)) if isinstance(clip, int | float) and clip > 0 else None,
        accumulation=steps if isinstance(steps, int) else 1,
        optimizer=AdamW() if auto and made else None,
    )
    model = evolve(tiny_model(), architecture=ArchitectureFacts(hidden_sizes=(64,)))
    loader = None if sized else tiny_loader()
    return cfg, tiny_facts(
        model, world=ranks * tensor, optimizer=not made, loader=loader, device="cuda" if scaled else "cpu"
    )


@cache
def outcome(file: str) -> Plan | tuple[Finding, ...]:
    made = plan(*asked(data_of(file)))
    found: Plan | tuple[Finding, ...] = made.value_or(None) or made.failure()
    return found


@pytest.mark.parametrize("file", FILES)
def test_a_public_config_gives_what_deepspeed_accepts_or_findings(file: str) -> None:
    deepspeed = pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")
    from deepspeed.runtime.config import DeepSpeedConfig

    from prepkit.applying.handlers.deepspeed import config_of
    from prepkit.objects.deepspeed import DataRanks, forget_groups

    before = data_of(file)
    found = outcome(file)
    if isinstance(found, tuple):
        assert all(finding.rule.startswith("deepspeed.") for finding in errors(found))
        assert all(finding.what and finding.fix for finding in found)
        return
    (step,) = (one.step for one in found.steps if isinstance(one.step, InitializeDeepSpeed))
    settled = config_of(step.settings)
    assert '"auto"' not in json.dumps({key: value for key, value in settled.items() if key != "autotuning"})
    lean()
    forget_groups()
    with gloo_alone():
        deepspeed.init_distributed(dist_init_required=False)
        accepted = DeepSpeedConfig(settled, mpu=DataRanks(step.data_parallel, None))
    assert accepted.train_batch_size == settled["train_batch_size"]
    assert before == data_of(file)


def test_what_deepspeed_accepts_is_refused_for_reasons_that_are_ours_to_give() -> None:
    accepted = {row["file"] for row in rows() if row["deepspeed_ok"] == "true"}
    reasons = Counter(
        finding.rule for file in accepted if isinstance(found := outcome(file), tuple) for finding in errors(found)
    )
    assert set(reasons) <= {
        "deepspeed.auto",  # DeepSpeed takes its default without a word
        "deepspeed.max-grad-norm",  # accepted as a config, refused by the engine
        "deepspeed.offload",  # likewise
        "deepspeed.precision",  # torch_autocast, beside a precision of prepkit's
        "deepspeed.unknown-key",  # ignored without a word
        "deepspeed.sequence-parallel",  # which DeepSpeed does where its caller makes the groups
        "deepspeed.tensor-parallel",  # likewise: so many ranks share a sequence, and these are too few
        "deepspeed.removed-type",  # accepted as a config, refused by the engine
    }, reasons


def test_every_file_that_deepspeed_refuses_is_refused_here_too() -> None:
    refused = [row["file"] for row in rows() if row["deepspeed_ok"] != "true" and "provided" not in row["error"]]
    kept = [file for file in refused if not isinstance(outcome(file), tuple) and "gds" not in file]
    assert kept == []


def test_the_files_that_can_run_get_a_plan() -> None:
    plans = sum(not isinstance(outcome(file), tuple) for file in FILES)
    assert plans >= 110, "the others: keys and optimizers that DeepSpeed has removed, and misspelt keys"
