"""The command that drops settings sees cited tests fail, those in other processes too."""

from __future__ import annotations

import subprocess
import sys

from prepkit import planner
from tests.support.dropped_setting import dropping
from tests.support.gang import Gang
from tests.support.settings import SETTINGS
from tests.tools import dropped_settings


def test_a_cited_test_that_fails_and_one_that_proves_something_else_are_told_apart() -> None:
    command = [sys.executable, "-m", "tests.tools.dropped_settings", "K-H3", "DM-2", "--alone"]
    done = subprocess.run(command, cwd=dropped_settings.ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert "5 of 5 proofs hold" in lines[-1], done.stdout + done.stderr
    at = lines.index("K-H3 FP16.growth_factor: 1 of 2 cited tests notice")
    assert lines[at + 1 : at + 3] == [
        "  passes test_the_scaler_has_the_numbers_of_the_step_and_is_taken_back",
        "  fails  test_a_setting_reaches_what_the_library_is_given",
    ]
    assert "  fails  test_only_the_config_keeps_a_device_map_and_a_variable_that_says_so_is_named" in lines
    assert done.returncode == 0


def buckets(rank: int, world: int) -> str:
    (setting,) = (one for one in SETTINGS if one.name == "DDP.bucket_cap_mb")
    plan = planner.plan(setting.asked, setting.facts).unwrap()
    return str(next(one.step for one in plan.steps if type(one.step).__name__ == "WrapDDP").bucket_cap_mb)  # type: ignore[union-attr]  # by its name


def test_a_setting_is_dropped_in_the_workers_of_a_gang_as_long_as_it_is_dropped_here(gang2: Gang) -> None:
    assert gang2.run(buckets) == ["5.0", "5.0"]
    with dropping("DDP.bucket_cap_mb"):
        assert gang2.run(buckets) == ["25.0", "25.0"]
    assert gang2.run(buckets) == ["5.0", "5.0"]


def test_every_row_with_a_setting_is_run() -> None:
    assert len(dropped_settings.proofs()) == 219
    assert all(proof.tests for proof in dropped_settings.proofs())
