"""What becomes of every key of DeepSpeed's config, with values right and wrong, at two stages.

``golden/<section>.txt``, or the file of several in ``TOGETHER``, has for each key the outcomes, and values that lead
there: rules that refuse, else what DeepSpeed is given, and rules that warn. ``golden/sentences.txt`` has their words.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from returns.result import Success

from prepkit import planner
from prepkit.config import BF16, AdamW, Config, DeepSpeed, Precision
from prepkit.findings import errors
from prepkit.plan import Plan
from prepkit.resolve.deepspeed.data import put
from prepkit.resolve.deepspeed.keys import OPEN, REMOVED, SECTIONS
from prepkit.resolve.deepspeed.working import working_config
from prepkit.steps import InitializeDeepSpeed
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
USUAL = ("precision.steps-in-16-bit",)
"""Rules that warn of every plan here."""
FACTS = tiny_facts(world=2, loader=tiny_loader())
ENGINES: tuple[tuple[str, int, Precision], ...] = (
    ("stage 1", 1, None),
    ("stage 3 in bf16", 3, BF16()),
)


def outcome(stage: int, precision: Precision, path: str, data: dict[str, Any]) -> str:
    """Rules that refuse; else what DeepSpeed is given in that place, and the rules that warn."""
    cfg = Config(engine=DeepSpeed(stage=stage, config=data), precision=precision)
    made = planner.plan(cfg, FACTS)
    if not isinstance(made, Success):
        return " ".join(dict.fromkeys(one.rule for one in errors(made.failure())))
    plan = made.unwrap()
    warned = "".join(f", {one.rule}" for one in plan.warnings if one.rule not in USUAL)
    return f"{_given(plan, path, data)}{warned}"


def _given(plan: Plan, path: str, data: dict[str, Any]) -> str:
    found, written = _at(given(plan), path), _at(data, path)
    if found == written and type(found) is type(written):
        return "as written"
    return "left out" if found is ABSENT else f"as {json.dumps(found)}"


def given(plan: Plan) -> dict[str, Any]:
    """The whole config that DeepSpeed gets."""
    (step,) = (one.step for one in plan.steps if isinstance(one.step, InitializeDeepSpeed))
    data: dict[str, Any] = {}
    for setting in step.settings:
        inner = data
        for key in setting.path[:-1]:
            inner = inner.setdefault(key, {})
        inner[setting.path[-1]] = json.loads(setting.value)
    return data


ABSENT = object()


def _at(data: Any, path: str) -> Any:
    for key in path.split("."):
        data = data.get(key, ABSENT) if isinstance(data, dict) else ABSENT
    return data


def table(
    cases: Iterator[tuple[str, str, Any, dict[str, Any]]],
    engines: tuple[tuple[str, int, Precision], ...] = ENGINES,
) -> str:
    """Lines for each name: outcomes that both stages have in common once, with the values that lead there."""
    lines: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, path, value, data in cases:
        found = {said: outcome(stage, precision, path, data) for said, stage, precision in engines}
        for said, word in found.items() if len(set(found.values())) > 1 else [("", *set(found.values()))]:
            lines[name][f"{word} ({said})" if said else word].append(json.dumps(value))
    return "".join(
        line
        for name, outcomes in lines.items()
        for line in (f"{name}\n", *(f"  {word}: {', '.join(seen)}\n" for word, seen in outcomes.items()))
    )


def of_section(section: str, keys: tuple[str, ...]) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    for key in keys:
        path = f"{section}.{key}".strip(".")
        for value in VALUES:
            data: dict[str, Any] = {}
            put(data, path, value)
            yield path, path, value, data


TOGETHER = {
    "monitors": ("csv_monitor", "tensorboard", "wandb", "comet", "comms_logger"),
    "timers": ("timers", "timers.throughput", "flops_profiler"),
    "dtypes": ("bf16", "bfloat16", "fp16", "torch_autocast", "data_types"),
    "tensor_parallel": ("tensor_parallel", "tensor_parallel.tensor_parallel", "tensor_parallel.tp"),
    "zero_optimization.offload": ("zero_optimization.offload_param", "zero_optimization.offload_optimizer"),
    "zero_optimization.more": ("zero_optimization.leaf_module", "zero_optimization.zenflow"),
    "workings": ("activation_checkpointing", "aio", "hybrid_engine"),
    "makers": ("optimizer", "scheduler"),
}
"""Small sections that are read in one file."""
_PLACED = frozenset(section for sections in TOGETHER.values() for section in sections)
FILES = TOGETHER | {section or "top": (section,) for section in SECTIONS if section not in _PLACED}


@pytest.mark.parametrize("file", FILES)
def test_a_key_of_a_section_has_the_outcomes_that_it_had(file: str) -> None:
    text = "".join(table(of_section(section, (*SECTIONS[section], "no_such_key"))) for section in FILES[file])
    assert_golden(GOLDEN / f"{file}.txt", text)


@pytest.mark.parametrize("paths", [OPEN, REMOVED], ids=["open", "removed"])
def test_sections_that_are_open_or_gone_have_the_outcomes_that_they_had(
    paths: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    cases = (case for path in paths for case in of_section(path, ("any",)))
    assert_golden(GOLDEN / f"all-{request.node.callspec.id}.txt", table(cases))


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_types_and_their_parameters_have_the_outcomes_that_they_had(section: str) -> None:
    def cases() -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
        for kind in TYPES:
            yield "type", section, kind, {section: {"type": kind, "params": {}}}
            for name in PARAMS:
                for value in ("auto", 0.1, True):
                    yield kind, section, f"{name} {value}", {section: {"type": kind, "params": {name: value}}}

    assert_golden(GOLDEN / f"types-of-{section}.txt", table(cases(), ENGINES[1:]))


def said(data: dict[str, Any]) -> dict[str, str]:
    """Every sentence about a config, with what to type, to the rule that says it, or that it is a note."""
    cfg = Config(engine=DeepSpeed(stage=2, config=data, micro_batch=1), optimizer=AdamW())
    made = working_config(cfg, FACTS)
    return dict.fromkeys(made.notes, "note") | {f"{one.what} {one.fix}".strip(): one.rule for one in made.flaws}


def test_the_sentences_about_a_key_are_those_that_somebody_has_read() -> None:
    usual = said({})
    alike: dict[str, str] = {}
    keys: dict[str, set[str]] = defaultdict(set)
    for section, names in SECTIONS.items():
        for _, path, value, data in of_section(section, (*names, "no_such_key", "_comment")):
            for sentence, rule in said(data).items():
                if sentence not in usual:
                    kind = re.sub(rf"\b{re.escape(path)}\b|{re.escape(repr(value))}|\d\S*", "", f"{rule}: {sentence}")
                    alike.setdefault(kind, f"{rule}: {sentence}")
                    keys[kind].add(path)
    lines = (
        f"{sentence}\n  of {len(keys[kind])} keys: {', '.join(sorted(keys[kind])[:3])}\n"
        for kind, sentence in alike.items()
    )
    assert_golden(GOLDEN / "sentences.txt", "".join(lines))
