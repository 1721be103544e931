"""What each rule says of the neighbours of its counterexample: those that differ from it in one value.

``neighbours/<subject>.txt`` has for each rule the changes that silence it, and those that change what it says. After a
change on purpose, ``WRITE_GOLDEN=1 python -m pytest tests/rules/test_neighbours.py`` writes them anew: read the change.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import fields

from prepkit import codec
from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.resolve.resolved import Resolved
from prepkit.rules import RULES
from prepkit.rules.rule import Rule
from prepkit.testing import COUNTEREXAMPLES
from tests.support.neighbours import asked

GOLDEN = Path(__file__).parent / "neighbours"
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


def lines(rule: Rule) -> Iterator[str]:
    cfg, facts = COUNTEREXAMPLES[rule.id]()
    usual = said(rule, cfg, facts)
    found: dict[str, list[str]] = defaultdict(list)
    for place, other, changed in asked(cfg, facts):
        if (words := said(rule, other, changed)) != usual:
            found[words].append(place)
    yield f"{rule.id} {usual}"
    for words, places in found.items():
        yield f"  {words or 'silent'}: {', '.join(places)}"


@pytest.mark.parametrize("subject", BY_SUBJECT)
def test_a_rule_says_of_its_counterexamples_neighbours_what_it_said(subject: str) -> None:
    text = "\n".join(line for rule in BY_SUBJECT[subject] for line in lines(rule)) + "\n"
    path = GOLDEN / f"{subject}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), "see the top of tests/rules/test_neighbours.py"
