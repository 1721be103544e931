"""What a docstring shows is what happens: the examples of every module, run."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_architecture import ACTING

ROOT = Path(__file__).resolve().parents[1]


def with_examples(*, live: bool) -> list[str]:
    """Names of the modules whose source shows an example; rooms that act or look import torch."""
    files = (path for path in sorted((ROOT / "prepkit").rglob("*.py")) if ">>>" in path.read_text())
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files)
    return [name for name in names if bool({*name.split(".")[1:2]} & ACTING) is live]


def failures(name: str, folder: Path) -> tuple[int, str]:
    """How many examples of a module were tried, and the report of those that gave something else."""
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    lines: list[str] = []
    for example in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
        example.globs["folder"] = str(folder)  # where an example may write
        runner.run(example, out=lines.append)
    return runner.tries, "".join(lines)


@pytest.mark.parametrize("name", [*with_examples(live=False), *with_examples(live=True)])
def test_the_examples_of_a_module_give_what_they_show(name: str, tmp_path: Path) -> None:
    tried, report = failures(name, tmp_path)
    assert tried, f"{name} shows >>>, and no example of it was found"
    assert not report, report


def test_examples_of_pure_rooms_need_no_torch() -> None:
    names = with_examples(live=False)
    code = f"""
import doctest, importlib, sys, tempfile
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not to be had here")
sys.meta_path.insert(0, Wall())
with tempfile.TemporaryDirectory() as folder:
    for name in {names!r}:
        module = importlib.import_module(name)
        result = doctest.testmod(module, extraglobs={{"folder": folder}}, optionflags=doctest.ELLIPSIS)
        assert not result.failed, name
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.endswith("fine\n"), done.stdout + done.stderr
