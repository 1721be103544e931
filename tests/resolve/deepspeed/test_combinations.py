"""The 60 combinations of config sections and objects that behaviour.md lists (DS-50 to DS-80), one row each."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from prepkit.config import AdamW, Config, DeepSpeed, Schedule
from prepkit.facts import Facts, SchedulerFacts
from prepkit.findings import errors
from prepkit.planner import plan
from prepkit.rules import check
from prepkit.steps import CreateOptimizer, InitializeDeepSpeed
from prepkit.testing.tiny import tiny_facts

OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
AUTO = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
SCHEDULER = {"type": "WarmupDecayLR", "params": dict.fromkeys(AUTO, "auto")}
LITERAL_OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.5}}
LITERAL_SCHEDULER = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
SCHEDULERS = {
    "-": (None, None),
    "R": (SchedulerFacts(name="StepLR", drives_optimizer=True), None),
    "D": (None, Schedule(warmup_steps=10, total_steps=100)),
    "Dc": (SchedulerFacts(name="halving", drives_optimizer=False, factory=True), None),
    "N": (SchedulerFacts(name="WarmupLR", drives_optimizer=True), None),
}
"""As in the behaviour reference: none, real torch, numbers for a section, a function, one of DeepSpeed's classes."""

ALONE, SECOND, TWICE = "scheduler.without-optimizer", "deepspeed.two-optimizers", "deepspeed.two-schedulers"
NUMBERS, UNSAID, NEEDS = "deepspeed.schedule-alone", "deepspeed.auto", "deepspeed.needs-optimizer"

# cfg-opt, cfg-sch, optimizer: for each scheduler (-, R, D, Dc, N) the owner of the scheduler, or the rules that refuse.
# ``none``: a plan without a scheduler; ``prepkit`` or ``DeepSpeed``: who steps it.
TABLE: dict[tuple[bool, bool, str], tuple[str | set[str], ...]] = {
    (False, False, "-"): ("none", {ALONE}, {NUMBERS}, {ALONE}, {ALONE}),  # DS-50 DS-51 DS-52
    (False, False, "R"): ("none", "prepkit", {NUMBERS}, "DeepSpeed", "DeepSpeed"),  # DS-53 … DS-57
    (False, False, "D"): ("none", {ALONE}, {NUMBERS}, "DeepSpeed", {ALONE}),  # DS-58
    (False, True, "-"): (  # DS-59 … DS-62
        {NUMBERS, UNSAID},
        {NUMBERS, UNSAID, TWICE, ALONE},
        {NUMBERS, UNSAID},
        {NUMBERS, UNSAID, TWICE, ALONE},
        {NUMBERS, UNSAID, TWICE, ALONE},
    ),
    (False, True, "R"): ({UNSAID}, {UNSAID, TWICE}, "DeepSpeed", {UNSAID, TWICE}, {UNSAID, TWICE}),  # DS-63 … DS-66
    (False, True, "D"): (  # DS-67
        {UNSAID},
        {UNSAID, TWICE, ALONE},
        "DeepSpeed",
        {UNSAID, TWICE},
        {UNSAID, TWICE, ALONE},
    ),
    (True, False, "-"): ({UNSAID}, {UNSAID, ALONE}, {UNSAID, NUMBERS}, {UNSAID}, {UNSAID, ALONE}),  # DS-68 DS-69
    (True, False, "R"): (  # DS-70
        {SECOND, UNSAID},
        {SECOND, UNSAID},
        {SECOND, UNSAID, NUMBERS},
        {SECOND, UNSAID},
        {SECOND, UNSAID},
    ),
    (True, False, "D"): ("none", {ALONE}, {NUMBERS}, "DeepSpeed", {ALONE}),  # DS-71 … DS-74
    (True, True, "-"): (  # DS-75 DS-76
        {UNSAID},
        {UNSAID, TWICE, ALONE},
        {UNSAID},
        {UNSAID, TWICE},
        {UNSAID, TWICE, ALONE},
    ),
    (True, True, "R"): (  # DS-77
        {SECOND, UNSAID},
        {SECOND, UNSAID, TWICE},
        {SECOND, UNSAID},
        {SECOND, UNSAID, TWICE},
        {SECOND, UNSAID, TWICE},
    ),
    (True, True, "D"): (  # DS-78 … DS-80
        {UNSAID},
        {UNSAID, TWICE, ALONE},
        "DeepSpeed",
        {UNSAID, TWICE},
        {UNSAID, TWICE, ALONE},
    ),
}
CASES = [
    (*key, scheduler, outcome)
    for key, outcomes in TABLE.items()
    for scheduler, outcome in zip(SCHEDULERS, outcomes, strict=True)
]


def pair(
    sections: dict[str, Any], optimizer: str, scheduler: str, *, stage: int = 0, lr: float = 0.25
) -> tuple[Config, Facts]:
    """Stage 0, which has no opinion about the optimizer."""
    given, schedule = SCHEDULERS[scheduler]
    engine = DeepSpeed(stage=stage, micro_batch=4, schedule=schedule, config=sections)
    cfg = Config(engine=engine, optimizer=AdamW(lr=lr) if optimizer == "D" else None)
    return cfg, evolve(tiny_facts(world=2, optimizer=optimizer == "R"), scheduler=given)


def test_the_table_has_all_sixty_combinations() -> None:
    assert len({case[:4] for case in CASES}) == 60


