"""What becomes of two settings of DeepSpeed's config at once, and of its sections beside what the config asks for.

A row of ``golden/pairs*.txt`` is one setting, a column the other one; each field is a digest of the outcome in full.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any

import pytest
from attrs import evolve
from returns.result import Success

from prepkit import codec, planner
from prepkit.config import (
    BF16,
    FP8,
    FP16,
    MSAMP,
    AdamW,
    AsStored,
    ClipNorm,
    Config,
    DeepSpeed,
    Group,
    Intent,
    Schedule,
    TorchAO,
)
from prepkit.facts import Facts, GroupFact, OptimizerFacts, SchedulerFacts
from prepkit.predict import predict
from prepkit.resolve.deepspeed.data import put
from prepkit.testing import tiny_facts, tiny_loader
from prepkit.testing.tiny import LIBRARIES
from tests.resolve.deepspeed.test_every_key import GOLDEN, PARAMS, TYPES, VALUES
from tests.support.drawn_runs import JSON, OPTIMIZERS
from tests.support.golden import assert_golden

SETTINGS = tuple((path, value) for path, values in JSON for value in values)
RUNS: dict[str, Config] = {
    "as stored, stage 2": Config(engine=DeepSpeed(stage=2)),
    "bf16, stage 3": Config(engine=DeepSpeed(stage=3), precision=BF16(), accumulation=2, clip=ClipNorm(1.0)),
    "fp16, offloaded": Config(engine=DeepSpeed(stage=1, offload_optimizer="cpu"), precision=FP16()),
    "inference": Config(engine=DeepSpeed(stage=3), intent=Intent.INFERENCE),
    "nothing": Config(engine=DeepSpeed(stage=None, micro_batch=2)),
}
SCHEDULES = (
    None,
    Schedule(),
    Schedule(warmup_steps=3, total_steps=20),
    Schedule(warmup_steps=0, min_lr=1e-5, max_lr=1e-2),
)


LOADERS = ((tiny_loader(),), (), (evolve(tiny_loader(), batch_size=None),))


def outcome(cfg: Config, facts: Facts) -> str:
    """Four digits that change with any finding, step or byte."""
    made = planner.plan(cfg, facts)
    plan = made.unwrap() if isinstance(made, Success) else None
    return codec.digest(repr((plan.steps, plan.warnings, predict(plan)) if plan else made))[-4:]


def small(cfg: Config, **changes: Any) -> Facts:
    trains = cfg.intent is Intent.TRAINING and cfg.optimizer is None
    facts = tiny_facts(world=4, loader=tiny_loader(), optimizer=trains)
    facts = evolve(facts, env=evolve(facts.env, libraries=LIBRARIES))
    return evolve(facts, **changes)


def configured(cfg: Config, data: dict[str, Any]) -> Config:
    return evolve(cfg, engine=evolve(cfg.engine, config=json.dumps(data)))


def pairs(run: str) -> Iterator[str]:
    """Every two settings under this run that stand in different places."""
    cfg = RUNS[run]
    for number, (path, value) in enumerate(SETTINGS):
        row = []
        for other, second in SETTINGS[number:]:
            data: dict[str, Any] = {}
            put(data, path, deepcopy(value))
            if isinstance(data.get(other.partition(".")[0], {}), dict):
                put(data, other, deepcopy(second))
            row.append(outcome(configured(cfg, data), small(cfg)))
        yield f"{path} {json.dumps(value)}: {' '.join(row)}"


@pytest.mark.parametrize("run", RUNS)
def test_two_settings_at_once_have_the_outcome_that_they_had(run: str) -> None:
    least = 1 if run in ("as stored, stage 2", "bf16, stage 3") else 3
    lines = (line for number, line in enumerate(pairs(run)) if number % least == 0)
    assert_golden(GOLDEN / f"pairs of {run}.txt", "\n".join(lines) + "\n")


def test_optimizers_that_are_given_have_the_outcome_that_they_had() -> None:
    lines = []
    forms = [(name, module, options) for name, module, options in OPTIMIZERS]
    forms += [(name, "torch.optim", {}) for name in ("Adagrad", "SparseAdam")]
    forms += [("Adagrad32bit", "bitsandbytes.optim", {}), ("DeepSpeedCPUAdagrad", "deepspeed.ops.adagrad", {})]
    for name, module, options in forms:
        said = ({}, {"zero_allow_untested_optimizer": False}, {"zero_force_ds_cpu_optimizer": False})
        row = []
        for stage, device, data in product((0, 1, 3), (None, "cpu"), said):
            cfg = Config(engine=DeepSpeed(stage=stage, offload_optimizer=device, config=json.dumps(data)))
            facts = small(cfg)
            assert facts.optimizer
            groups = tuple(
                GroupFact(slots=group.slots, options=tuple(sorted({"lr": 1e-3, **options}.items())))
                for group in facts.optimizer.groups
            )
            given = OptimizerFacts(name=name, module=module, groups=groups)
            row.append(outcome(cfg, evolve(facts, optimizer=given)))
        lines.append(f"{module}.{name} {json.dumps(options)}: {' '.join(row)}")
    assert_golden(GOLDEN / "pairs of optimizers.txt", "\n".join(lines) + "\n")


def test_schedules_have_the_outcome_that_they_had() -> None:
    lines = []
    kinds = (*TYPES[-6:], None, "warmuplr")
    params = ({}, dict.fromkeys(PARAMS[9:], "auto"), dict.fromkeys(PARAMS[9:], 3), {"warmup_num_steps": 0, "odd": 1})
    for kind, numbers in product(kinds, params):
        row = []
        for schedule, own in product(SCHEDULES, (True, False)):
            section = {} if kind is None else {"scheduler": {"type": kind, "params": numbers}}
            maker: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 0.25}}}
            data = json.dumps(section if own else {**section, **maker})
            cfg = Config(engine=DeepSpeed(stage=2, config=data, schedule=schedule))
            facts = small(cfg) if own else small(cfg, optimizer=None)
            ticks = SchedulerFacts(name=kind or "StepLR", drives_optimizer=own)
            row += [outcome(cfg, facts), outcome(evolve(cfg, scheduler_ticks=2), evolve(facts, scheduler=ticks))]
        lines.append(f"{kind} {json.dumps(numbers)}: {' '.join(row)}")
    assert_golden(GOLDEN / "pairs of schedules.txt", "\n".join(lines) + "\n")


def test_optimizers_that_are_to_be_made_have_the_outcome_that_they_had() -> None:
    lines = []
    specs = (AdamW(lr=0.5), AdamW(groups=(Group(names=("*norm*",), lr=0.1),)), AdamW(weight_decay=0.2))
    values = ("auto", 0.5, 0.1, [0.9, 0.99], None)
    for kind, name in product(("AdamW", "adam", "Lion", "SGD", "Muon", None), (*PARAMS[:9], None)):
        row = []
        for spec, value, offload in product(specs, values, (None, "cpu")):
            section: dict[str, Any] = {"params": {name: value}} if name else {}
            data = {"optimizer": {"type": kind, **section} if kind else section}
            cfg = Config(
                engine=DeepSpeed(stage=2, config=json.dumps(data), offload_optimizer=offload),
                optimizer=spec,
                precision=AsStored(),
            )
            row.append(outcome(cfg, small(cfg)))
        lines.append(f"{kind} {name}: {' '.join(row)}")
    assert_golden(GOLDEN / "pairs of specs.txt", "\n".join(lines) + "\n")


def test_batches_have_the_outcome_that_they_had() -> None:
    lines = []
    said = (None, "auto", 0, 2, 30, 32)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for whole, micro, steps in product(said, said, (None, "auto", 0, 2)):
        data = {name: value for name, value in zip(names, (whole, micro, steps), strict=True) if value is not None}
        row = []
        for asked, accumulation, total, loaders in product((None, 2, 0, -4), (None, 2), (None, 32, 0), LOADERS):
            engine = DeepSpeed(stage=1, micro_batch=asked, config=json.dumps(data))
            cfg = Config(engine=engine, accumulation=accumulation, global_batch=total)
            row.append(outcome(cfg, small(cfg, loaders=loaders)))
        lines.append(f"{json.dumps(data)}: {' '.join(row)}")
    assert_golden(GOLDEN / "pairs of batches.txt", "\n".join(lines) + "\n")


def test_the_section_of_msamp_has_the_outcomes_that_it_had() -> None:
    lines = []
    for key in ("enabled", "opt_level", "use_te", "odd", None):
        row = []
        for stage, backend, value in product((1, 3), (MSAMP(), TorchAO(), MSAMP(opt_level="O1")), VALUES):
            data = {"msamp": {key: value} if key else value}
            cfg = Config(engine=DeepSpeed(stage=stage, config=json.dumps(data)), precision=FP8(backend=backend))
            row.append(outcome(cfg, small(cfg)))
        lines.append(f"{key}: {' '.join(row)}")
    assert_golden(GOLDEN / "pairs of msamp.txt", "\n".join(lines) + "\n")
