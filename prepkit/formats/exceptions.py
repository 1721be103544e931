"""Exceptions to a rule: of whom, why, and until when, as a comment beside what is excepted or an entry of a policy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from difflib import get_close_matches
from pathlib import Path

from attrs import evolve, field, frozen

from prepkit import rules
from prepkit.codec.text import shown
from prepkit.findings import Finding
from prepkit.formats.places import FilePlace
from prepkit.formats.places import comments as _comments

_MARK = re.compile(r"(?:#|//)\s*prepkit\s*:\s*(ignore\b.*)")
_COMMENT = re.compile(
    r"ignore\[(?P<rule>[\w.-]+)\]\s+until\s+(?P<until>\d{4}-\d\d-\d\d)(?:\s+by\s+(?P<owner>\S+))?\s+because\s+(?P<because>\S.*)"
)
MOST = 1_000
"""Exceptions that are read of one file."""


@frozen(kw_only=True)
class Exempt:
    """An exception: findings of the rule at the place are accepted up to and with a day."""

    rule: str
    until: date
    because: str
    owner: str = ""
    file: str = ""
    """The file that it is about; empty: every file."""
    line: int = 0
    """The line that it is about; 0: every line."""
    written: FilePlace = field(eq=False)
    """Where the exception itself stands."""

    def covers(self, place: FilePlace, finding: Finding) -> bool:
        """Return whether the exception is about this finding, whatever the day."""
        return finding.rule == self.rule and self.file in ("", place.file) and self.line in (0, place.line)

    def __str__(self) -> str:
        owner = f" by {self.owner}" if self.owner else ""
        return f"excepted until {self.until}{owner}: {self.because} ({self.written})"


@frozen
class Sorted:
    """Findings by what exceptions make of them."""

    standing: tuple[tuple[FilePlace, Finding], ...]
    """Those that nothing excepts, and what is wrong with the exceptions themselves."""
    excepted: tuple[tuple[FilePlace, Finding], ...]
    """Those that are accepted for now; ``origin`` says by which exception."""


def comments(file: str, text: str) -> tuple[tuple[Exempt, ...], tuple[tuple[FilePlace, Finding], ...]]:
    """Exceptions in the comments of a file, and comments that were meant as one and are none.

    A comment with a line of its own is about the next line that has none.
    """
    found: list[Exempt] = []
    wrong: list[tuple[FilePlace, Finding]] = []
    lines = text.split("\n")
    for number, column, written in _marks(file, text):
        place = FilePlace(file, number, column)
        told = _COMMENT.fullmatch(written[written.index("ignore") :].strip())
        day = _day(told["until"]) if told else None
        if told is None or day is None or len(found) == MOST:
            what = f"{shown(written.strip())} is no exception that prepkit reads, and excepts nothing"
            wrong.append((place, rules.found("gate.exception", str(place), what)))
            continue
        alone = not lines[number - 1][: column - 1].strip()
        about = _next(lines, number) if alone else number
        parts = {"rule": told["rule"], "because": told["because"], "owner": told["owner"] or ""}
        found.append(Exempt(**parts, until=day, file=file, line=about, written=place))
    return tuple(found), tuple(wrong)


def _marks(file: str, text: str) -> Iterator[tuple[int, int, str]]:
    """Line, column and words of what names prepkit's ignore in the comments of a text, not in its strings."""
    number = done = 0
    for start, end in _comments(text, Path(file).suffix.lower()) if "prepkit" in text else ():
        if mark := _MARK.search(text, start, end):
            at = mark.start()
            number, done = number + text.count("\n", done, at), at
            yield number + 1, at - text.rfind("\n", 0, at), mark[0]


def _next(lines: list[str], number: int) -> int:
    """The next line that is neither empty nor a comment."""
    below = enumerate(lines[number:], start=number + 1)
    return next((at for at, line in below if line.strip() and not line.lstrip().startswith(("#", "//"))), number)


def _day(text: str) -> date | None:
    try:
        return date.fromisoformat(text)
    except ValueError:
        return None


def sort(
    findings: tuple[tuple[FilePlace, Finding], ...], exempt: tuple[Exempt, ...], today: date, ids: tuple[str, ...] = ()
) -> Sorted:
    """Findings that stand and those that are excepted today; one that has ended, or excepts nothing, is told.

    ``ids``: every rule that there is, so that a misspelt one is told as such.
    """
    standing: list[tuple[FilePlace, Finding]] = []
    excepted: list[tuple[FilePlace, Finding]] = []
    used: set[FilePlace] = set()
    for place, finding in findings:
        about = [one for one in exempt if one.covers(place, finding)]
        used.update(one.written for one in about)
        valid = next((one for one in about if today <= one.until), None)
        if valid is None:
            standing.append((place, finding))
        else:
            excepted.append((place, evolve(finding, origin=str(valid))))
    return Sorted((*standing, *_told(exempt, used, today, ids)), tuple(excepted))


def _told(
    exempt: tuple[Exempt, ...], used: set[FilePlace], today: date, ids: tuple[str, ...]
) -> Iterator[tuple[FilePlace, Finding]]:
    for one in exempt:
        where = str(one.written)
        if one.written not in used:
            yield one.written, rules.found("gate.exception-unused", where, *_unused(one.rule, ids))
        elif today > one.until:
            what = f"the exception of {one.rule} has ended on {one.until} ({one.because})"
            yield one.written, rules.found("gate.exception-ended", where, what)
        elif not one.owner:
            what = f"nobody owns the exception of {one.rule}"
            yield one.written, rules.found("gate.exception-owner", where, what)


def _unused(rule: str, ids: tuple[str, ...]) -> tuple[str, str]:
    """What is wrong with an exception that excepts nothing, and what mends it."""
    if rule in ids or not ids:
        return f"nothing here is found by {rule}, so that its exception excepts nothing", ""
    near = get_close_matches(rule, ids, n=1)
    fix = f"Write {near[0]}." if near else "Write the id of a rule: prepkit rules lists them."
    return f"there is no rule {rule}, so that its exception excepts nothing", fix
