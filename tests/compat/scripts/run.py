"""Runs a check in the processes of a gang, with prepkit's names in the place of accelerate's."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import tempfile
from types import ModuleType
from typing import Any

import torch
from attrs import frozen

from prepkit.compat import accelerate as face
from tests.compat.scripts.check import Check
from tests.support.gang import Gang, GangError
from tests.support.gang_worker import Raised

PACKAGE = "accelerate.test_utils.scripts"


@frozen
class Row:
    """What came out."""

    check: Check
    world: int
    outcome: str
    """``passed``, ``deviation`` or ``UNEXPLAINED``."""
    reason: str

    def __str__(self) -> str:
        return f"| {self.check.script} | `{self.check.title}` | {self.world} | {self.outcome} | {self.reason} |"


def row(gang: Gang, at: int, check: Check) -> Row:
    """Runs the check that stands there in the table."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            gang.run_fresh(run, at, folder, timeout=60)
        failed = ""
    except GangError as error:
        failed = last_line(error)
    expected = check.deviation(gang.world)
    if expected is None:
        return Row(check, gang.world, "UNEXPLAINED" if failed else "passed", failed)
    if expected.raises in failed and failed:
        return Row(check, gang.world, "deviation", expected.why)
    return Row(check, gang.world, "UNEXPLAINED", f"{failed or 'passes'}, and the table says: {expected.raises}")


def last_line(error: GangError) -> str:
    """What the first rank that raised has raised, in one line."""
    raised = [one.traceback for one in error.outcomes if isinstance(one, Raised)]
    lines = (raised[0] if raised else str(error)).strip().splitlines()
    at = max((at for at, line in enumerate(lines) if re.match(r"[A-Za-z_.]+(: |$)", line)), default=0)
    return " ".join(line.strip() for line in lines[at:])[:400]


def run(rank: int, world: int, at: int, folder: str) -> None:
    """The check, in a folder of its own, as the script has it."""
    from tests.compat.scripts.table import CHECKS

    del rank, world
    check = CHECKS[at]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    module = replaced(check.script)
    if check.before is not None:
        check.before(module)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        getattr(module, check.name)(*check.arguments(module), **dict(check.options))


def replaced(script: str) -> ModuleType:
    """The script's module, read anew, with every name that prepkit's face has in the place of accelerate's."""
    sys.modules.setdefault("evaluate", ModuleType("evaluate"))  # imported by a script, for checks that download
    name = f"{PACKAGE}.{script}"
    module = importlib.reload(sys.modules[name]) if name in sys.modules else importlib.import_module(name)
    for offered in face.__all__:
        if hasattr(module, offered):
            setattr(module, offered, getattr(face, offered))
    if hasattr(module, "are_the_same_tensors"):
        module.are_the_same_tensors = same_on_every_rank  # type: ignore[attr-defined]
    return module


def same_on_every_rank(tensor: Any) -> bool:
    """What ``accelerate.test_utils.are_the_same_tensors`` says, which asks accelerate's own state."""
    return all(torch.equal(row, tensor) for row in face.gather(tensor[None]))
