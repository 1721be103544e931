"""Laws of the rules, for drawn pairs and for the pair that provokes each rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args, get_type_hints

import attrs
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from prepkit import config, testing
from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.findings import Finding, Severity, errors
from prepkit.resolve.resolved import Resolved
from prepkit.rules import RULES, check, split
from prepkit.rules.rule import Rule
from prepkit.testing.strategies.optimizers import optimizers_for
from tests.support.counterexamples import COUNTEREXAMPLES

IDS = [rule.id for rule in RULES]
PAIRS = st.tuples(testing.configs(), testing.facts())
MENDABLE = [rule for rule in RULES if rule.repair]

by_rule = pytest.mark.parametrize("rule", RULES, ids=IDS)


def said_by(rule: Rule, found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    return tuple(finding for finding in found if finding.rule == rule.id)


@by_rule
def test_every_rule_fires_on_its_provoking_pair(rule: Rule) -> None:
    assert said_by(rule, check(*COUNTEREXAMPLES[rule.id]()))


@by_rule
def test_a_provoking_pair_has_no_error_of_another_rule(rule: Rule) -> None:
    found = errors(check(*COUNTEREXAMPLES[rule.id]()))
    assert {finding.rule for finding in found} <= {rule.id}


@given(testing.legal())
def test_no_rule_finds_an_error_in_a_legal_pair(pair: tuple[Config, Facts]) -> None:
    assert errors(check(*pair)) == ()


@given(testing.legal())
def test_a_legal_pair_has_a_plan(pair: tuple[Config, Facts]) -> None:
    from prepkit.planner import plan

    made = plan(*pair).unwrap()
    assert made.warnings == check(*pair)


@given(PAIRS)
def test_there_is_a_plan_if_and_only_if_no_error_stands(pair: tuple[Config, Facts]) -> None:
    from prepkit.planner import plan

    cfg, facts = pair
    standing, accepted = split(cfg, check(cfg, facts))
    made = plan(cfg, facts)
    if errors(standing):
        assert made.failure() == standing
    else:
        assert (made.unwrap().warnings, made.unwrap().overridden) == (standing, accepted)


_BRINGS = {
    # what is trained becomes float32
    "precision.no-master-weights": {"units.mixed-dtypes", "fsdp1.tied-gradients", "sharded.too-late"},
    "precision.fp16-trains-fp16": {"units.mixed-dtypes", "fsdp1.tied-gradients", "sharded.too-late"},
    "values.accumulation": {"deepspeed.batch"},  # of no micro-batch nothing can be multiplied; of one it can
    "mesh.not-world-size": {"fsdp1.tied-gradients"},  # which ranks hold the gradient follows from the mesh
    "loaders.already-distributed": {"deepspeed.two-places"},  # the batches are no longer split over the ranks
    "loaders.own-iteration": {"deepspeed.two-places"},
    "loaders.foreign": {"deepspeed.two-places"},
}
"""Repairs that set what other rules ask about, and the errors that can follow."""


def _mended(rule: Rule, cfg: Config, facts: Facts) -> None:
    before = check(cfg, facts)
    if not said_by(rule, before):
        return
    assert rule.repair is not None
    mended = rule.repair(cfg, facts)
    after = check(mended, facts)
    assert said_by(rule, after) == ()
    known = {finding.rule for finding in errors(before)} | _BRINGS.get(rule.id, set())
    if _read(cfg, facts) != _read(mended, facts):  # how many samples a step takes follows from it
        known |= {other.id for other in RULES if other.id.startswith("global-batch.")}
    if _blocks(cfg) != _blocks(mended):  # of which every so many are to be recomputed
        known.add("checkpoint.every")
    assert {finding.rule for finding in errors(after)} <= known


def _blocks(cfg: Config) -> object:
    return getattr(cfg.checkpointing, "blocks", None)


def _read(cfg: Config, facts: Facts) -> tuple[object, ...]:
    resolved = Resolved(cfg=cfg, facts=facts)
    return resolved.mesh, resolved.batch


@pytest.mark.parametrize("rule", MENDABLE, ids=[rule.id for rule in MENDABLE])
def test_a_repair_silences_its_rule_on_the_provoking_pair_and_adds_no_error(rule: Rule) -> None:
    cfg, facts = COUNTEREXAMPLES[rule.id]()
    assert said_by(rule, check(cfg, facts))
    _mended(rule, cfg, facts)


@given(PAIRS)
def test_every_repair_silences_its_rule_and_adds_no_error(pair: tuple[Config, Facts]) -> None:
    for rule in MENDABLE:
        _mended(rule, *pair)


@by_rule
def test_overriding_a_rule_that_allows_it_gives_a_plan_that_records_it(rule: Rule) -> None:
    from prepkit.planner import plan

    cfg, facts = COUNTEREXAMPLES[rule.id]()
    if not errors(check(cfg, facts)):  # no error, or none here
        assert rule.severity is not Severity.ERROR or rule.milder
        return
    accepted = plan(attrs.evolve(cfg, overrides=(rule.id,)), facts)
    if rule.overridable:
        assert {finding.rule for finding in accepted.unwrap().overridden} == {rule.id}
    else:
        assert rule.id in {finding.rule for finding in accepted.failure()}


@given(PAIRS)
def test_checking_is_a_function_whose_findings_stand_in_the_order_of_the_rules(pair: tuple[Config, Facts]) -> None:
    found = check(*pair)
    assert found == check(*pair)
    places = [IDS.index(finding.rule) for finding in found]
    assert places == sorted(places)


@given(PAIRS)
def test_every_finding_says_where_what_and_what_to_type(pair: tuple[Config, Facts]) -> None:
    cfg, facts = pair
    roots = ("config", "model", "optimizer", "scheduler", "loaders", "env")
    for finding in check(cfg, facts):
        assert finding.where.startswith(roots)
        assert finding.what.strip().endswith(".")
        assert finding.fix.strip().endswith((".", "?"))
        rule = next(rule for rule in RULES if rule.id == finding.rule)
        assert finding.severity in {rule.severity, Severity.WARNING if rule.milder else rule.severity}


@given(PAIRS)
def test_a_finding_that_names_a_config_field_names_one_that_the_config_has(pair: tuple[Config, Facts]) -> None:
    cfg, facts = pair
    for finding in check(cfg, facts):
        value: Any = cfg
        head, *fields = finding.where.partition("[")[0].split(".")
        for name in fields if head == "config" else ():
            value = getattr(value, name)


@given(PAIRS)
def test_what_stands_and_what_is_overridden_are_all_that_was_found(pair: tuple[Config, Facts]) -> None:
    cfg, facts = pair
    found = check(cfg, facts)
    standing, accepted = split(cfg, found)
    assert sorted(map(str, standing + accepted)) == sorted(map(str, found))
    assert all(f.severity is Severity.ERROR and f.rule in cfg.overrides for f in accepted)
    assert not any(f.rule in cfg.overrides for f in errors(standing) if _overridable(f))


def _overridable(finding: Finding) -> bool:
    return next(rule.overridable for rule in RULES if rule.id == finding.rule)


# --- every field of the config is varied ---------------------------------------------------------------------------


def _classes(hint: Any) -> Iterator[type]:
    """The attrs classes inside a type hint, and inside their fields."""
    if isinstance(hint, UnionType) or get_args(hint):
        for part in get_args(hint):
            yield from _classes(part)
    elif attrs.has(hint):
        yield hint
        for inner in get_type_hints(hint).values():
            yield from _classes(inner)


CLASSES = sorted(set(_classes(Config)), key=str)
FIELDS = sorted({(cls, name) for cls in CLASSES for name in get_type_hints(cls)}, key=str)


def _seen(value: Any) -> Iterator[tuple[tuple[type, str], Any]]:
    """Every field of a config and of the values inside it, and under no name the classes of them all."""
    if attrs.has(type(value)):
        yield (type(value), ""), type(value)
    for field in attrs.fields(type(value)) if attrs.has(type(value)) else ():
        inner = getattr(value, field.name)
        yield (type(value), field.name), inner
        for item in inner if isinstance(inner, tuple) else (inner,):
            yield from _seen(item)


OF_THE_MODEL = {
    "FSDP1.cast_forward_inputs",
    "FSDP1.cast_root_forward_inputs",
    "FSDP2.cast_forward_inputs",
}
"""Not varied where configs have to train: a model that casts its own inputs has to be written for it."""


def _varied(source: str) -> list[tuple[type, str]]:
    return [(cls, name) for cls, name in FIELDS if source == "configs" or f"{cls.__name__}.{name}" not in OF_THE_MODEL]


ROUNDS = 60
DRAWS = 100
"""Drawn configs of one round. Most fields vary in the first."""


def _met(source: str) -> dict[tuple[type, str], set[str]]:
    """What many drawn configs hold in each field: rounds of draws until every field has varied, or none are left."""
    pairs = testing.legal() | testing.legal(float8=True)  # few facts suit all of float8
    drawn = testing.configs() if source == "configs" else pairs.map(lambda pair: pair[0])
    met: dict[tuple[type, str], set[str]] = defaultdict(set)
    asked = optimizers_for(testing.tiny_facts(optimizer=False), Config())
    for number in range(ROUNDS):
        if source == "legal":  # few engines take every optimizer, and few pairs ask for one
            _look(asked.map(lambda optimizer: Config(optimizer=optimizer)), number, met)
        _look(drawn, number, met)
        if all(len(met[field]) > 1 for field in _varied(source)):
            break
    return met


def _look(drawn: st.SearchStrategy[Config], number: int, met: dict[tuple[type, str], set[str]]) -> None:
    @seed(number)
    @settings(max_examples=DRAWS, phases=[Phase.generate], suppress_health_check=list(HealthCheck), database=None)
    @given(drawn)
    def look(cfg: Config) -> None:
        for field, value in _seen(cfg):
            met[field].add(repr(value))

    look()


def test_the_field_coverage_test_knows_every_class_of_the_config() -> None:
    here = {cls for cls in vars(config).values() if isinstance(cls, type) and attrs.has(cls)}
    assert {cls for cls, _ in FIELDS} == {cls for cls in here if attrs.fields(cls)}


@pytest.mark.parametrize("source", ["configs", "legal"])
def test_every_class_of_a_config_is_drawn_and_every_field_of_it_varied(source: str) -> None:
    place = "prepkit/testing/strategies/" + ("configs.py" if source == "configs" else "legal.py or suited.py")
    met = _met(source)
    missing = [cls.__name__ for cls in CLASSES if not met[cls, ""]]
    constant = [f"{cls.__name__}.{name}" for cls, name in _varied(source) if len(met[cls, name]) < 2]
    assert (missing, constant) == ([], []), f"{source}() never draws or varies these: see {place}"
