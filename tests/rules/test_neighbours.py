"""What silences each rule: changes of one value in its counterexample and in a drawn run, and repairs.

``golden/neighbours/<subject>.txt`` has for each rule the changes that silence it, and those that move its finding;
``golden/repairs.txt`` what its repair changes in these configs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attrs import fields, has

from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.resolve.resolved import Resolved
from prepkit.rules import RULES, findings_of
from prepkit.rules.rule import Rule
from tests.support.counterexamples import COUNTEREXAMPLES
from tests.support.drawn_runs import ENGINES, run
from tests.support.golden import assert_golden
from tests.support.neighbours import asked
from tests.support.readable_plans import brief
from tests.support.rule_findings import BY_SUBJECT

GOLDEN = Path(__file__).parent / "golden" / "neighbours"


def said(rule: Rule, cfg: Config, facts: Facts) -> str:
    """Places of the rule's hits."""
    places = dict.fromkeys(hit.where for hit in rule.check(Resolved(cfg=cfg, facts=facts)))
    return f"at {', '.join(places)}" if places else "silent"


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
        yield f"  {words}: {', '.join(dict.fromkeys(places))}"


@pytest.mark.parametrize("subject", BY_SUBJECT)
def test_the_same_changes_silence_a_rule_or_move_its_finding(subject: str) -> None:
    text = "\n".join(line for rule in BY_SUBJECT[subject] for line in lines(rule)) + "\n"
    assert_golden(GOLDEN / f"{subject}.txt", text)


def repairs(rule: Rule) -> Iterator[str]:
    """What the repair of each base changes, and below it what else it makes of neighbours, by the changed values."""
    for name, (cfg, facts) in bases(rule) if rule.repair is not None else ():
        usual = _made(rule, cfg, facts)
        found: dict[str, list[str]] = defaultdict(list)
        for place, other, changed in asked(cfg, facts):
            if said(rule, other, changed) != "silent" and (made := _made(rule, other, changed)) != usual:
                found[made].append(place)
        yield f"{rule.id}{name}: {usual}"
        yield from (f"  {made}: {', '.join(dict.fromkeys(places))}" for made, places in found.items())


def _made(rule: Rule, cfg: Config, facts: Facts) -> str:
    assert rule.repair is not None
    return "; ".join(_changes(cfg, rule.repair(cfg, facts), "config")) or "nothing"


def _changes(before: Any, after: Any, place: str) -> Iterator[str]:
    """The smallest parts of two values that differ, each as it is in the second."""
    if type(before) is not type(after) or not has(type(before)) or not fields(type(before)):
        yield f"{place} = {brief(after)}"
        return
    for field in fields(type(before)):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.eq and old != new:
            yield from _changes(old, new, f"{place}.{field.name}")


def test_a_repair_changes_what_it_changed_when_somebody_last_read_it() -> None:
    assert_golden(GOLDEN.parent / "repairs.txt", "\n".join(line for rule in RULES for line in repairs(rule)) + "\n")
