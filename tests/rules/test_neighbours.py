"""What each rule says of its counterexample's neighbours, and of a drawn run's: those that differ in one value.

``golden/neighbours/<subject>.txt`` has for each rule the changes that silence it, and those that change what it says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from attrs import fields

from prepkit import codec
from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.resolve.resolved import Resolved
from prepkit.rules import RULES, findings_of
from prepkit.rules.rule import Rule
from prepkit.testing import COUNTEREXAMPLES
from tests.support.drawn_runs import ENGINES, run
from tests.support.golden import assert_golden
from tests.support.neighbours import asked

GOLDEN = Path(__file__).parent / "golden" / "neighbours"
BY_SUBJECT: dict[str, list[Rule]] = defaultdict(list)
for one in RULES:
    BY_SUBJECT[one.id.partition(".")[0]].append(one)


def said(rule: Rule, cfg: Config, facts: Facts) -> str:
    """A digest of every hit, and of what a repair changes; empty where the rule is silent."""
    hits = tuple(rule.check(Resolved(cfg=cfg, facts=facts)))
    if not hits:
        return ""
    texts = [text for hit in hits for text in (hit.where, hit.what, hit.fix)]
    mended = settings_of(rule.repair(cfg, facts)) if rule.repair else {}
    before = settings_of(cfg)
    repairs = [f"{name} = {value!r}" for name, value in mended.items() if before.get(name) != value]
    return codec.digest("\n".join((*texts, *repairs)))[-4:]


def settings_of(cfg: Config) -> dict[str, object]:
    """Name to value, of the config and of its engine."""
    own = {field.name: getattr(cfg, field.name) for field in fields(Config) if field.name != "engine"}
    of_engine = {f"engine.{field.name}": getattr(cfg.engine, field.name) for field in fields(type(cfg.engine))}
    return own | of_engine | {"engine": type(cfg.engine)}


def bases(rule: Rule) -> Iterator[tuple[str, tuple[Config, Facts]]]:
    yield "", COUNTEREXAMPLES[rule.id]()
    if (drawn := firing().get(rule.id)) is not None:
        yield f" in {drawn[0]} {drawn[1]}", run(*drawn)


@cache
def firing() -> dict[str, tuple[str, int]]:
    """Rule to the first drawn run, of a small model, of which it says something."""
    found: dict[str, tuple[str, int]] = {}
    for engine in ENGINES:
        for number in range(160):
            cfg, facts = run(engine, number)
            if len(facts.model.params) < 60:
                for one in findings_of(Resolved(cfg=cfg, facts=facts)):
                    found.setdefault(one.rule, (engine, number))
    return found


def lines(rule: Rule) -> Iterator[str]:
    for name, base in bases(rule):
        yield from _around(rule, name, *base)


def _around(rule: Rule, name: str, cfg: Config, facts: Facts) -> Iterator[str]:
    usual = said(rule, cfg, facts)
    found: dict[str, list[str]] = defaultdict(list)
    for place, other, changed in asked(cfg, facts):
        if (words := said(rule, other, changed)) != usual:
            found[words].append(place)
    yield f"{rule.id}{name}: {usual}"
    for words, places in found.items():
        yield f"  {words or 'silent'}: {', '.join(places)}"


@pytest.mark.parametrize("subject", BY_SUBJECT)
def test_a_rule_says_of_its_counterexamples_neighbours_what_it_said(subject: str) -> None:
    text = "\n".join(line for rule in BY_SUBJECT[subject] for line in lines(rule)) + "\n"
    assert_golden(GOLDEN / f"{subject}.txt", text)
