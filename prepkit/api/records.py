"""What ``apply`` asks before it acts, and keeps afterwards: who signed the plan, and the log of what was applied."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TypeAlias

from prepkit.codec import log as log_file
from prepkit.codec.statement import statement_text
from prepkit.findings import Finding, PlanRejected
from prepkit.findings.text import shorter
from prepkit.observe.env import now
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.ranks.launcher import rank
from prepkit.rules import found

Require: TypeAlias = Callable[[bytes], object] | Sequence[str]
"""Who decides whether a plan may be applied: a function of its statement, or the words of a command."""
FILE = "{statement}"
"""Word of a command that stands for a file with the statement."""
SECONDS = 60.0
"""How long a command may take to decide."""


def refused(plan: Plan, require: Require | None, log: str | PathLike[str] | None) -> Iterator[Finding]:
    """Why the plan may not be applied, or could not be kept. Raises ``TypeError`` for another kind of ``require``."""
    if require is not None and (what := _not_accepted(statement_text(plan).encode(), require)):
        yield found("plan.not-signed", "require", what)
    if log is not None and rank() == 0:
        try:
            log_file.check_end(log)
        except PlanRejected as torn:
            yield from torn.findings


def kept(plan: Plan, attestation: Attestation, log: str | PathLike[str] | None) -> None:
    """Append what was applied, on rank 0. Raises ``PlanRejected`` where that fails: the objects are prepared then."""
    if log is not None and rank() == 0:
        log_file.append(log, plan, attestation, now())


def _not_accepted(statement: bytes, require: Require) -> str:
    """Why the statement is not accepted; empty where it is. Whatever goes wrong on the way accepts nothing."""
    if callable(require):
        try:
            answer = require(statement)
        except Exception as error:  # whatever it raises, it has not accepted
            return f"{_name(require)} raised {type(error).__name__}: {error}"
        return "" if answer is True else f"{_name(require)} returned {answer!r:.60}, and not True"
    if isinstance(require, str | bytes) or not require or not all(isinstance(word, str) for word in require):
        raise TypeError(
            f"require={require!r:.60} is neither a function nor the words of a command; write "
            'require=("ssh-keygen", "-Y", "verify", ...)'
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "statement.json")
        file.write_bytes(statement)
        words = [str(file) if word == FILE else word for word in require]
        try:
            done = subprocess.run(words, input=statement, capture_output=True, timeout=SECONDS, check=False)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return f"{words[0]} could not decide: {error}"
    if done.returncode == 0:
        return ""
    said = " ".join((done.stderr or done.stdout).decode(errors="backslashreplace").split())
    return f"{words[0]} ended with {done.returncode}: {shorter(said, 200) or 'it said nothing'}"


def _name(function: object) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
