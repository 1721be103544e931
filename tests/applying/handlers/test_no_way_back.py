"""The table of handlers."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import prepkit
from prepkit.applying.step_kinds import KINDS, handlers
from prepkit.steps import InitializeDeepSpeed, ParallelizeModules, PartitionParameters, ShardUnits, WrapFSDP1


def test_only_cutting_and_sharding_have_no_way_back() -> None:
    final = {ParallelizeModules, ShardUnits, WrapFSDP1, PartitionParameters, InitializeDeepSpeed}
    assert {kind for kind, handler in handlers().items() if handler.undo is None} == final


def test_handlers_and_interpreter_read_the_plan_and_nothing_else() -> None:
    root = Path(prepkit.__file__).parent
    forbidden = {f"prepkit.{name}" for name in ("config", "facts", "rules", "planner", "codec")}
    files = [path for room in ("interpreter", "applying/handlers") for path in sorted((root / room).glob("*.py"))]
    assert len(files) > 8
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text())))
        imported = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not {name for name in imported if any(f"{name}.".startswith(f"{bad}.") for bad in forbidden)}, file


def test_the_check_that_a_row_names_is_there() -> None:
    for row in KINDS.values():
        module, _, name = row.checked_by.partition(".")
        assert callable(getattr(import_module(f"prepkit.applying.checks.{module}"), name))
