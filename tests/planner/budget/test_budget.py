"""The memory of a device: what is refused, what is warned of, and which changes are proposed."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

import prepkit as pk
from prepkit import config, planner
from prepkit.config import BF16, DDP, FSDP2, AdamW, BroadcastWeights, Config, Mesh, OffloadToCPU, WrapRoot
from prepkit.facts import Env, Facts
from prepkit.findings import Finding, Severity
from prepkit.findings.text import in_bytes
from prepkit.planner.budget import Fit, bounds, typed
from prepkit.predict import predict
from prepkit.rules import RULES
from prepkit.rules.memory import PLANNED_RULES, Held
from prepkit.testing.tiny import tiny_facts, tiny_model
from tests.support.llama_facts import facts, fsdp2
from tests.support.plans import PLANS, assert_rendered

NODES = Config(engine=FSDP2(), mesh=Mesh(replicate=8, shard=8), precision=BF16(), optimizer=AdamW())
"""70B on 64 ranks: copies over the nodes."""


def refused(cfg: Config, seen: Facts) -> tuple[Finding, ...]:
    return planner.plan(cfg, seen).failure()


def test_what_certainly_exceeds_the_device_is_an_error_with_the_changes_that_fit() -> None:
    (found,) = refused(NODES, facts("70B", 64, memory="80GB"))
    assert (found.rule, found.severity, found.where) == ("memory.exceeds-device", Severity.ERROR, "env.memory")
    assert_rendered("memory", str(found))


def test_an_override_accepts_it_and_the_plan_says_so() -> None:
    cfg = evolve(NODES, overrides=("memory.exceeds-device",))
    made = planner.plan(cfg, facts("70B", 64, memory="80GB")).unwrap()
    assert [one.rule for one in made.overridden] == ["memory.exceeds-device"]
    assert [one.rule for one in made.warnings] == []


def test_what_may_exceed_the_device_is_a_warning() -> None:
    made = planner.plan(NODES, facts("70B", 64, memory="145GiB")).unwrap()
    assert [(one.rule, one.severity) for one in made.warnings] == [("memory.may-exceed-device", Severity.WARNING)]


@pytest.mark.parametrize("torch", ["2.9.0", "2.13.0"])
def test_only_numbers_that_were_compared_refuse_a_plan(torch: str) -> None:
    made = planner.plan(NODES, facts("70B", 64, memory="80GB", torch=torch))
    if torch == "2.9.0":
        assert [one.rule for one in made.unwrap().warnings] == ["memory.may-exceed-device"]
    else:
        assert [one.rule for one in made.failure()] == ["memory.exceeds-device"]


def test_a_budget_is_asked_only_where_the_memory_of_the_device_is_known() -> None:
    assert not planner.plan(NODES, facts("70B", 64)).unwrap().warnings
    small = facts("70B", 64, memory="1GiB")
    assert not planner.plan(evolve(NODES, device="cpu"), small).unwrap().warnings  # that is not the memory of the CPU


def test_ranks_of_a_node_that_all_build_the_model_are_added_up() -> None:
    """8 ranks with 8 billion parameters in float32, 32 GB each; one of them sends where the config says so."""
    cfg = Config(engine=FSDP2(), optimizer=AdamW())
    for host, found in (("384GB", []), ("240GB", [("memory.exceeds-host", Severity.WARNING)])):
        made = planner.plan(cfg, facts("8B", 16, host_memory=host)).unwrap()
        assert [(one.rule, one.severity) for one in made.warnings] == found
    assert "Each of 8 ranks of a node holds 29.92 GiB there when it builds its model" in made.warnings[0].what
    sends = planner.plan(evolve(cfg, weights=BroadcastWeights()), facts("8B", 16, host_memory="240GB")).unwrap()
    assert "memory.exceeds-host" not in {one.rule for one in sends.warnings}


def test_what_ranks_of_a_node_keep_offloaded_has_to_fit_together() -> None:
    cfg = Config(engine=FSDP2(offload=OffloadToCPU()), optimizer=AdamW())
    held = predict(planner.plan(cfg, facts("8B", 16)).unwrap()).fullest.total("host")
    assert planner.plan(cfg, facts("8B", 16, host_memory="384GiB")).unwrap().warnings == ()
    (found,) = refused(cfg, facts("8B", 16, host_memory=8 * held - 1))
    assert (found.rule, found.severity) == ("memory.exceeds-host", Severity.ERROR)
    assert f"Each of 8 ranks of a node holds {in_bytes(held)} there when it keeps offloaded" in found.what


def test_check_says_it_too_and_stays_silent_where_there_is_no_plan() -> None:
    seen = facts("70B", 64, memory="80GB")
    assert [one.rule for one in pk.check(NODES, seen)] == ["memory.exceeds-device"]
    assert [one.rule for one in pk.check(evolve(NODES, mesh=Mesh(replicate=3)), seen)] == ["mesh.not-world-size"]
    with pytest.raises(pk.PlanRejected, match=r"memory\.exceeds-device"):
        pk.build_plan(NODES, seen)


def test_every_proposal_is_a_legal_plan_that_fits_and_no_smaller_one_does() -> None:
    plan = fsdp2("70B", 64, NODES)
    fit = pk.fits(plan, "80GB")
    assert (fit.verdict, bool(fit)) == ("does not fit", False)
    assert fit.options
    for option in fit.options:
        again = planner.plan(option.config, evolve(plan.facts, env=evolve(plan.facts.env, memory=fit.memory))).unwrap()
        assert bounds(predict(again)) == (option.floor, option.ceiling)
        assert option.ceiling <= fit.memory
        assert len(option.diff) == 1
    traffic = [option.between + option.copied for option in fit.options]
    assert traffic == sorted(traffic)
    assert {Mesh(replicate=2, shard=32), None} <= {option.config.mesh for option in fit.options}
    assert Mesh(replicate=4, shard=16) not in {option.config.mesh for option in fit.options}  # 88 GiB


def test_two_changes_are_proposed_where_none_alone_fits() -> None:
    fit = pk.fits(fsdp2("70B", 64, Config(engine=DDP(), optimizer=AdamW())), "24GiB")
    assert fit.verdict == "does not fit"
    assert fit.options
    assert all(len(option.diff) >= 2 for option in fit.options)
    assert all(isinstance(option.config.engine, FSDP2) for option in fit.options)


@pytest.mark.parametrize(
    ("cfg", "changed"),
    [
        (Config(engine=FSDP2(wrap=WrapRoot()), optimizer=AdamW()), "engine"),
        (Config(engine=FSDP2(), accumulation=8, precision=BF16(), optimizer=AdamW()), "accumulation"),
        (Config(engine=DDP(gradient_as_bucket_view=False), optimizer=AdamW()), "engine"),
    ],
)
def test_units_accumulation_and_bucket_views_are_among_the_changes(cfg: Config, changed: str) -> None:
    plan = fsdp2("8B", 64, cfg)
    tight = bounds(predict(plan))[1] - 2**30
    names = {line.partition("=")[0] for option in pk.fits(plan, tight).options for line in option.diff}
    assert changed in names


def test_nothing_fits_into_nothing_and_everything_into_enough() -> None:
    plan = fsdp2("8B", 64)
    assert "no change of mesh" in str(pk.fits(plan, 2**20))
    enough = pk.fits(plan, "2TiB")
    assert enough
    assert str(enough).startswith("fits: of 2.00 TiB the fullest rank needs")
    assert "left for activations" in str(enough)


def test_activations_that_exceed_the_device_alone_are_not_answered_with_more_ranks() -> None:
    plan = fsdp2("8B", 64)
    alone = str(pk.fits(plan, 2**30, activations=2**31))
    assert "activations of one micro-batch alone need 2.00 GiB, on any number of ranks" in alone
    assert "take smaller micro-batches" in alone
    assert "more ranks" not in alone
    assert "take more ranks or memory" in str(pk.fits(plan, 2**30, activations=2**20))


def test_an_optimizer_that_is_not_predicted_is_named_beside_the_verdict() -> None:
    seen = tiny_facts(tiny_model())
    assert seen.optimizer is not None
    seen = evolve(seen, optimizer=evolve(seen.optimizer, name="Muon", module="muon"))
    fit = planner.fits(planner.plan(Config(), seen).unwrap(), 2**30)
    assert "not counted either: optimizer state: muon.Muon is not in the tables" in str(fit)


def test_the_engine_without_formulas_is_neither_refused_nor_called_fitting() -> None:
    plan = PLANS["xla"]()
    (everything,) = predict(plan).not_predicted
    fit = planner.fits(plan, 1)
    assert fit == Fit(memory=1, floor=0, ceiling=0, verdict="not predicted", left_out=(everything,))
    assert not fit
    assert str(fit) == f"not predicted\n  {everything}"


def test_the_rules_about_memory_are_known_to_overrides_and_to_nobody_twice() -> None:
    assert not {rule.id for rule in PLANNED_RULES} & {rule.id for rule in RULES}
    for rule in PLANNED_RULES:
        assert not list(rule.check(Held(rank=0, floor=1, ceiling=2, memory=2)))
        cfg = Config(overrides=(rule.id,))
        assert planner.plan(cfg, tiny_facts()).unwrap().overridden == ()


def test_a_config_is_shown_as_it_is_typed() -> None:
    assert typed(FSDP2(offload=OffloadToCPU(), wrap=pk.wrap.WrapClasses(("Block",)))) == (
        "FSDP2(wrap=WrapClasses(('Block',)), offload=OffloadToCPU())"
    )
    assert eval(typed(NODES), vars(config)) == NODES


def test_env_memory_of_a_cpu_that_is_declared_counts() -> None:
    seen = evolve(tiny_facts(), env=Env.declare(world_size=1, device="cpu", memory=64, torch="2.13"))
    assert [one.rule for one in refused(Config(), seen)] == ["memory.exceeds-device"]


def test_golden_is_there() -> None:
    assert (Path(__file__).parents[2] / "render" / "golden" / "memory.txt").is_file()
