"""Optimizers under engines, schedulers against steps: what the table and the facts say is refused."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest
import torch
from attrs import evolve
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import prepkit as pk
from prepkit.applying.handlers.loaders import _source
from prepkit.config import DDP, Config, DeepSpeed, Schedule, ShardLoaders
from prepkit.facts import Facts, MemberFact
from prepkit.observe.loaders import loader_facts
from prepkit.observe.optimizer import horizon, scheduler_facts
from prepkit.resolve.loaders import batches, rounds
from prepkit.resolve.optimizer_table import FAILS, MEASURED, OTHERWISE, RAISES, places
from prepkit.rules import check
from prepkit.rules.optimizer import SHAPED
from prepkit.steps import ShardLoader
from prepkit.testing.tiny import tiny_facts, tiny_loader
from tests.support.rule_findings import finding_of, rule_ids

PLACES: dict[str, Config] = {
    "DDP": Config(engine=pk.DDP()),
    "FSDP1": Config(engine=pk.FSDP1()),
    "FSDP1, flat": Config(engine=pk.FSDP1(use_orig_params=False)),
    "FSDP2": Config(engine=pk.FSDP2()),
    "FSDP2, offloaded": Config(engine=pk.FSDP2(offload=pk.OffloadToCPU())),
    "TensorParallel": Config(engine=pk.TensorParallel()),
    **{f"ZeRO {stage}": Config(engine=pk.DeepSpeed(stage=stage)) for stage in range(4)},
}
REFUSE = {"optimizer.under-engine", "fsdp1.shaped-optimizer"}


def given(key: str) -> Facts:
    library, _, name = key.partition(".")
    facts = tiny_facts(world=2)
    assert facts.optimizer is not None
    return evolve(facts, optimizer=evolve(facts.optimizer, name=name, module=f"{library}.some"))


@pytest.mark.parametrize("key", FAILS)
def test_every_engine_under_which_an_optimizer_fails_is_refused_and_no_other(key: str) -> None:
    for place, cfg in PLACES.items():
        assert places(cfg) == (place,)
        refused = REFUSE & set(rule_ids(cfg, given(key)))
        assert bool(refused) == (place in FAILS[key]), f"{key} under {place}: {refused or 'no finding'}"
        if "optimizer.under-engine" in refused:
            says = finding_of("optimizer.under-engine", cfg, given(key)).what.partition("it trains as alone under ")[2]
            good = [other for other in MEASURED if other not in FAILS[key] and "," not in other]
            assert says == f"{' and '.join(good)}."


def test_layers_that_are_cut_under_fsdp2_count_as_both() -> None:
    cfg = Config(engine=pk.FSDP2(), mesh=pk.Mesh(shard=2, tensor=2))
    assert places(cfg) == ("FSDP2", "TensorParallel")
    assert {place for row in FAILS.values() for place in row} <= {*MEASURED}
    assert {how for row in FAILS.values() for how in row.values()} == {RAISES, OTHERWISE}


def test_one_of_several_optimizers_is_refused_by_its_place() -> None:
    facts = tiny_facts(world=2)
    assert facts.optimizer is not None
    (group,) = facts.optimizer.groups
    two = (evolve(group, slots=group.slots[:2]), evolve(group, slots=group.slots[2:]))
    members = tuple(MemberFact(name=name, module="torch.optim.x", groups=1) for name in ("AdamW", "Rprop"))
    several = evolve(facts, optimizer=evolve(facts.optimizer, groups=two, members=members, module=""))
    (found,) = check(Config(engine=pk.FSDP2()), several)
    assert (found.rule, found.where) == ("optimizer.under-engine", "optimizer[1]")


def test_an_asked_for_optimizer_is_held_against_the_table_as_a_given_one() -> None:
    facts = tiny_facts(world=2, optimizer=False)
    assert "optimizer.under-engine" in rule_ids(Config(engine=pk.FSDP2(), optimizer=pk.optim.Adafactor()), facts)
    assert "fsdp1.shaped-optimizer" in rule_ids(Config(engine=pk.FSDP1(), optimizer=pk.optim.Adafactor()), facts)
    assert not REFUSE & set(rule_ids(Config(engine=pk.DDP(), optimizer=pk.optim.Adafactor()), facts))


def test_lamb_of_any_library_is_refused_where_zero_steps_parts_of_all_parameters() -> None:
    assert "optimizer.under-engine" in rule_ids(Config(engine=pk.DeepSpeed(stage=2)), given("apex.LAMB"))
    assert "optimizer.under-engine" not in rule_ids(Config(engine=pk.DeepSpeed(stage=0)), given("apex.LAMB"))


@pytest.mark.parametrize("name", sorted(SHAPED))
def test_what_computes_from_whole_parameters_is_refused_under_zero_but_where_its_library_was_measured(
    name: str,
) -> None:
    for library, stage in product(("torch", "deepspeed", "apex", "own"), range(3)):
        refused = "optimizer.under-engine" in rule_ids(PLACES[f"ZeRO {stage}"], given(f"{library}.{name}"))
        measured = f"ZeRO {stage}" in FAILS.get(f"{library}.{name}", {})
        assert refused == (measured or (stage > 0 and library not in ("torch", "deepspeed"))), (library, stage)


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def _partial(optimizer: torch.optim.Optimizer) -> Any:
    from functools import partial

    def rate(step: int, *, num_training_steps: int) -> float:
        return max(0.0, 1 - step / num_training_steps)

    return lr_scheduler.LambdaLR(optimizer, partial(rate, num_training_steps=70))  # as transformers makes them


@pytest.mark.parametrize(
    ("make", "ticks"),
    [
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=50), 50),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=40), 40),
        (lambda o: lr_scheduler.PolynomialLR(o, total_iters=30), 30),
        (lambda o: lr_scheduler.LinearLR(o, total_iters=5), None),  # a warm-up: what follows is meant
        (lambda o: lr_scheduler.LambdaLR(o, lambda _: 1.0), None),
        (_partial, 70),
        (
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, total_iters=5), lr_scheduler.CosineAnnealingLR(o, T_max=40)], [5]
            ),
            45,
        ),
    ],
)
def test_the_horizon_of_a_scheduler_is_read_where_it_has_one(make: Any, ticks: int | None) -> None:
    assert horizon(make(_optimizer())) == ticks


def test_a_scheduler_is_refused_when_it_runs_out_and_warned_of_when_it_never_ends() -> None:
    optimizer = _optimizer()
    for ticks, steps, per, rules in (
        (100, 100, 1, []),
        (100, 99, 1, []),
        (100, 101, 1, ["scheduler.runs-out"]),  # OneCycleLR raises at the tick after its last
        (400, 100, 4, []),
        (100, 100, 4, ["scheduler.runs-out"]),
        (100, 50, 1, ["scheduler.never-ends"]),
        (100, 50, 0, []),
        (10_100, 10_000, 1, []),  # one in a hundred is rounding
        (10_101, 10_000, 1, ["scheduler.never-ends"]),
    ):
        seen = scheduler_facts(lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=ticks), optimizer)
        facts = evolve(tiny_facts(), scheduler=seen)
        found = check(Config(total_steps=steps, scheduler_ticks=per), facts)
        assert [finding.rule for finding in found] == rules, (ticks, steps, per)


def test_a_scheduler_made_for_the_batches_of_a_loader_that_is_then_divided_is_warned_of() -> None:
    optimizer = _optimizer()
    accelerates = ShardLoaders(whole_batches=True)
    for ticks, world, of_loader, config, told in (
        (16, 2, {}, {}, "2 passes of the 8 batches of loaders[0] as it was given. With 2 ranks a pass has 4 steps"),
        (16, 1, {}, {"accumulation": 4}, "With accumulation=4 a pass has 2 steps: after 4 it is not at its end."),
        (14, 2, {"length": 26}, {"accumulation": 2}, "With 2 ranks and accumulation=2 a pass has 2 steps"),
        (16, 1, {}, {}, ""),
        (12, 2, {}, {}, ""),  # three passes of 4 steps
        (800, 2, {}, {}, ""),  # a round number
        (16, 2, {}, {"total_steps": 16}, ""),
        (16, 2, {}, {"scheduler_ticks": 2}, ""),
        (16, 2, {}, {"scheduler_ticks": 0}, ""),
        (16, 2, {}, {"loaders": accelerates}, ""),
        (16, 2, {}, {"loaders": ShardLoaders(split_batches=True)}, ""),
        (16, 2, {"iterable": True}, {}, ""),
    ):
        seen = scheduler_facts(lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=ticks), optimizer)
        loader = tiny_loader(**({"length": 32, "batch_size": 4} | of_loader))
        facts = evolve(tiny_facts(world=world, loader=loader), scheduler=seen)
        found = [one for one in check(Config(engine=DDP(), **config), facts) if one.rule == "scheduler.undivided"]
        assert [told in one.what for one in found] == [True] * bool(told), (ticks, world, of_loader, config)


def test_the_batches_of_a_rank_that_rules_count_are_those_that_it_reads() -> None:
    for length, drops, last, parts, size in product((3, 8, 13), (False, True), (False, True), (1, 2, 3), (1, 4)):
        given = DataLoader(list(range(length)), batch_size=size, drop_last=last)
        facts = loader_facts(given)
        step = ShardLoader(index=0, shuffle=False, seed=3, drop_last=drops)
        here = _source(step, given, parts, 0, None).length()
        assert (rounds(ShardLoaders(drop_last=drops), facts, parts), batches(facts)) == (here, len(given))


@pytest.mark.parametrize(
    ("params", "schedule", "rules"),
    [
        ({"total_num_steps": 100}, None, []),
        ({"total_num_steps": 40}, None, ["scheduler.runs-out"]),
        ({"total_num_steps": "auto"}, Schedule(total_steps=40), ["scheduler.runs-out"]),
        ({"total_num_steps": "auto"}, Schedule(total_steps=400), ["scheduler.never-ends"]),
        ({"warmup_num_steps": "auto"}, Schedule(total_steps=40), []),  # WarmupLR stays at its rate: it has no total
    ],
)
def test_a_scheduler_of_deepspeed_is_held_against_the_planned_steps(
    params: dict[str, Any], schedule: Schedule | None, rules: list[str]
) -> None:
    kind = "WarmupDecayLR" if "total_num_steps" in params else "WarmupLR"
    section = {"scheduler": {"type": kind, "params": params}}
    engine = DeepSpeed(stage=1, micro_batch=1, schedule=schedule, config=json.dumps(section))
    found = check(Config(engine=engine, total_steps=100), tiny_facts(world=2))
    assert [finding.rule for finding in found if finding.rule.startswith("scheduler.")] == rules


def test_a_scheduler_that_wants_a_metric_is_stepped_by_the_user() -> None:
    optimizer = _optimizer()
    seen = scheduler_facts(lr_scheduler.ReduceLROnPlateau(optimizer), optimizer)
    facts = evolve(tiny_facts(), scheduler=seen)
    assert rule_ids(Config(), facts) == ["scheduler.metric"]
    assert rule_ids(Config(scheduler_ticks=0), facts) == []


def test_a_closure_makes_all_gradients_of_a_step() -> None:
    facts = given("torch.LBFGS")
    one = evolve(facts, env=evolve(facts.env, world_size=1))
    assert "optimizer.closure" not in rule_ids(Config(), one)
    assert "optimizer.closure" in rule_ids(Config(accumulation=2), one)
    assert "optimizer.closure" in rule_ids(Config(engine=pk.DeepSpeed(stage=0)), facts)


def test_an_optimizer_that_steps_with_a_closure_stands_alone() -> None:
    facts = tiny_facts()
    assert facts.optimizer is not None
    (group,) = facts.optimizer.groups
    two = (evolve(group, slots=group.slots[:2]), evolve(group, slots=group.slots[2:]))
    members = tuple(MemberFact(name=name, module="torch.optim.x", groups=1) for name in ("AdamW", "LBFGS"))
    several = evolve(facts, optimizer=evolve(facts.optimizer, groups=two, members=members, module=""))
    found = finding_of("optimizer.closure", Config(), several)
    assert (found.where, "beside another optimizer" in found.what) == ("optimizer[1]", True)


@pytest.mark.parametrize("engine", [pk.Single(), *(cfg.engine for cfg in PLACES.values()), pk.XLA()], ids=str)
def test_an_optimizer_with_a_list_of_its_own_is_refused_where_parameters_are_replaced(engine: pk.Engine) -> None:
    facts = tiny_facts(world=2)
    assert facts.optimizer is not None
    keeps = evolve(facts, optimizer=evolve(facts.optimizer, keeps_own_list=True))
    stays = isinstance(engine, pk.Single | pk.DDP | pk.XLA)
    assert ("optimizer.keeps-own-list" in rule_ids(Config(engine=engine), keeps)) is not stays
