"""Files that prepkit wrote, told apart by what they say they are: plans and attestations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import click
from attrs import evolve

from prepkit.codec import files as codec_files
from prepkit.codec.diff import Change, diff
from prepkit.findings import PlanRejected
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.render.changes import diff_text

T = TypeVar("T")


def load(files: tuple[str, ...]) -> tuple[Plan | Attestation | PlanRejected, ...]:
    """Return what each file holds, or every reason why it cannot be read."""
    return tuple(given_plan(file, functools.partial(codec_files.load, file)) for file in files)


def changes(old: Plan | Attestation, new: Plan | Attestation) -> tuple[Change, ...]:
    """What turns one into the other. Ends the command for a plan and an attestation, which cannot be compared."""
    if isinstance(old, Plan) and isinstance(new, Plan):
        return diff(old, new)
    if isinstance(old, Attestation) and isinstance(new, Attestation):
        return diff(old, new)
    raise click.UsageError("one is a plan, the other an attestation; compare two of a kind")


def told(value: Plan | Attestation, changes: Sequence[Change]) -> str:
    """The changes of such a value as text."""
    return "the attestations are equal" if isinstance(value, Attestation) and not changes else diff_text(changes)


def is_config(file: str, refused: PlanRejected) -> bool:
    """Tell a config, of prepkit or of another library, that was given as a plan: a mapping that says to be nothing."""
    from prepkit.codec.text import parse

    suffix = Path(file).suffix.lower()
    if suffix != ".json" or not any(finding.rule == "codec.foreign" for finding in refused.findings):
        return suffix in (".toml", ".yaml", ".yml")
    try:
        data = parse(Path(file).read_text(), file)
    except (PlanRejected, OSError, ValueError):
        return False
    return isinstance(data, dict) and not str(data.get("kind", "")).startswith("prepkit.")


def given_plan(file: str, load: Callable[[], T]) -> T | PlanRejected:
    """Return what ``load`` makes of the file, or why it is refused; of a config, what makes a plan of it."""
    try:
        return load()
    except PlanRejected as refused:
        if is_config(file, refused):
            return _named(file, refused, *(_OF_STATEMENT if _is_statement(file) else _of_config(file)))
        return refused


_TAKES = "and this command takes a plan, or an attestation, that prepkit wrote"
_OF_STATEMENT = (
    f"it is an in-toto Statement, which names by its digest what is signed and holds nothing of it, {_TAKES}",
    "give the plan or the attestation that the statement was made of",
)


def _of_config(file: str) -> tuple[str, str]:
    """What it is, and what leads from it to a plan."""
    fix = f"make one: prepkit plan {file} --model PKG.MOD:FACTORY -o plan.json; prepkit import {file} shows the config"
    return f"it is a config, {_TAKES}", fix


def _is_statement(file: str) -> bool:
    from prepkit.codec.statement import TYPE
    from prepkit.codec.text import parse

    data = parse(Path(file).read_text(), file) if file.lower().endswith(".json") else None
    return isinstance(data, dict) and data.get("_type") == TYPE


def _named(file: str, refused: PlanRejected, what: str, fix: str) -> PlanRejected:
    """The refusal of another file that was given in the place of a plan, as what it is."""
    return PlanRejected((evolve(refused.findings[0], rule="codec.foreign", where=file, what=what, fix=fix),))
