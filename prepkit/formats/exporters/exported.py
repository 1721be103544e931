"""What an exporter returns; what another library's file cannot say is known by reading it back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attrs import evolve, fields, frozen, has

from prepkit.codec.text import shown
from prepkit.config import Config
from prepkit.findings import Finding, PlanRejected, Severity
from prepkit.formats.exporters.native import WRITERS
from prepkit.formats.importers import import_config


@frozen(kw_only=True)
class Exported:
    """A config as another library's file. ``text`` is what to write; ``beside`` goes into the same folder."""

    kind: str
    """Whose file it is: a key of ``EXPORTERS``."""
    text: str
    """The file."""
    beside: tuple[tuple[str, str], ...] = ()
    """Names and texts of files that it points to."""
    left_out: tuple[Finding, ...] = ()
    """What the file cannot say, each setting with what that library would do in its place."""


@frozen(kw_only=True)
class LeftOut:
    """What an exporter makes of a config, before it is read back."""

    data: dict[str, Any]
    beside: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Names and values of files that it points to."""
    means: Config
    """The config in the form in which that library's importer would have it, where several forms mean the same."""


def exported(kind: str, draft: LeftOut, suffix: str) -> Exported:
    """The texts, and every setting that they do not say. Raises ``PlanRejected`` where the file would be refused."""
    text = WRITERS[suffix](draft.data)
    beside = tuple((name, json.dumps(data, indent=2) + "\n") for name, data in draft.beside)
    with TemporaryDirectory() as folder:
        file = Path(folder) / f"{kind}{suffix}"
        for place, written in ((file, text), *((file.parent / name, written) for name, written in beside)):
            place.write_text(written)
        try:
            read = import_config(file, kind)
        except PlanRejected as refused_back:
            places = (evolve(said, where=said.where.replace(f"{folder}/", "")) for said in refused_back.findings)
            raise PlanRejected(tuple(places)) from None
    left_out = tuple(_finding(kind, *found) for found in differences(plain(draft.means), plain(read.config), "config"))
    return Exported(kind=kind, text=text, beside=beside, left_out=left_out)


def plain(config: Config) -> Config:
    """The config without its origins, with the one micro-batch per step that None means without ``global_batch``."""
    return evolve(config, origins=(), accumulation=1 if config.accumulation is None else config.accumulation)


def differences(asked: Any, said: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    """The settings that are not the same: their paths, and both values."""
    if has(type(asked)) and type(asked) is type(said):
        for field in fields(type(asked)):
            name = field.name
            yield from differences(getattr(asked, name), getattr(said, name), f"{where}.{name}")
    elif asked != said:
        yield where, asked, said


def _finding(kind: str, where: str, asked: object, said: object) -> Finding:
    return Finding(
        rule="export.not-expressible",
        severity=Severity.ERROR,
        where=where,
        what=f"a file of {kind} cannot say {shown(asked)}: read back, it says {shown(said)}",
        fix="Write what it can say, or leave it out with partial=True (--partial) and see to it in your script.",
    )


def refused(exported: Exported) -> PlanRejected:
    """What is raised for a file that would not say everything."""
    return PlanRejected(exported.left_out)


Exporter = Callable[[Config, int | None, int | None], LeftOut]
"""From a config, the number of processes and those of one machine, where they are known."""
