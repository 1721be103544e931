"""Time-outs grow with the load of the machine, and stay bounds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import patience
from tests.support.leftovers import ROOT
from tests.support.patience import MOST, Patience, cores, slowdown

HANGS = """
import threading

def waits() -> None:
    threading.Event().wait()

def test_it() -> None:
    waits()
"""


def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mean: float, now: int) -> None:
    """A machine with so many runnable processes, over the last minute and at this moment."""
    (tmp_path / "stat").write_text(f"cpu 1 2 3\nprocs_running {now}\nprocs_blocked 0\n")
    monkeypatch.setattr(patience, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "getloadavg", lambda: (mean, 0.0, 0.0))


def test_an_idle_machine_takes_the_time_that_was_meant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load(monkeypatch, tmp_path, 0.0, 1)
    assert slowdown() == 1.0


@pytest.mark.parametrize(("mean", "now"), [(2.5, 0.0), (0.0, 2.5), (1.0, 2.5)])
def test_a_busy_machine_takes_as_much_longer_as_processes_share_a_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mean: float, now: float
) -> None:
    load(monkeypatch, tmp_path, mean * cores(), round(now * cores()))
    assert slowdown() == 2.5
    assert 24 < Patience(10.0).left() <= 25


def test_no_load_makes_a_time_out_endless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load(monkeypatch, tmp_path, 1e6, 10**6)
    assert slowdown() == MOST
    assert Patience(1.0, began=time.monotonic() - MOST).left() <= 0


def test_a_test_that_hangs_fails_with_its_stack(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    plugins = ("-p", "tests.support.time_limits", "-p", "no:cacheprovider", "-o", "timeout=1")
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "--rootdir", str(tmp_path), "-c", os.devnull]
    done = subprocess.run(
        [*command, "test_it.py"], check=False, capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60 * MOST,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Timeout (>1" in done.stdout
    assert "in waits" in done.stdout
