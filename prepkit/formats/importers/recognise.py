"""Whose config file one is, by the keys at its top."""

from __future__ import annotations

from collections.abc import Mapping

from prepkit.findings import PlanRejected
from prepkit.formats.importers.foreign import lenient
from prepkit.formats.importers.source import Source


def kind_of(source: Source, marks: Mapping[str, tuple[str, ...]]) -> str:
    """The first kind that has one of its marks at the top of the file.

    ``prepkit`` for a file that shows no mark, and for one that is damaged: its importer says what is wrong.
    """
    try:
        data = lenient(source)
    except PlanRejected:
        return "prepkit"
    return next((kind for kind, keys in marks.items() if any(key in data for key in keys)), "prepkit")
