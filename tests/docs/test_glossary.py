"""Public names use the words of the glossary, and none that it lists as not used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import get_args

import attrs

import prepkit as pk
from prepkit import config
from prepkit.steps import Step
from tests.docs.blocks import DOCS

PAGE = DOCS / "reference/glossary.md"
ROW = re.compile(r"^\| (?!word |---)(?P<word>[^|]+) \| (?P<meaning>[^|]+) \|(?P<rest>[^|]*)\|$", re.MULTILINE)


def unused() -> dict[str, str]:
    """Word that identifiers must not have, to what to say instead."""
    rows = [row.groupdict() for row in ROW.finditer(PAGE.read_text())]
    return {word: row["word"] for row in rows for word in re.findall(r"`(\w+)`", row["rest"])}


def words(name: str) -> list[str]:
    """The words of an identifier.

    >>> words("already_sharded"), words("TPPlanFromModel")
    (['already', 'sharded'], ['tp', 'plan', 'from', 'model'])
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*", name)]


def names() -> Iterator[str]:
    """Public names, config classes and their fields, step kinds and their fields."""
    for module in (pk, pk.data, pk.ddp, pk.errors, pk.fp8, pk.optim, pk.processes, pk.tp, pk.track, pk.wrap):
        yield from (name for name in dir(module) if not name.startswith("_"))
    for kind in (*vars(config).values(), *get_args(Step)):
        if isinstance(kind, type) and attrs.has(kind):
            yield kind.__name__
            yield from (f"{kind.__name__}.{field.name}" for field in attrs.fields(kind))


def test_no_public_name_has_a_word_that_the_glossary_replaces() -> None:
    replaced = unused()
    wrong = {
        f"{name}: not {word!r}, say {replaced[word]!r}"
        for name in names()
        for word in words(name.rpartition(".")[2])
        if word in replaced
    }
    assert not wrong, "\n".join(sorted(wrong))


def test_no_word_has_two_meanings() -> None:
    words_of_rows = [re.split(r"[,/]", row["word"]) for row in ROW.finditer(PAGE.read_text())]
    assert len(words_of_rows) > 40
    defined = Counter(word.strip() for row in words_of_rows for word in row)
    assert [word for word, rows in defined.items() if rows > 1] == [], "a word is defined in two rows"
    assert not set(defined) & set(unused()), "a word is defined in one row and replaced in another"


def test_words_of_an_identifier_are_found() -> None:
    assert words("already_sharded") == ["already", "sharded"]
    assert words("TPPlanFromModel") == ["tp", "plan", "from", "model"]
    assert words("InitializeDeepSpeed") == ["initialize", "deep", "speed"]
    assert {"cut", "copies", "initialise"} <= set(unused())
