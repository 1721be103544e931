"""The counts of the package stay below their ceilings, and count what they say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.tools import house


def test_no_count_is_above_its_ceiling() -> None:
    over = [
        (one.what, one.now, one.ceiling) for one in house.counts() if one.ceiling is not None and one.now > one.ceiling
    ]
    assert not over, "make counts shows them; raise a ceiling only with a reason in the commit"


def test_each_count_sees_what_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = """
import warnings
from prepkit.config import FSDP2
def bad(plan, dist):
    if isinstance(plan.config.engine, FSDP2) and dist.is_initialized():
        warnings.warn("no id")
    match plan:
        case FSDP2():
            raise RuntimeError(f"no id {plan}")
    LOG.warning("no id")
    raise ValueError(plan)
class OutOfOrder(Exception):
    pass
class Late(OutOfOrder):
    pass
class Told(RunRefused):
    pass
def worse():
    if 1:
        raise Late("no id")
    raise Told(())
"""
    found = {house.PACKAGE / "training" / "planted.py": ast.parse(planted)}
    monkeypatch.setattr(house, "modules", lambda: found)
    house.untold.cache_clear()
    assert house.raised(lambda name: name == "RuntimeError") == 1
    assert house.untold() == {"OutOfOrder", "Late"}
    assert house.raised(house.untold().__contains__) == 1
    assert house.raised(house.ARGUMENTS.__contains__) == 1
    assert house.logged() == 1
    assert house.calls("warnings.warn", house.RUNNING) == 1
    assert house.calls("is_initialized") == 1
    assert house.engine_tests() == 2
    assert house.config_reads() == 1
    house.untold.cache_clear()


def test_a_line_of_digests_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "digests.txt").write_text("steps: a0a0 0ac5 e26f d992 6ed8\n")
    (tmp_path / "plain.txt").write_text("parameters 3088 B in bf16, of 1024, 4096 and 8192\n")
    assert house.has_digests(tmp_path / "digests.txt")
    assert not house.has_digests(tmp_path / "plain.txt")
