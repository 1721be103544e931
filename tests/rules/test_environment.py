"""The environment: devices, backends, launchers, versions of torch."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import (
    DDP,
    FSDP1,
    FSDP2,
    Config,
    DeepSpeed,
    Engine,
    Intent,
    OffloadToCPU,
    TPLayer,
    TPPlan,
    TPPlanFromModel,
)
from prepkit.facts import Env
from prepkit.findings import Severity
from prepkit.resolve.engines import ENGINES
from prepkit.resolve.resolved import Resolved
from prepkit.rules import RULES, check
from prepkit.rules.environment import BACKENDS, BY_RELEASE, ID, OLDEST
from prepkit.rules.rule import Rule
from prepkit.testing.tiny import tiny_facts, tiny_loader
from tests.support.counterexamples import COUNTEREXAMPLES
from tests.support.rule_findings import rule_ids, rule_ids_in


@pytest.mark.parametrize(
    ("backend", "rules"),
    [
        (None, []),
        ("cpu:gloo,cuda:nccl", []),
        ("gloo", []),
        ("nccl", ["environment.offload-backend"]),
        ("cpu:gloo", ["environment.backend"]),
        ("cpu:gloo, cuda:nccl", []),
        ("of-my-own", []),
    ],
)
def test_offloading_needs_a_backend_for_the_cpu_too(backend: str | None, rules: list[str]) -> None:
    for engine in (FSDP2(offload=OffloadToCPU()), FSDP1(offload=True)):
        assert rule_ids_in(Config(engine=engine, backend=backend)) == rules


SERVED = {
    "nccl": {"cuda"},
    "xccl": {"xpu"},
    "hccl": {"npu", "hpu"},
    "cncl": {"mlu"},
    "tccl": {"sdaa"},
    "mccl": {"musa"},
    "gloo": {"cpu", "cuda"},
    "of-my-own": BACKENDS,
}


@pytest.mark.parametrize("backend", SERVED)
def test_a_backend_is_refused_on_every_device_that_it_does_not_serve(backend: str) -> None:
    refused = {kind for kind in BACKENDS if rule_ids_in(Config(engine=DDP(), backend=backend), device=kind)}
    assert BACKENDS - refused == SERVED[backend]


def test_a_device_without_a_known_backend_is_refused_for_engines_of_several_processes_only() -> None:
    assert rule_ids_in(Config(engine=DDP()), device="mps") == ["environment.backend"]
    assert rule_ids_in(Config(engine=DDP(), device="cpu"), device="mps") == []
    assert rule_ids_in(Config(), device="mps", world_size=1) == []


def test_the_planner_knows_a_backend_for_every_device_that_passes() -> None:
    from prepkit.planner.pieces import COLLECTIVES

    refused = {kind for kind in (*COLLECTIVES, "mps", "tpu") if rule_ids_in(Config(engine=DDP()), device=kind)}
    assert refused == {"mps", "tpu"}


@pytest.mark.parametrize(
    ("device", "fix"),
    [
        ("cuda", None),
        ("cpu", None),
        ("cuda:0", 'Write device="cuda".'),
        ("cpu:0", 'Write device="cpu".'),
        ("xpu", "Leave config.device out"),
    ],
)
def test_a_device_is_asked_for_by_the_type_that_is_there(device: str, fix: str | None) -> None:
    cfg, facts = Config(device=device), tiny_facts(device="cuda")
    fixes = [finding.fix for finding in check(cfg, facts) if finding.rule == "environment.device"]
    assert [text[: len(fix or "")] for text in fixes] == ([fix] if fix else [])


def test_a_device_that_is_not_there_hides_no_finding_about_the_one_that_is() -> None:
    rules = rule_ids_in(Config(engine=DDP(), device="cuda", backend="nccl"), device="cpu")
    assert rules == ["environment.device", "environment.backend"]


@pytest.mark.parametrize(
    ("tasks", "fires"), [("4", 0), ("2", 0), ("1", 0), ("8", 1), ("3", 1), ("0", 1), ("", 0), ("4(x2)", 0)]
)
def test_slurm_tasks_divide_the_world_size(tasks: str, fires: int) -> None:
    rules = rule_ids_in(Config(engine=DDP()), variables=(("SLURM_NTASKS", tasks),))
    assert rules == ["environment.slurm-tasks"] * fires


@pytest.mark.parametrize(
    ("torch", "device", "ranks", "trains", "says"),
    [
        ("2.6.0", "cpu", 1, False, "fails where a unit is gathered"),
        ("2.6.1+cu124", "cpu", 4, True, "fails where a unit is gathered"),
        ("2.6.0", None, 4, True, ""),
        ("2.7.0", "cpu", 4, True, "adds the ranks' gradients up"),
        ("2.8.1+cpu", "cpu", 2, True, "adds the ranks' gradients up"),
        ("2.8.0", "cpu", 1, True, ""),
        ("2.8.0", "cpu", 4, False, ""),
        ("2.9.0", "cpu", 4, True, ""),
        ("", "cpu", 4, True, ""),
    ],
)
def test_fsdp2_gathers_and_averages_on_the_cpu(
    torch: str, device: str | None, ranks: int, trains: bool, says: str
) -> None:
    intent = Intent.TRAINING if trains else Intent.INFERENCE
    facts = evolve(tiny_facts(), env=Env(torch=torch, device="cuda", world_size=ranks))
    findings = check(Config(engine=FSDP2(), device=device, intent=intent), facts)
    assert [says in finding.what for finding in findings if finding.rule == "environment.fsdp2-on-cpu"] == [
        True
    ] * bool(says)
    assert rule_ids_in(Config(engine=FSDP1(), device=device), torch=torch) == []


@pytest.mark.parametrize(
    ("torch", "fires"),
    [("2.6.0", 0), ("2.13.0+cpu", 0), ("3.0", 0), ("", 0), ("2.5.1", 1), ("1.13.1", 1), ("nightly", 0)],
)
def test_torch_is_compared_by_number(torch: str, fires: int) -> None:
    assert rule_ids_in(Config(engine=DDP()), torch=torch) == ["environment.torch-version"] * fires


@pytest.mark.parametrize("torch", ["", "nightly"])
def test_a_torch_that_is_not_known_is_said_where_an_old_one_would_be_refused(torch: str) -> None:
    facts = evolve(tiny_facts(), env=Env(torch=torch, world_size=4))
    (found,) = check(Config(engine=FSDP2()), facts)
    assert (found.rule, found.severity) == (ID, Severity.WARNING)
    assert "Under torch 2.6 `environment.fsdp2-on-cpu` would say: torch 2.6.0 shards on the CPU" in found.what
    assert rule_ids_in(Config(engine=DDP()), torch=torch) == []


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.id not in (ID, "environment.torch-version")])
def test_a_rule_that_reads_the_release_is_asked_with_the_oldest_where_none_is_known(rule: Rule) -> None:
    cfg, facts = COUNTEREXAMPLES[rule.id]()
    unknown, old = (evolve(facts, env=evolve(facts.env, torch=torch)) for torch in ("", OLDEST))
    says = {
        torch: [hit.where for hit in rule.check(Resolved(cfg=cfg, facts=f))]
        for torch, f in (("unknown", unknown), ("old", old))
    }
    if set(says["old"]) - set(says["unknown"]):
        assert rule.id in BY_RELEASE


@pytest.mark.parametrize("world", [0, -1])
@pytest.mark.parametrize("engine", [*(kind() for kind in ENGINES), DeepSpeed(stage=3)], ids=str)
def test_a_world_without_ranks_is_a_finding_under_every_engine(engine: Engine, world: int) -> None:
    facts = tiny_facts(world=world, loader=tiny_loader())
    for plan in (TPPlanFromModel(), TPPlan((TPLayer("layers.*.mlp", "colwise"),))):
        assert "environment.world-size" in rule_ids(Config(engine=engine, tp_plan=plan), facts)
