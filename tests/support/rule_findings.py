"""What the rules say of a config and facts, as their tests ask it."""

from __future__ import annotations

from itertools import groupby

from attrs import evolve

from prepkit.config import FSDP2, Config, Wrap
from prepkit.facts import Env, Facts, ModelFacts
from prepkit.findings import Finding
from prepkit.rules import RULES, check
from prepkit.rules.rule import Rule
from prepkit.testing.tiny import tiny_facts


def _by_subject() -> dict[str, tuple[Rule, ...]]:
    ordered = sorted(RULES, key=lambda rule: rule.id.partition(".")[0])  # stable
    subjects = {name: tuple(rules) for name, rules in groupby(ordered, lambda rule: rule.id.partition(".")[0])}
    several = {name: rules for name, rules in subjects.items() if len(rules) > 1}
    return several | {"alone": tuple(rule for rules in subjects.values() if len(rules) == 1 for rule in rules)}


BY_SUBJECT = _by_subject()
"""Rules before there is a plan, as golden texts have them: by subject, those that are alone in theirs together."""


def rule_ids(cfg: Config, facts: Facts | None = None) -> list[str]:
    """Ids of the rules that fire, in their order; without facts, those of a tiny model on one CPU."""
    return [finding.rule for finding in check(cfg, facts or tiny_facts())]


def rule_ids_in(cfg: Config, **env: object) -> list[str]:
    """Likewise for a tiny model on four CUDA devices, or in an environment that differs in these fields."""
    usual = {"world_size": 4, "device": "cuda"}
    return rule_ids(cfg, evolve(tiny_facts(), env=Env(**{**usual, **env})))  # type: ignore[arg-type]


def finding_of(rule: str, cfg: Config, facts: Facts | None = None) -> Finding:
    """The one finding of this rule."""
    (finding,) = (finding for finding in check(cfg, facts or tiny_facts()) if finding.rule == rule)
    return finding


def fsdp2_with(wrap: Wrap, model: ModelFacts | None = None) -> tuple[Config, Facts]:
    """FSDP2 with this selection of units, and the facts of a model on two ranks."""
    return Config(engine=FSDP2(wrap=wrap)), tiny_facts(model, world=2)


def mended(rule: str, cfg: Config, facts: Facts | None = None) -> Config:
    """The config as the repair of this rule leaves it."""
    (repair,) = (known.repair for known in RULES if known.id == rule)
    assert repair is not None, f"{rule} has no repair"
    return repair(cfg, facts or tiny_facts())
