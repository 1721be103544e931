"""Pages that follow from the code are what the code says now."""

from __future__ import annotations

import re

import prepkit as pk
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
        for kind in read(path).classes:
            assert kind.text, kind.name
            for row in kind.fields:
                assert row.text, f"{kind.name}.{row.name}"


def test_every_exception_has_advice() -> None:
    assert set(dir(pk.errors)) == set(findings.ADVICE)
    for row in findings.ADVICE.values():
        assert row["when"].endswith(".")
        assert row["then"].endswith(".")
