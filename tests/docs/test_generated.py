"""Pages that follow from the code are what the code says now."""

from __future__ import annotations

import re

import prepkit as pk
from prepkit.rules import RULES
from tests.docs import findings
from tests.docs.blocks import DOCS, ROOT
from tests.docs.classes import read
from tests.docs.generate import COMMAND, PARTS, texts


def test_generated_pages_are_what_the_code_says() -> None:
    stale = [path.relative_to(ROOT) for path, text in texts().items() if not path.exists() or path.read_text() != text]
    assert not stale, f"{', '.join(map(str, stale))}: out of date; type: {COMMAND}"


def test_every_part_stands_on_some_page() -> None:
    written = {
        name for page in DOCS.rglob("*.md") for name in re.findall(r"<!-- generated: (.*?) -->", page.read_text())
    }
    assert written == set(PARTS)


def test_every_field_of_a_config_class_says_what_it_is() -> None:
    for path in (ROOT / "prepkit/config").glob("*.py"):
        for one in read(path).classes:
            assert one.text, one.name
            for row in one.fields:
                assert row.text, f"{one.name}.{row.name}"


def test_every_error_has_advice() -> None:
    advice = findings.ADVICE
    assert {*findings.ids()} == set(advice["findings"])
    assert not {rule.id for rule in RULES} & set(advice["findings"])
    assert {
        name for name in dir(pk) if isinstance(getattr(pk, name), type) and issubclass(getattr(pk, name), Exception)
    } <= set(advice["exceptions"])
    for row in (*advice["findings"].values(), *advice["exceptions"].values()):
        assert row["when"].endswith(".")
        assert row["then"].endswith(".")
