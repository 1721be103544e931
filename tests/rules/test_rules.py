"""The table of rules as a whole: ids, golden messages, counterexamples, and what a check costs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from prepkit.config import (
    BF16,
    DDP,
    FSDP2,
    CheckpointBlocks,
    CompileBlocks,
    Config,
    Mesh,
    Wrap,
    WrapBlocks,
    WrapClasses,
    WrapPaths,
)
from prepkit.facts import ParamFact
from prepkit.findings import Severity
from prepkit.rules import LAW, RULES, check
from prepkit.rules.rule import Rule
from prepkit.rules.run import AUDIT_RULES, INVARIANTS
from prepkit.testing.tiny import tiny_facts, tiny_loader, tiny_model
from tests.support.counterexamples import COUNTEREXAMPLES
from tests.support.golden import assert_golden
from tests.support.rule_findings import BY_SUBJECT, rule_ids

GOLDEN = Path(__file__).parent / "golden"

by_rule = pytest.mark.parametrize("rule", RULES, ids=[rule.id for rule in RULES])


def test_every_rule_has_a_counterexample_and_every_counterexample_a_rule_in_the_same_order() -> None:
    missing = [rule.id for rule in RULES if rule.id not in COUNTEREXAMPLES]
    assert not missing, (
        f"add {missing} to COUNTEREXAMPLES in the file of their subject in tests/support/counterexamples"
    )
    assert list(COUNTEREXAMPLES) == [rule.id for rule in RULES]


def test_no_two_rules_have_the_same_id() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)


@by_rule
def test_every_rule_says_what_holds_what_to_do_and_where_it_comes_from(rule: Rule) -> None:
    assert rule.summary.endswith(".")
    assert rule.fix.endswith(".")
    assert rule.source
    assert rule.overridable or rule.severity is Severity.ERROR


@pytest.mark.parametrize("subject", BY_SUBJECT)
def test_messages_read_as_they_did_when_somebody_last_read_them(subject: str) -> None:
    messages = (
        f"{finding}\n" for rule in BY_SUBJECT[subject] for finding in check(*COUNTEREXAMPLES[rule.id](), (rule,))
    )
    assert_golden(GOLDEN / "messages" / f"{subject}.txt", "\n".join(messages))


def test_no_golden_message_is_left_of_a_subject_that_is_gone() -> None:
    assert {path.stem for path in (GOLDEN / "messages").glob("*.txt")} == set(BY_SUBJECT)


def test_a_usual_config_has_no_finding() -> None:
    assert check(Config(), tiny_facts()) == ()
    assert check(Config(engine=DDP(), precision=BF16()), tiny_facts(world=8)) == ()
    assert check(Config(engine=FSDP2(), compile=CompileBlocks()), tiny_facts(world=8, device="cuda")) == ()


def test_all_findings_come_at_once() -> None:
    rules = rule_ids(
        Config(engine=FSDP2(wrap=WrapClasses(("Blok",))), mesh=Mesh(replicate=3), accumulation=0, timeout_s=-1.0)
    )
    assert rules == ["mesh.not-world-size", "wrap.class-not-found", "values.accumulation", "values.timeout"]


@pytest.mark.parametrize("wrap", [WrapBlocks(), WrapPaths(tuple(f"layers.{index}" for index in range(16_666)))])
def test_a_model_of_fifty_thousand_modules_is_checked_in_seconds_at_most(wrap: Wrap) -> None:
    lora = ParamFact(name="layers.9.attn.lora", shape=(4,), dtype="bfloat16")
    model = tiny_model(blocks=16_666, tied=True, extra=(lora,))
    cfg = Config(engine=FSDP2(wrap=wrap), checkpointing=CheckpointBlocks(), compile=CompileBlocks())
    facts = tiny_facts(model, world=512, loader=tiny_loader(length=10**6))
    began = time.process_time()
    rules = rule_ids(cfg, facts)
    taken = time.process_time() - began
    assert "units.mixed-dtypes" in rules
    assert taken < 9, f"took {taken:.2f} s"  # 0.6 s on an idle core; what is quadratic takes 13 s and more


def _row(rule: Rule) -> str:
    """What a rule is beside its words: when it is asked, of what, and how it can be answered."""
    facts = {
        "at": ", ".join(rule.at),
        "needs": ", ".join(need.name.lower() for need in rule.needs),
        **{name: getattr(rule, name) for name in ("cost", "milder", "lawful", "stops", "told_by")},
        "from": ", ".join(rule.source),
    }
    flags = f"{rule.severity}{', not overridable' * (not rule.overridable)}{', repaired' * (rule.repair is not None)}"
    return f"{rule.id}: {flags}; {'; '.join(f'{name} {said}' for name, said in facts.items() if said)}"


BOOKS = {"plan": RULES, "run": AUDIT_RULES, "calls": tuple(one for one in LAW if one not in (*RULES, *AUDIT_RULES))}
"""Rules before there is a plan, those over what is prepared, and those that calls tell."""


GUARDED = {"run": INVARIANTS}
"""What several rules of a book are about together."""


@pytest.mark.parametrize("book", BOOKS)
def test_rows_of_the_law_book_read_as_they_did_when_somebody_last_read_them(book: str) -> None:
    rows = [f"{_row(rule)}\n" for rule in BOOKS[book]]
    guarded = [f"{said}\n" + "".join(f"  {one}\n" for one in rules) for said, rules in GUARDED.get(book, ())]
    assert_golden(GOLDEN / "rows" / f"{book}.txt", "".join((*rows, *guarded)))
