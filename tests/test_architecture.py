"""What holds of the house as a whole: layers, tables, and names that saved plans rest on."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from prepkit.applying.step_kinds import KINDS
from prepkit.steps import Step
from tests.support.step_kinds import STEP_KINDS

ROOT = Path(__file__).resolve().parents[1]

VIOLATIONS = {
    "Only rooms that act or look import torch and its friends": ("prepkit/rules/mesh.py", "import torch"),
    "Acting does not reach up to planning": ("prepkit/applying/apply.py", "from prepkit import planner"),
    "Apply reads the plan and nothing else": ("prepkit/applying/handlers/ddp.py", "from prepkit import config"),
    "Layers: a file imports only from lines below its own": ("prepkit/facts/env.py", "from prepkit import codec"),
    "Layers inside applying": ("prepkit/applying/handlers/ddp.py", "from prepkit.applying import verification"),
    "Layers inside the plan": ("prepkit/plan/layout.py", "from prepkit.plan import drift"),
    "Layers inside the codec": ("prepkit/codec/text.py", "from prepkit.codec import field_types"),
    "Layers inside the formats": ("prepkit/formats/launches.py", "from prepkit.formats import started"),
    "No circle": ("prepkit/saving/contents.py", "from prepkit.saving.session import Checkpoints"),
    "Layers inside the DeepSpeed config": (
        "prepkit/resolve/deepspeed/keys.py",
        "from prepkit.resolve.deepspeed import data",
    ),
    "Layers inside the command line": ("prepkit/cli/options.py", "from prepkit.cli import plan_files"),
    "Only the codec's converter imports cattrs": ("prepkit/planner/budget.py", "import cattrs"),
    "returns stays at the two edges": ("prepkit/rules/model.py", "from returns.result import Result"),
}


def test_the_kinds_of_steps_are_those_that_saved_plans_know() -> None:
    kinds = {kind.__name__ for kind in get_args(Step)}
    new, gone = sorted(kinds - set(STEP_KINDS.split())), sorted(set(STEP_KINDS.split()) - kinds)
    assert not new, f"tests/support/step_kinds.py: STEP_KINDS lacks {', '.join(new)}"
    assert not gone, f"files of format 2 may hold {', '.join(gone)}; a kind that goes needs another format number"


def test_every_kind_of_step_has_a_row() -> None:
    missing = sorted(kind.__name__ for kind in set(get_args(Step)) - set(KINDS))
    assert not missing, f"prepkit/applying/step_kinds: KINDS lacks a row for {', '.join(missing)}"
    assert set(KINDS) == set(get_args(Step))


def test_every_step_says_what_it_does_and_when_it_fails() -> None:
    for kind in get_args(Step):
        assert kind.__doc__
        assert "Fails" in kind.__doc__ or kind.__name__ in {"ShardLoader", "CreateOptimizer"}, kind.__name__


ACTING = {
    *("applying", "auditing", "compat", "court", "loading", "objects", "observe", "proving", "ranks", "saving"),
    "training",
}
"""Rooms that act on live objects, or look at them."""


def test_every_room_but_those_that_act_or_look_is_kept_from_torch() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (kept,) = (one["source_modules"] for one in contracts if one["name"].startswith("Only rooms that act or look"))
    rooms = {
        one.stem
        for one in (ROOT / "prepkit").iterdir()
        if (one / "__init__.py").exists() or (one.suffix == ".py" and not one.stem.startswith("__"))
    }
    assert set(kept) == {f"prepkit.{room}" for room in rooms - ACTING} | {
        "prepkit.auditing.outcome",
        "prepkit.auditing.reconstruction",
    }


def test_a_variable_of_the_environment_is_read_by_rooms_that_act_and_by_whoever_is_asked_to_read_them() -> None:
    """Else a config, or a plan, would be another one on another machine."""
    files = (ROOT / "prepkit").rglob("*.py")
    readers = [file.relative_to(ROOT) for file in files if re.search(r"\b(environ|getenv)\b", file.read_text())]
    assert {str(path) for path in readers if path.parts[1] not in ACTING - {"compat"}} == {
        "prepkit/cli/audit.py",
        "prepkit/cli/import_and_export.py",
        "prepkit/cli/plan_files.py",
        "prepkit/compat/accelerate/arguments.py",
    }


LONG = {
    "prepkit/plan/step_text.py effect": "a line for each kind of step, in one match",
}
"""What is longer than the house allows, with the reason. Nothing is added here that can be divided."""


def test_files_have_at_most_500_lines_and_functions_60_beside_their_docstring() -> None:
    long = []
    for file in sorted((ROOT / "prepkit").rglob("*.py")):
        path, source = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
        if source.count("\n") > 500:
            long.append(path)
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        long += [f"{path} {node.name}" for node in functions if lines_of(node) > 60]
    assert set(long) == set(LONG), "divide it by what it is about"


def lines_of(function: ast.FunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, of which no contract is broken."""
    folder = tmp_path_factory.mktemp("copied")
    shutil.copytree(ROOT / "prepkit", folder / "prepkit", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    assert lint(folder).returncode == 0
    return folder


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_an_import_contract_breaks_when_it_is_violated(copied: Path, contract: str) -> None:
    file, line = VIOLATIONS[contract]
    before = (copied / file).read_text()
    (copied / file).write_text(f"{before}\n{line}\n")
    try:
        broken = lint(copied)
    finally:
        (copied / file).write_text(before)
    assert broken.returncode == 1
    assert f"{contract} BROKEN" in " ".join(broken.stdout.split())


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"
    return subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_importing_prepkit_loads_nothing_heavy() -> None:
    code = (
        "import prepkit, sys; print(*(n for n in ('torch', 'cattrs', 'returns', 'rich', 'numpy') if n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
    control = code.replace("import prepkit", "import prepkit.codec")
    assert (
        subprocess.run([sys.executable, "-c", control], capture_output=True, text=True, check=True).stdout == "cattrs\n"
    )


def test_whether_there_are_other_ranks_is_asked_in_one_way() -> None:
    asking = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "prepkit").rglob("*.py")
        if "dist.is_initialized()" in file.read_text(encoding="utf-8")
    }
    assert asking == {"prepkit/ranks/world.py"}, "ask prepkit.ranks.world.world() instead"
