"""Models and plans that commands read, files that they write, and how a refusal ends a command."""

from __future__ import annotations

import functools
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from prepkit.cli.terminal import say, say_json
from prepkit.config import LoadWeights
from prepkit.facts import Env, Facts
from prepkit.findings import Finding, PlanRejected, Severity
from prepkit.plan import Plan

if TYPE_CHECKING:
    from prepkit.formats.policy import Policy

# --- model -----------------------------------------------------------------------------------------------------------


WRONG = "cli.no-such-model"
"""Rule of the finding for an import path that leads nowhere: the command was used wrongly."""


def build(reference: str) -> Any:
    """The ``nn.Module``, on meta. Raises ``PlanRejected`` where the path leads nowhere or the user's code raises."""
    from prepkit.applying.rehearse import factory

    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_concerns_us)
    try:
        return factory.build(reference)
    except Exception as error:
        raise PlanRejected((_finding(reference, error, factory.__file__),)) from error


def _concerns_us(record: logging.LogRecord) -> bool:
    """At import torchao, which transformers imports, tells which kernels it lacks, and torch of what it registers."""
    return not record.getMessage().startswith(("Failed to load", "<enum "))


def facts(reference: str, env: Env | None, checkpoint: LoadWeights | None = None) -> Facts:
    """Facts of the model, in an environment that is declared or here, and of a checkpoint. Raises as ``build`` does."""
    from prepkit.applying.rehearse import factory
    from prepkit.observe import observe

    model = build(reference)
    try:
        return observe(model, env=env, checkpoint=checkpoint).facts
    except (TypeError, ValueError) as error:
        raise PlanRejected((_finding(reference, error, factory.__file__),)) from error


def _finding(reference: str, error: Exception, ours: str) -> Finding:
    """A path that leads nowhere is refused by prepkit's own file; anything deeper is the user's code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"--model {reference}"
    if isinstance(error, ValueError) and frame.filename == ours:
        what, _, fix = str(error).partition("; ")
        fix = fix or "write package.module:name, such as train:make_model"
        return Finding(rule=WRONG, severity=Severity.ERROR, where=where, what=what, fix=fix)
    module, _, name = reference.partition(":")
    return Finding(
        rule="model.not-built",
        severity=Severity.ERROR,
        where=where,
        what=f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})",
        fix=f'see the whole traceback with: python -c "import {module}; {module}.{name}()"',
    )


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
    from prepkit.cli.compare import given_plan

    return readable(tuple(given_plan(file, functools.partial(codec.load_plan, file)) for file in files), as_json)


def policy(files: tuple[str, ...], as_json: bool) -> Policy:
    """The policies in the files. Ends the command where one cannot be read: a broken policy passes nothing."""
    from prepkit.formats.policy import read_policies

    return readable((attempt(lambda: read_policies(files)),), as_json)[0]


def readable(loaded: tuple[T | PlanRejected, ...], as_json: bool) -> tuple[T, ...]:
    """What was loaded. Ends the command if anything is refused, after saying all that is wrong with all of it."""
    good = tuple(value for value in loaded if not isinstance(value, PlanRejected))
    if len(good) < len(loaded):
        refuse(loaded, as_json)
    return good


def refuse(outcomes: tuple[object, ...], as_json: bool) -> NoReturn:
    """Says every finding of the refused ones, and ends the command."""
    from prepkit import codec
    from prepkit.render.text import findings_text

    findings = tuple(
        finding for refused in outcomes if isinstance(refused, PlanRejected) for finding in refused.findings
    )
    if as_json:
        say_json({"findings": codec.to_data(findings)})
    else:
        say(findings_text(findings), err=True)
    sys.exit(2 if any(finding.rule == WRONG for finding in findings) else 1)
