"""accelerate's own scripts through prepkit's face: a drawn part of them for real, and the table as a whole."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from attrs import evolve

from tests.compat.scripts import run
from tests.compat.scripts.check import Deviation
from tests.compat.scripts.table import CHECKS, NOT_RUN
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang

pytest.importorskip("accelerate")

DRAWN = (
    "process_execution_check",
    "dl_preparation_check",
    "check_seedable_sampler_with_data_seed",
    "test_trigger",
    "test_reinstantiated_state",
    "test_op_checker",
    "test_dataloader_break",
    "test_noop_sync",
    "test_distributed_sync_multiple_fwd",
    "test_pickle_accelerator",
    "check_seedable_sampler_in_batch_sampler_shard",
)
"""Checks that take little time; ``python -m tests.tools.accelerate_scripts`` runs all."""


def test_a_drawn_part_of_the_checks_comes_out_as_the_table_says(gang2: Gang, fork_servers: ForkServers) -> None:
    alone = Gang(1, fork_servers)
    gangs = {1: alone, 2: gang2}
    try:
        chosen = [(at, check) for at, check in enumerate(CHECKS) if check.name in DRAWN]
        chosen += [
            (at, check)
            for at, check in enumerate(CHECKS)
            if check.note == "float32 and bfloat16" and not check.options[0][1]
        ]
        chosen += [(at, check) for at, check in enumerate(CHECKS) if check.name.endswith("opt_and_scheduler")][:1]
        assert len({check.title for _, check in chosen}) == len(DRAWN) + 2
        rows = [run.row(gangs[world], at, check) for at, check in chosen for world in check.worlds]
        assert [str(row) for row in rows if row.outcome not in ("passed", "deviation")] == []
        assert {row.outcome for row in rows} == {"passed", "deviation"}
        at, check = next((at, check) for at, check in enumerate(CHECKS) if check.name == "test_reinstantiated_state")
        for deviations in ((), (Deviation(raises="another error", why="none"),)):
            assert run.row(alone, at, evolve(check, deviations=deviations)).outcome == "UNEXPLAINED"
    finally:
        alone.close()


def called(script: Path) -> set[str]:
    """Functions of a script that its ``main``, or its end, calls, and those that take arguments from there."""
    tree = ast.parse(script.read_text())
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    calls = {
        call.func.id
        for node in tree.body
        if isinstance(node, ast.If) or (isinstance(node, ast.FunctionDef) and node.name == "main")
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    return calls & own - {"main", "create_accelerator", "setup", "mock_training"}


def test_every_check_that_a_script_calls_has_a_row() -> None:
    spec = importlib.util.find_spec("accelerate")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "test_utils" / "scripts"
    missing = []
    for path in sorted(folder.rglob("test_*.py")):
        script = ".".join(path.relative_to(folder).with_suffix("").parts)
        rows = {check.name for check in CHECKS if check.script == script}
        left_out = " ".join(what for name, what, _ in NOT_RUN if name == script)
        assert rows or left_out, script
        missing += [f"{script}.{name}" for name in called(path) if name not in rows and name not in left_out]
    assert missing == []


def test_every_deviation_has_a_reason_and_the_error_by_which_it_is_told() -> None:
    for check in CHECKS:
        for deviation in check.deviations:
            assert set(deviation.worlds) & set(check.worlds), check.title
            assert len(deviation.why) > 40, check.title
            assert len(deviation.raises) > 5, check.title
    assert len({(check.script, check.title) for check in CHECKS}) == len(CHECKS)
