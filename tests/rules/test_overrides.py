"""Overrides: which findings they accept, and which stand."""

from __future__ import annotations

from prepkit.config import DDP, FSDP2, Config, Mesh
from prepkit.rules import LAW, RENAMED, RULES, check, split
from prepkit.rules.rule import Hit, Moment, Rule
from prepkit.testing.tiny import tiny_facts
from tests.support.rule_findings import rule_ids


def test_an_override_moves_an_error_out_of_what_stands() -> None:
    cfg = Config(overrides=("mesh.single-many-ranks",))
    standing, accepted = split(cfg, check(cfg, tiny_facts(world=2)))
    assert (standing, [finding.rule for finding in accepted]) == ((), ["mesh.single-many-ranks"])


def test_an_override_of_a_rule_without_which_there_is_no_plan_is_an_error_that_stands() -> None:
    cfg = Config(engine=FSDP2(), mesh=Mesh(shard=3), overrides=("mesh.not-world-size", "overrides.unknown"))
    standing, accepted = split(cfg, check(cfg, tiny_facts(world=8)))
    assert accepted == ()
    assert [f.rule for f in standing] == ["mesh.not-world-size", "overrides.unknown", "overrides.unknown"]


def test_the_id_of_a_rule_of_the_users_own_is_known_to_the_overrides() -> None:
    mine = Rule(
        id="mine.no-training", summary="Never.", check=lambda *_: iter((Hit("config", "It trains."),)), fix="Stop."
    )
    cfg = Config(overrides=("mine.no-training",))
    findings = check(cfg, tiny_facts(), (*RULES, mine))
    assert [(f.rule, f.fix) for f in findings] == [("mine.no-training", "Stop.")]
    assert split(cfg, findings, (*RULES, mine)) == ((), findings)
    assert "overrides.unknown" in rule_ids(cfg)


def test_a_warning_stands_though_it_is_overridden() -> None:
    cfg = Config(engine=DDP(), overrides=("mesh.ddp-alone",))
    standing, accepted = split(cfg, check(cfg, tiny_facts()))
    assert ([finding.rule for finding in standing], accepted) == (["mesh.ddp-alone"], ())


def test_errors_of_every_moment_can_be_overridden_and_an_id_that_nobody_has_is_refused() -> None:
    late = tuple(rule.id for rule in LAW if Moment.PLAN not in rule.at and rule.overridable)
    assert {"memory.exceeds-device", "forward.used-elsewhere", "run.gradients-not-finite", "run.missed"} <= set(late)
    assert rule_ids(Config(overrides=late)) == []
    assert rule_ids(Config(overrides=("run.gradients-waited-for",))) == ["overrides.unknown"]
    assert rule_ids(Config(overrides=("run.no-such-rule",))) == ["overrides.unknown"]


def test_an_id_that_a_rule_once_had_is_told_with_the_one_that_it_has() -> None:
    (found,) = check(Config(overrides=("first-step.not-finite",)), tiny_facts())
    assert found.fix == "Leave it out. It is called `run.gradients-not-finite` now."
    assert set(RENAMED.values()) <= {rule.id for rule in LAW}
