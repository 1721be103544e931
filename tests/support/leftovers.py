"""A session of tests leaves nothing behind: a pytest plugin that lists what it left, and then the session has failed.

Temporary files of the session and of all its processes go into one folder, and so does their home, so that nothing of
the user's is touched and nothing that others write there counts. Looked for are processes that live longer than the
session, files in the folder, names in that home, and new files in the working tree that git does not ignore. Caches
stay: ``~/.cache`` is the user's own, since what is in it is compiled or fetched once on each machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from attrs import frozen

from tests.support.patience import Patience

ROOT = Path(__file__).resolve().parents[2]
EXIT_S = 10.0
"""Seconds that processes get to end after the session."""
KEPT = ("pytest-of-", "inductor-cache", "prepkit-tiny-", "torchelastic_")
"""Names in the folder that are removed with it: pytest's own, torch's compiled code, a stored model's, kept as long as
its process (``fragile_model.stored``), and torchrun's of workers that failed, as some tests want them to."""

HOME = "home"
"""Name of the session's home in its folder."""
TAKEN = (".cache", ".gitconfig")
"""Names in the user's home that the session sees in its own."""
LIBRARIES = (".config", ".triton")
"""Folders that matplotlib and triton make in any home. They go with the session's."""


@frozen
class Surroundings:
    """What was there when the session began, and where it puts its temporary files."""

    folder: Path
    untracked: frozenset[str]

    @property
    def home(self) -> Path:
        """The home folder of the session's processes."""
        return self.folder / HOME


def surroundings(folder: Path) -> Surroundings:
    """What is there now."""
    return Surroundings(folder, untracked_files(ROOT))


def own_home(before: Surroundings) -> Path:
    """Make the session's home, with what it takes from the user's."""
    before.home.mkdir()
    for name in TAKEN:
        if (own := Path.home() / name).exists():
            (before.home / name).symlink_to(own)
    return before.home


def untracked_files(root: Path) -> frozenset[str]:
    """Files of a working tree that git neither tracks nor ignores; none where there is no git."""
    command = ["git", "-C", str(root), "ls-files", "--others", "--exclude-standard"]
    with suppress(OSError):
        listed = subprocess.run(command, capture_output=True, text=True, check=False)
        return frozenset(listed.stdout.splitlines())
    return frozenset()


def leftovers(before: Surroundings) -> Iterator[str]:
    """One line for each thing that is there now and was not before."""
    for process in _processes(before.folder):
        yield f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
    for path in sorted(before.folder.iterdir()):
        if not path.name.startswith(KEPT) and path != before.home:
            yield f"temporary file {path}"
    for name in sorted(untracked_files(ROOT) - before.untracked):
        yield f"file in the working tree: {name}"
    for path in sorted(before.home.iterdir()) if before.home.is_dir() else ():
        if path.name not in (*TAKEN, *LIBRARIES):
            yield f"file in the home folder: {path.name}"


def _processes(folder: Path) -> list[psutil.Process]:
    """Processes that were started with this folder for temporary files, and do not end by themselves."""
    ours = [process for process in psutil.process_iter() if _temporary_folder(process) == str(folder)]
    patience = Patience(EXIT_S)
    _, alive = psutil.wait_procs(ours, timeout=patience.left() if ours else 0)
    return alive


def _temporary_folder(process: psutil.Process) -> str | None:
    with suppress(psutil.Error):
        return process.environ().get("TMPDIR")
    return None


# --- the plugin ------------------------------------------------------------------------------------------------------

BEFORE = pytest.StashKey[Surroundings]()


def pytest_configure(config: pytest.Config) -> None:
    """Gives the session its folder; the workers of pytest-xdist share that of the session that started them."""
    if hasattr(config, "workerinput"):
        return
    folder = Path(tempfile.mkdtemp(prefix="pk-"))
    config.stash[BEFORE] = before = surroundings(folder)
    os.environ["HOME"] = str(own_home(before))
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor-cache")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    """Once everything else has finished, fixtures of the session included."""
    yield
    if (before := session.config.stash.get(BEFORE, None)) is None:
        return
    lines = list(leftovers(before))
    for line in ("", *(f"LEFT BEHIND: {line}" for line in lines)) if lines else ():
        print(line)
    if lines and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        shutil.rmtree(before.folder, ignore_errors=True)
