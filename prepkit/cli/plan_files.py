"""Plans that commands read and write, and how a refusal ends them; what cannot be written is wrong use."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import click

from prepkit.cli import model as cli_model
from prepkit.cli.terminal import say, say_json
from prepkit.findings import PlanRejected
from prepkit.plan import Plan

T = TypeVar("T")


def save(value: Plan, file: str) -> None:
    """Writes a plan file. Ends the command where the place cannot be written."""
    from prepkit.codec import files as codec_files

    _writing(lambda: codec_files.save(value, file), file)


def write(text: str, file: str) -> None:
    """Writes a text into a file, whole or not at all. Ends the command where the place cannot be written."""
    from prepkit.codec import write_text

    _writing(lambda: write_text(text, file), file)


def keep_inputs(inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    """Ends the command where a file that it reads would be written over."""
    for output in outputs:
        for file in inputs:
            if Path(output).exists() and Path(output).samefile(file):
                raise click.UsageError(f"{output} is read by this command: write to another file")


def _writing(write_file: Callable[[], object], file: str) -> None:
    try:
        write_file()
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{file} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def attempt(call: Callable[[], T]) -> T | PlanRejected:
    """What the call returns, or the ``PlanRejected`` that it raises, as a value."""
    try:
        return call()
    except PlanRejected as refused:
        return refused


def load(files: tuple[str, ...], as_json: bool) -> tuple[Plan, ...]:
    """The plans in the files. Ends the command if any is refused, after saying all that is wrong with all of them."""
    from prepkit import codec

    return readable(tuple(attempt(functools.partial(codec.load_plan, file)) for file in files), as_json)


def readable(loaded: tuple[T | PlanRejected, ...], as_json: bool) -> tuple[T, ...]:
    """What was loaded. Ends the command if anything is refused, after saying all that is wrong with all of it."""
    good = tuple(value for value in loaded if not isinstance(value, PlanRejected))
    if len(good) < len(loaded):
        refuse(loaded, as_json)
    return good


def refuse(outcomes: tuple[object, ...], as_json: bool) -> NoReturn:
    """Says every finding of the refused ones, and ends the command."""
    from prepkit import codec
    from prepkit.render.findings import findings_text

    findings = tuple(
        finding for refused in outcomes if isinstance(refused, PlanRejected) for finding in refused.findings
    )
    if as_json:
        say_json({"findings": codec.to_data(findings)})
    else:
        say(findings_text(findings), err=True)
    sys.exit(2 if any(finding.rule == cli_model.WRONG for finding in findings) else 1)