@pytest.mark.parametrize(("cfg_opt", "cfg_sch", "optimizer", "scheduler", "outcome"), CASES)
def test_a_combination_is_planned_with_its_owner_or_refused_with_every_reason(
    cfg_opt: bool, cfg_sch: bool, optimizer: str, scheduler: str, outcome: str | set[str]
) -> None:
    sections = ({"optimizer": OPTIMIZER} if cfg_opt else {}) | ({"scheduler": SCHEDULER} if cfg_sch else {})
    cfg, facts = pair(sections, optimizer, scheduler)
    found = {finding.rule for finding in errors(check(cfg, facts))}
    if isinstance(outcome, set):
        assert found == outcome
        return
    assert found == set()
    made = plan(cfg, facts).unwrap()
    (step,) = (one.step for one in made.steps if isinstance(one.step, InitializeDeepSpeed))
    assert made.owners.scheduler == {"none": "nobody"}.get(outcome, outcome)
    assert step.scheduler == {"none": "outside", "prepkit": "outside"}.get(outcome, _maker(cfg_sch))
    assert step.optimizer == ("section" if cfg_opt else "none" if optimizer == "-" else "given")
    created = any(isinstance(one.step, CreateOptimizer) for one in made.steps)
    assert created == (optimizer == "D" and not cfg_opt)
    assert not any('"auto"' in one.value for one in step.settings)


def _maker(cfg_sch: bool) -> str:
    return "section" if cfg_sch else "handed over"


@pytest.mark.parametrize(
    ("sections", "optimizer", "row"),
    [
        ({"scheduler": LITERAL_SCHEDULER}, "R", "DS-63"),
        ({"optimizer": LITERAL_OPTIMIZER}, "-", "DS-68"),
        ({"optimizer": LITERAL_OPTIMIZER, "scheduler": LITERAL_SCHEDULER}, "-", "DS-75"),
        ({"optimizer": OPTIMIZER, "scheduler": LITERAL_SCHEDULER}, "D", "DS-78"),
    ],
)
def test_sections_with_literal_values_need_no_objects(sections: dict[str, Any], optimizer: str, row: str) -> None:
    cfg, facts = pair(sections, optimizer, "-")
    assert not errors(check(cfg, facts)), row


@pytest.mark.parametrize("stage", [0, 3])
def test_a_scheduler_section_without_any_optimizer_is_refused_for_that_alone_once_its_values_are_literal(
    stage: int,
) -> None:
    """DS-59: with values that are auto those are told as well."""
    for section, refused in ((LITERAL_SCHEDULER, {NUMBERS}), (SCHEDULER, {NUMBERS, UNSAID})):
        cfg, facts = pair({"scheduler": section}, "-", "-", stage=stage)
        assert {finding.rule for finding in errors(check(cfg, facts))} == refused


def test_literal_sections_and_a_function_are_refused_where_one_would_win_silently() -> None:
    cfg, facts = pair({"optimizer": LITERAL_OPTIMIZER, "scheduler": LITERAL_SCHEDULER}, "-", "Dc")
    assert {finding.rule for finding in errors(check(cfg, facts))} == {TWICE}  # DS-80


def test_numbers_of_spec_and_schedule_reach_the_sections() -> None:
    cfg, facts = pair({"optimizer": OPTIMIZER, "scheduler": SCHEDULER}, "D", "D")
    (step,) = (one.step for one in plan(cfg, facts).unwrap().steps if isinstance(one.step, InitializeDeepSpeed))
    said = {".".join(one.path): json.loads(one.value) for one in step.settings}
    assert said["optimizer.params.lr"] == 0.25  # DS-21
    assert said["optimizer.params.weight_decay"] == 0.01
    assert said["scheduler.params.warmup_min_lr"] == 0.0  # DS-22
    assert said["scheduler.params.warmup_max_lr"] == 0.25
    assert said["scheduler.params.warmup_num_steps"] == 10
    assert said["scheduler.params.total_num_steps"] == 100  # optimizer steps: nobody multiplies them by the ranks


def test_a_warm_up_has_at_least_one_step() -> None:
    cfg, facts = pair({"optimizer": OPTIMIZER, "scheduler": SCHEDULER}, "D", "D")
    assert isinstance(cfg.engine, DeepSpeed)
    cfg = evolve(cfg, engine=evolve(cfg.engine, schedule=Schedule(warmup_steps=0, total_steps=100)))
    (step,) = (one.step for one in plan(cfg, facts).unwrap().steps if isinstance(one.step, InitializeDeepSpeed))
    said = {".".join(one.path): json.loads(one.value) for one in step.settings}
    assert said["scheduler.params.warmup_num_steps"] == 1  # SS-22: WarmupLR refuses 0


@pytest.mark.parametrize("name", AUTO)
def test_a_number_of_the_section_that_the_schedule_says_otherwise_is_told_but_for_the_highest_rate(name: str) -> None:
    section = {"type": "WarmupDecayLR", "params": {**dict.fromkeys(AUTO, "auto"), name: 7}}
    cfg, facts = pair({"optimizer": OPTIMIZER, "scheduler": section}, "D", "D")
    told = [one.what for one in check(cfg, facts) if one.rule == "deepspeed.two-places"]
    assert [f"`scheduler.params.{name}`" in what for what in told] == [True] * (name != "warmup_max_lr")


def test_the_warm_up_ends_at_the_rate_of_the_optimizer_that_is_given() -> None:
    cfg, facts = pair({"scheduler": SCHEDULER}, "R", "D")
    (step,) = (one.step for one in plan(cfg, facts).unwrap().steps if isinstance(one.step, InitializeDeepSpeed))
    said = {".".join(one.path): json.loads(one.value) for one in step.settings}
    assert said["scheduler.params.warmup_max_lr"] == 1e-3


def test_zero_needs_an_optimizer_at_stages_one_and_two_only() -> None:
    for stage, refused in ((0, False), (1, True), (2, True), (3, False)):
        found = {finding.rule for finding in errors(check(*pair({}, "-", "-", stage=stage)))}
        assert (NEEDS in found) is refused
