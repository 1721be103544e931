"""What stands in the ``optimizer`` and ``scheduler`` sections, beside what DeepSpeed and torch make of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from prepkit.config import Config, DeepSpeed
from prepkit.resolve.deepspeed import arguments_table as table
from prepkit.resolve.deepspeed.arguments import OWN
from prepkit.resolve.deepspeed.working import as_written
from prepkit.testing.tiny import tiny_facts
from tests.tools.deepspeed_arguments import FILE, tables, text


def flaws(section: str, data: Any) -> list[tuple[str, str]]:
    """Rule and fix of each flaw in a config that has this section."""
    config = {"zero_optimization": {"stage": 2}, section: data}
    draft, _ = as_written(Config(engine=DeepSpeed(config=json.dumps(config))), tiny_facts())
    return [(flaw.rule.partition(".")[2], flaw.fix) for flaw in draft.flaws]


def test_the_table_is_what_is_installed() -> None:
    deepspeed = pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")
    here = (deepspeed.__version__, torch.__version__.partition("+")[0])
    if here != (table.VERSION, table.TORCH):
        pytest.skip(f"DeepSpeed and torch {here} are here, the table is of {table.VERSION} and {table.TORCH}")
    assert tables() == {path: names for path, names in table.SECTIONS.items() if path}
    assert text() == FILE.read_text(), "type: python -m tests.tools.deepspeed_arguments"


def test_types_that_are_taken_in_any_case_are_those_of_deepspeed() -> None:
    runtime = pytest.importorskip("deepspeed.runtime.config", reason="the extra prepkit[deepspeed] is not installed")
    assert sorted(OWN) == sorted(runtime.DEEPSPEED_OPTIMIZERS)


@pytest.mark.parametrize(
    ("section", "data", "rule", "fix"),
    [
        ("optimizer", {"type": "AdamWW"}, "unknown-type", "Write AdamW or Adam."),
        ("optimizer", {"type": "sgd"}, "unknown-type", "Write SGD"),
        ("optimizer", {"params": {"lr": 1.0}}, "unknown-type", "Write `optimizer.type`, or remove the section."),
        ("optimizer", {"type": "OnebitLamb"}, "removed-type", "Write AdamW, or install a DeepSpeed"),
        ("scheduler", {"type": "WarmupCosineLr"}, "unknown-type", "Write WarmupCosineLR"),
        ("optimizer", {"type": "AdamW", "params": {"learning_rate": 1}}, "unknown-key", "Write 'optimizer.params.lr'"),
        ("optimizer", {"type": "AdamW", "params": {"foreach": True}}, "unknown-key", "Remove it."),
        (
            "optimizer",
            {"type": "AdamW", "params": {"lr": "1e-4"}},
            "wrong-type",
            "Write a number without quotes: 1e-4.",
        ),
        ("optimizer", {"type": "adam", "params": {"lr": -1}}, "wrong-value", "Write such a number."),
        ("optimizer", {"type": "Adam", "params": {"betas": [0.9, 1.5]}}, "wrong-value", "Write such numbers"),
        ("optimizer", {"type": "Adam", "params": {"betas": [0.9]}}, "wrong-value", "Write such numbers"),
        ("optimizer", {"type": "Adam", "params": {"betas": 0.9}}, "wrong-type", "Write a list."),
        ("optimizer", {"type": "Adam", "params": {"amsgrad": "false"}}, "wrong-type", "Write true or false."),
        (
            "scheduler",
            {"type": "WarmupDecayLR", "params": {}},
            "missing-key",
            "Write `scheduler.params.total_num_steps`",
        ),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_steps": 9}}, "unknown-key", "params.warmup_num_steps'"),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "wrong-value", "Write such a number."),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_num_steps": 1e2}}, "wrong-value", "such as 100."),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_max_lr": "1"}}, "wrong-type", "without quotes: 1."),
        ("scheduler", {"type": "StepLR"}, "missing-key", "Write `scheduler.params.step_size`"),
    ],
)
def test_what_deepspeed_refuses_is_told_once_with_what_to_write(
    section: str, data: dict[str, Any], rule: str, fix: str
) -> None:
    ((told, said),) = flaws(section, data)
    assert told == rule
    assert fix in said


@pytest.mark.parametrize(
    ("section", "data"),
    [
        ("optimizer", {}),
        ("scheduler", {}),
        ("optimizer", {"type": "ADAMW", "params": {"lr": 0.1, "betas": [0, 0.9], "adam_w_mode": True}}),
        ("optimizer", {"type": "AdamW", "params": {"torch_adam": "torch_impl", "foreach": True, "lr": 1}}),
        ("optimizer", {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}}),
        ("optimizer", {"type": "MuAdam", "params": {"anything": 1}}),
        ("optimizer", {"type": "SGD", "params": {"lr": 0.1, "nesterov": True, "momentum": 0.9}}),
        ("optimizer", {"type": "Muon", "params": {"muon_lr": 0.1, "adam_lr": 0.1, "momentum": 0.9}}),
        ("scheduler", {"type": "WarmupLR", "params": {"warmup_min_lr": [0, 0], "warmup_type": "linear"}}),
        ("scheduler", {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}),
        ("scheduler", {"type": "CosineAnnealingLR", "params": {"T_max": 100}}),
    ],
)
def test_what_deepspeed_takes_is_no_flaw(section: str, data: dict[str, Any]) -> None:
    assert flaws(section, data) == []


NUMBERS: tuple[Any, ...] = (3, 0.5, "3", "three", True)


@pytest.mark.parametrize("kind", ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_what_a_schedule_of_deepspeeds_raises_at_is_a_flaw(kind: str) -> None:
    """And what it takes is none, but for numbers as text that it only meets when it is stepped."""
    schedules = pytest.importorskip("deepspeed.runtime.lr_schedules", reason="prepkit[deepspeed] is not installed")
    needed = {"total_num_steps": 90, "cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    known = table.SECTIONS[f"scheduler {kind}"]
    base = {name: value for name, value in needed.items() if name in known}
    tried = [{}, base, base | {"warmup_steps": 1}]
    tried += [base | {name: value} for name, one in known.items() if one.startswith("number") for value in NUMBERS]
    for params in tried:
        if "last_batch_iteration" in params:
            continue
        raised = _raises(getattr(schedules, kind), params)
        told = bool(flaws("scheduler", {"type": kind, "params": params}))
        assert told or not raised, params
        assert raised or not told or any(isinstance(value, str | bool) for value in params.values()), params


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop", "NAdam", "Adafactor"])
def test_what_an_optimizer_of_torchs_raises_at_is_a_flaw(kind: str) -> None:
    extra = {"torch_adam": True} if kind == "AdamW" else {}
    known = table.SECTIONS[f"optimizer {kind}"]
    tried = [{"learning_rate": 1}, *({name: value} for name in ("lr", "eps", "weight_decay") for value in NUMBERS)]
    tried += [{"betas": value} for value in ([0.9, 0.9], [0, 1], [1.5, 0.9], 0.9)]
    for params in tried:
        if not {*params} & {*known, "learning_rate"}:
            continue
        raised = _raises(getattr(torch.optim, kind), params)
        told = bool(flaws("optimizer", {"type": kind, "params": extra | params}))
        assert told or not raised, params
        assert raised or not told or any(isinstance(value, str | bool | list) for value in params.values()), params


def _raises(cls: Any, params: dict[str, Any]) -> bool:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    model = [weight] if issubclass(cls, torch.optim.Optimizer) else torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    try:
        cls(model, **params)
    except Exception:  # whatever stops it
        return True
    return False
