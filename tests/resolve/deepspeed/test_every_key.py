"""What becomes of every key of DeepSpeed's config, with values right and wrong, at two stages.

``golden/<section>.txt`` has for each key the outcomes, and the values that lead there: rules that refuse, else a digest
of the settings that DeepSpeed is given.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from returns.result import Success

from prepkit import codec, planner
from prepkit.config import BF16, AsStored, Config, DeepSpeed, Precision
from prepkit.findings import errors
from prepkit.predict import predict
from prepkit.resolve.deepspeed.data import put
from prepkit.resolve.deepspeed.keys import OPEN, REMOVED, SECTIONS
from prepkit.testing import tiny_facts, tiny_loader
from tests.support.golden import assert_golden

GOLDEN = Path(__file__).parent / "golden"
VALUES: tuple[Any, ...] = (
    *(True, False, -1, 0, 1, 2, 3, 10, 0.5, 1.5, 1e3, 1e12, 2**70, "auto", "text", "", "true", "8", [], ["a"], {}),
    *("cpu", "nvme", "none", "fp32", "fp16", "bf16", "bfloat16", None, 2**63 - 1, 2**63, 10**45, "FP32", "Fail"),
)
TYPES = (
    *("Adam", "adam", "AdamW", "Lion", "Adagrad", "SGD", "Muon", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Lamb"),
    *("FusedAdam", "CPUAdam", "DeepSpeedCPUAdam", "MuAdam", "MuAdamW", "MuSGD", "Adafactor"),
    *("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "CosineAnnealing"),
)
PARAMS = (
    *("lr", "betas", "eps", "weight_decay", "torch_adam", "adam_w_mode", "momentum", "bias_correction", "amsgrad"),
    *("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "warmup_min_ratio", "cos_min_ratio"),
)
ENGINES: tuple[tuple[str, int, Precision], ...] = (
    ("stage 1", 1, AsStored()),
    ("stage 3 in bf16", 3, BF16()),
)


def outcome(stage: int, precision: Precision, data: dict[str, Any]) -> tuple[str, str]:
    """In a word or two, and as a digest of all that is said."""
    cfg = Config(engine=DeepSpeed(stage=stage, config=data), precision=precision)
    made = planner.plan(cfg, tiny_facts(world=2, loader=tiny_loader()))
    if isinstance(made, Success):
        plan = made.unwrap()
        return f"plan {_digest((plan.steps, plan.warnings))} {_digest(predict(plan))}", ""
    found = errors(made.failure())
    return " ".join(dict.fromkeys(one.rule for one in found)), _digest(found)


def _digest(value: object) -> str:
    return codec.digest(repr(value))[-4:]


def table(
    cases: Iterator[tuple[str, Any, dict[str, Any]]], engines: tuple[tuple[str, int, Precision], ...] = ENGINES
) -> str:
    lines: dict[str, dict[str, list[tuple[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for name, value, data in cases:
        for said, stage, precision in engines:
            word, full = outcome(stage, precision, data)
            lines[f"{name}, {said}"][word].append((json.dumps(value), full))
    return "".join(
        line
        for name, outcomes in lines.items()
        for line in (f"{name}\n", *(f"  {word} {_digest(seen)}: {_values(seen)}\n" for word, seen in outcomes.items()))
    )


def _values(seen: list[tuple[str, str]]) -> str:
    return ", ".join(value for value, _ in seen)


def of_section(section: str, keys: tuple[str, ...]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    for key in keys:
        path = f"{section}.{key}".strip(".")
        for value in VALUES:
            data: dict[str, Any] = {}
            put(data, path, value)
            yield path, value, data


@pytest.mark.parametrize("section", SECTIONS)
def test_a_key_of_a_section_has_the_outcomes_that_it_had(section: str) -> None:
    text = table(of_section(section, (*SECTIONS[section], "no_such_key")))
    assert_golden(GOLDEN / f"{section or 'top'}.txt", text)


@pytest.mark.parametrize("paths", [OPEN, REMOVED], ids=["open", "removed"])
def test_sections_that_are_open_or_gone_have_the_outcomes_that_they_had(
    paths: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    cases = ((path, value, data) for path in paths for _, value, data in of_section(path, ("any",)))
    assert_golden(GOLDEN / f"all-{request.node.callspec.id}.txt", table(cases))


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_types_and_their_parameters_have_the_outcomes_that_they_had(section: str) -> None:
    def cases() -> Iterator[tuple[str, Any, dict[str, Any]]]:
        for kind in TYPES:
            yield "type", kind, {section: {"type": kind, "params": {}}}
            for name in PARAMS:
                for value in ("auto", 0.1, True):
                    yield kind, f"{name} {value}", {section: {"type": kind, "params": {name: value}}}

    assert_golden(GOLDEN / f"types-of-{section}.txt", table(cases(), ENGINES[1:]))
