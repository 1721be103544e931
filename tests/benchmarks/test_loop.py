"""The benchmark of the loop still drives both loops; its figures are made by the command."""

from __future__ import annotations

import pytest

from tests.benchmarks import loop


def test_both_loops_of_the_benchmark_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "WINDOWS", 1)
    found = loop.measure("single", 8)
    assert {"prepkit", "mean_over", "ms"} <= set(found)
    assert all(figure > 0 for figure in found.values())
