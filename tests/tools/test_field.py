"""The judgements of the field are whole, and the command counts what they say."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from prepkit.rules import LAW
from tests.tools.corpus import CORPUS
from tests.tools.field import DRAWN, FALSE, account, judged, look, tally


def test_each_judgement_is_of_a_rule_that_there_is_and_at_most_one_in_a_hundred_is_a_false_alarm() -> None:
    verdicts = judged()
    known = {rule.id for rule in LAW}
    assert {rule for rule, _ in verdicts} <= known
    assert all(re.fullmatch(r"[0-9a-f]{16}", digest) for _, digest in verdicts)
    assert max(Counter(rule for rule, _ in verdicts).values()) >= DRAWN - 1
    assert sum(verdict != "true" for verdict in verdicts.values()) <= FALSE * len(verdicts)


def test_ten_of_a_rule_are_drawn_and_each_is_counted_by_what_is_said_of_it(tmp_path: Path) -> None:
    for number in range(14):
        text = f"distributed_type: MULTI_GPU\nnum_processes: {number + 2}\nmixed_precison: bf16\n"
        (tmp_path / f"{number}.yaml").write_text(text)
    field = look(str(tmp_path))
    drawn = field.drawn()["import.unknown-key"]
    assert (field.files, len(field.seen), len(drawn)) == (14, 14, DRAWN)
    verdicts = {drawn[0].key: "true", drawn[1].key: "the key is right"}
    assert tally(field, verdicts) == (1, 1, DRAWN - 2)
    page = list(account(field, verdicts))
    assert page[0] == "import.unknown-key: 14 findings"
    assert page[1].startswith("  [true] ")
    assert page[2].startswith("  [the key is right] ")


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the collected configs are not here")
def test_what_is_said_of_the_collected_configs_is_judged_and_quickly_said() -> None:
    """Seconds are those of this process: the machine may be shared."""
    field = look(str(CORPUS))
    true, false, unjudged = tally(field, judged())
    assert field.files > 200
    assert unjudged == 0
    assert false <= FALSE * (true + false)
    assert field.first < 2
    assert field.whole < 20
