"""The command line run from tests: in this process, or in an interpreter of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import prepkit
from prepkit.cli import main
from prepkit.codec.files import save
from tests.support.patience import MOST
from tests.support.plans import ddp_plan, fsdp2_plan, single_plan

ROOT = Path(prepkit.__file__).parents[1]

MODEL = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(self.up(x))

def make():
    return torch.nn.Sequential(torch.nn.Embedding(16, 4), torch.nn.ModuleList(Block() for _ in range(3)))

def broken():
    raise KeyError("no weights here")

def refusing():
    raise ValueError("heads do not divide the width; take 4")
"""

FSDP2_CONFIG = """
optimizer = "SGD"
[engine]
kind = "FSDP2"
wrap = { kind = "WrapClasses", names = ["Block"] }
[mesh]
replicate = 2
"""


def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory: a model factory, a config for an even number of ranks, and three saved plans."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "model_of_cli_tests.py").write_text(MODEL)
    (tmp_path / "fsdp2.toml").write_text(FSDP2_CONFIG)
    (tmp_path / "single.json").write_text('{"engine": "Single", "optimizer": "SGD"}')
    save(fsdp2_plan(), "fsdp2.json")
    save(ddp_plan(), "ddp.json")
    save(single_plan(), "one.json")
    yield tmp_path
    sys.modules.pop("model_of_cli_tests", None)


MAKE = ("--model", "model_of_cli_tests:make")


def run(*words: str) -> Result:
    """The command in this process; what it raises, other than its exit, fails the test."""
    return CliRunner().invoke(main, words, catch_exceptions=False, prog_name="prepkit")


def python(*words: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    """An interpreter of its own that finds prepkit."""
    buffered = {"PYTHONUNBUFFERED": ""}  # as users run it: the last of the text is written when the interpreter ends
    env = {**os.environ, "PYTHONPATH": str(ROOT), **buffered, **environment}
    command = [sys.executable, *words]
    return subprocess.run(
        command, check=False, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env, timeout=60 * MOST
    )


def fresh(*words: str, prelude: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter of its own, after a few lines of Python."""
    code = f"{prelude}\nimport sys\nsys.argv = ['prepkit', *{list(words)!r}]\nfrom prepkit.cli import main\nmain()"
    return python("-c", code, **environment)
