"""What a session of tests leaves behind is listed, and the session has failed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.leftovers import ROOT, Surroundings, leftovers
from tests.support.patience import MOST

PASSING = "def test_it() -> None:\n    pass\n"
LEAVING = """
import subprocess, sys, tempfile
from tests.support import leftovers

leftovers.EXIT_S = 0.5

def test_it() -> None:
    tempfile.mkdtemp(prefix="forgotten-")
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    left = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    left.stdout.readline()  # it runs, with an environment that others can read
"""
WRITING = """
import os
from pathlib import Path

def test_it() -> None:
    assert (Path.home() / ".cache" / "kernel").exists()
    (Path.home() / ".new").touch()
    (Path(os.environ["USERS_HOME"]) / ".by-another-program").touch()
"""


def session(folder: Path, test: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A session of its own over one file, with its temporary files in this folder."""
    (folder / "test_it.py").write_text(test)
    (folder / "tmp").mkdir()
    plugin = ("-p", "tests.support.leftovers", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "--rootdir", str(folder), "-c", os.devnull, "test_it.py"]
    homes = {} if home is None else {"HOME": str(home), "USERS_HOME": str(home)}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp"), **homes}
    return subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=folder, env=environment, timeout=60 * MOST
    )


def test_a_session_that_cleans_up_passes_and_removes_its_folder(tmp_path: Path) -> None:
    done = session(tmp_path, PASSING)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []


def test_processes_and_files_that_are_left_behind_fail_the_session(tmp_path: Path) -> None:
    done = session(tmp_path, LEAVING)
    lines = [line for line in done.stdout.splitlines() if line.startswith("LEFT BEHIND: ")]
    for line in lines:
        if line.startswith("LEFT BEHIND: process "):
            psutil.Process(int(line.split()[3].rstrip(":"))).kill()
    assert done.returncode == 1
    assert [line.split()[2] for line in lines] == ["process", "temporary"]
    assert "time.sleep(600)" in lines[0]
    assert "/forgotten-" in lines[1]


def test_the_home_of_a_session_is_its_own_and_what_it_leaves_there_is_listed(tmp_path: Path) -> None:
    home = tmp_path / "user"
    (home / ".cache").mkdir(parents=True)
    (home / ".cache" / "kernel").touch()
    done = session(tmp_path, WRITING, home)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("LEFT BEHIND: ")] == [
        "LEFT BEHIND: file in the home folder: .new"
    ]
    assert sorted(path.name for path in home.iterdir()) == [".by-another-program", ".cache"]


def test_new_files_in_the_working_tree_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.leftovers.untracked_files", lambda root: frozenset({"old.txt", "new.txt"}))
    before = Surroundings(tmp_path, untracked=frozenset({"old.txt"}))
    assert list(leftovers(before)) == ["file in the working tree: new.txt"]
