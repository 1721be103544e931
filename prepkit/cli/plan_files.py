"""Models and plans that commands read, files that they write, and how a refusal ends a command."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from prepkit.cli.terminal import say, say_json
from prepkit.config import LoadWeights
from prepkit.facts import Env, Facts
from prepkit.findings import Finding, PlanRejected
from prepkit.later import needs_torch
from prepkit.plan import Plan
from prepkit.rules import found

if TYPE_CHECKING:
    from prepkit.formats.policy import Policy

# --- model -----------------------------------------------------------------------------------------------------------


WRONG = "cli.no-such-model"
"""Rule of the finding for an import path that leads nowhere: the command was used wrongly."""


def build(reference: str, device: str = "meta") -> Any:
    """The ``nn.Module``. Raises ``PlanRejected`` where the path leads nowhere or the user's code raises."""
    demand_torch(f"--model {reference}, a function that returns the model,")
    from prepkit.applying.rehearse import factory

    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_concerns_us)
    try:
        return factory.build(reference, device)
    except Exception as error:
        raise PlanRejected((_finding(reference, error, factory.__file__),)) from error


def _concerns_us(record: logging.LogRecord) -> bool:
    """At import torchao, which transformers imports, tells which kernels it lacks, and torch of what it registers."""
    return not record.getMessage().startswith(("Failed to load", "<enum "))


def demand_torch(what: str) -> None:
    """Ends the command, which is what needs it, where torch is not installed."""
    try:
        needs_torch(what)
    except ModuleNotFoundError as error:
        raise click.UsageError(str(error)) from None


def facts(reference: str, env: Env | None, checkpoint: LoadWeights | None = None) -> Facts:
    """Facts of the model, in an environment that is declared or here, and of a checkpoint. Raises as ``build`` does.

    A folder's are read without torch; where no cluster is declared, one process is.
    """
    if is_folder(reference):
        return _folder_facts(reference, env, checkpoint)
    model = build(reference)
    from prepkit.applying.rehearse import factory
    from prepkit.observe import observe

    try:
        return observe(model, env=env, checkpoint=checkpoint).facts
    except (TypeError, ValueError) as error:
        raise PlanRejected((_finding(reference, error, factory.__file__),)) from error


def is_folder(reference: str) -> bool:
    """True of a folder, a ``config.json`` and a name of the hub such as ``org/name``; not of ``pkg.mod:factory``."""
    there = Path(reference)
    return there.is_dir() or (":" not in reference and (there.suffix == ".json" or _HUB_NAME(reference) is not None))


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?(?<!\.py)").fullmatch


def _folder_facts(reference: str, env: Env | None, how: LoadWeights | None) -> Facts:
    from prepkit.formats.models import folder
    from prepkit.formats.stored_weights import observe_checkpoint

    where = f"--model {reference}"
    try:
        seen = folder.read(place(reference))
        stored = None if how is None else folder.checkpoint_of(observe_checkpoint(how.path), how, seen.model)
    except folder.Impossible as error:
        raise PlanRejected((found("model.sizes", error.where, error.what, error.fix),)) from error
    except folder.NotKnown as error:
        what, _, fix = str(error).rpartition("; ")
        if isinstance(error, folder.NotThere):
            raise PlanRejected((found(WRONG, where, what, fix),)) from error
        raise PlanRejected((found("model.not-known", where, what, fix),)) from error
    for word in seen.words:
        say(f"{where}: {word}", err=True)
    if env is None:
        say(
            f"{where}: no cluster is declared: one process on a cuda device; add --world-size 8 --device cuda", err=True
        )
    return Facts(model=seen.model, checkpoint=stored, env=env or Env.declare(world_size=1))


def place(reference: str) -> Path:
    """The folder or file; of a name of the hub what lies in its cache, as huggingface_hub lays it out. No network."""
    from prepkit.formats.models.folder import NotThere

    if Path(reference).exists() or reference.endswith(".json") or not _HUB_NAME(reference):
        return Path(reference)
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home) / "hub").expanduser()
    kept = hub / f"models--{reference.replace('/', '--')}"
    try:
        revision = (kept / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        revision = ""
    there = kept / "snapshots" / revision
    if revision.isalnum() and (there / "config.json").exists():
        return there
    raise NotThere(
        f"there is no folder {reference}, and {reference} is not in the hub's cache; fetch what describes it with: "
        f"hf download {reference} config.json"
    )


def _finding(reference: str, error: Exception, ours: str) -> Finding:
    """A path that leads nowhere is refused by prepkit's own file; anything deeper is the user's code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"--model {reference}"
    if isinstance(error, ValueError) and frame.filename == ours:
        what, _, fix = str(error).partition("; ")
        fix = fix or "write package.module:name, such as train:make_model"
        return found(WRONG, where, what, fix)
    module, _, name = reference.partition(":")
    what = f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
    fix = f'see the whole traceback with: python -c "import {module}; {module}.{name}()"'
    return found("model.not-built", where, what, fix)


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
    """Return what the call returns, or the ``PlanRejected`` that it raises, as a value."""
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


def refuse(
    outcomes: tuple[object, ...],
    as_json: bool,
    *,
    err: bool = True,
    line: Callable[[Finding], str] = str,
    data: Callable[[Finding], dict[str, Any]] | None = None,
) -> NoReturn:
    """Says every finding of the refused ones, and ends the command; findings that were asked for are no ``err``."""
    from prepkit import codec
    from prepkit.render.text import findings_text

    findings = tuple(
        finding for refused in outcomes if isinstance(refused, PlanRejected) for finding in refused.findings
    )
    wrong = any(finding.rule == WRONG for finding in findings)
    if as_json:
        say_json({"findings": [(data or codec.to_data)(finding) for finding in findings]})
    else:
        say(findings_text(findings, line), err=err or wrong)
    sys.exit(2 if wrong else 1)


UNASKED = "config.unasked"
"""The rule of files whose errors hide what they mean."""


def unasked(path: str, words: str = "", *, told: bool = True) -> Finding:
    """The verdict about a file whose errors hide what it means; ``words`` are those of the command that asked.

    Not ``told``: nothing in it is wrong for its library, and it asks for what prepkit does not do.
    """
    again = " ".join(filter(None, ("prepkit check", path, words)))
    if told:
        what, fix = "what it means is not known while its errors stand", f"Correct its errors, then: {again}"
    else:
        what, fix = "it asks for what prepkit does not do", "Run prepkit audit SCRIPT, where it trains."
    return found("config.unasked", path, f"{what}, so that no rule was asked about it", fix)
