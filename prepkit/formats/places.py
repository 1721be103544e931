"""Where in a file the thing is that a finding is about."""

from __future__ import annotations

import re

from attrs import frozen

from prepkit.findings import Finding
from prepkit.formats.importers.positions import positions

_ORIGIN = re.compile(r"(?:.* in )?(.+):(\d+):(\d+)", re.DOTALL)
_WHERE = re.compile(r"(.+?):(\d+):(\d+)(?:\s.*)?", re.DOTALL)
_TOLD = re.compile(r"\bline (\d+)(?:,? column (\d+))?")
_KEY = re.compile(r"\b[a-z][a-z0-9]*(?:_[a-z0-9]+)+\b")
"""A word that can only be a key."""
_WORD = re.compile(r"\b[a-z]{4,}\b")


@frozen
class FilePlace:
    """A file, and line and column in it, from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


def place_of(finding: Finding, file: str, text: str, suffix: str) -> FilePlace:
    """Where the key or value stands that a finding about this file names; its beginning where it is about the whole."""
    place = _told_place(finding, file, text, suffix)
    if (place.file, place.line, place.column) != (file, 1, 1) or not text:
        return place
    here = positions(text, suffix)
    words = (*_KEY.findall(finding.what), finding.where.rpartition(".")[2], *_WORD.findall(finding.what))
    named = (where for word in words for path, where in here.items() if path.rpartition(".")[2] == word)
    return FilePlace(file, *next(named, (1, 1)))


def _told_place(finding: Finding, file: str, text: str, suffix: str) -> FilePlace:
    if quoted := re.findall(r"`([\w.]+)`", finding.what):  # a key that lies deeper than the setting that came of it
        here = positions(text, suffix) if text else {}
        for name in quoted:
            if name in here and "." in name:
                return FilePlace(file, *here[name])
    for pattern, said in ((_ORIGIN, finding.origin), (_WHERE, finding.where)):
        if found := pattern.fullmatch(said):
            return FilePlace(found[1], int(found[2]), int(found[3]))
    path = re.sub(r"\[(?:'|\")?(.*?)(?:'|\")?\]", r".\1", finding.where.partition(":$")[2]).strip(".")
    told = _TOLD.search(finding.what)
    if told and not path:
        return FilePlace(file, int(told[1]), int(told[2] or 1))
    places = positions(text, suffix) if path else {}
    while path and path not in places:
        path = path.rpartition(".")[0]
    line, column = places.get(path, (1, 1))
    return FilePlace(file, line, column)
