"""Scripts in processes that are forked from a server which has imported torch: what torchrun starts, without the wait.

torchrun itself, and the end of an interpreter, are tested where it matters (``tests/ranks/test_rendezvous.py``).
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from tests.support.fork_server import ROOT, ForkServers
from tests.support.gang import Gang


@frozen
class Ran:
    """How a command has ended on one rank."""

    code: int
    out: str
    err: str


def run_script(
    servers: ForkServers,
    world: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout: float,
    folder: Path | None = None,
) -> str:
    """Run a script as torchrun would on so many processes; return what they wrote, rank by rank.

    Raises ``AssertionError`` where it fails on a rank, and what ``ran`` raises.
    """
    each = ran(servers, world, command, environment, timeout, folder)
    said = "".join(f"{one.out}{one.err}" for one in each)
    assert all(one.code == 0 for one in each), f"exit status {[one.code for one in each]}:\n{said}"
    return said


def ran(
    servers: ForkServers,
    world: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout: float,
    folder: Path | None = None,
) -> list[Ran]:
    """How a script, or ``-m`` and a module, has ended on each of so many processes.

    ``folder``: where it is run; None: where the test runs. Raises ``GangError`` where it is there after ``timeout``
    seconds of an idle machine.
    """
    gang = Gang(world, servers)
    try:
        where = str(folder or Path.cwd())
        return gang.run_fresh(_as_script, tuple(command), dict(environment), where, timeout=timeout)
    finally:
        gang.close()


def run_typed(
    servers: ForkServers, command: Sequence[str], environment: Mapping[str, str], folder: Path, timeout: float = 120.0
) -> Ran:
    """How a command has ended that somebody has typed: no launcher has started it."""
    gang = Gang(1, servers)
    try:
        (done,) = gang.run_fresh(_as_typed, tuple(command), dict(environment), str(folder), timeout=timeout)
        assert isinstance(done, Ran)
        return done
    finally:
        gang.close()


def _as_typed(rank: int, world: int, *how: Any) -> Ran:
    for name in LAUNCHER:
        os.environ.pop(name, None)
    return _as_script(rank, world, *how)


LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a process that is launched gets from its launcher, and not from what launches."""


def fork_torchrun(servers: ForkServers, patches: pytest.MonkeyPatch) -> list[Ran]:
    """From now on ``subprocess.run`` of torchrun with two processes forks them; how each has ended, once it has."""
    ended: list[Ran] = []

    def start(command: tuple[str, ...], env: Mapping[str, str], *, check: bool) -> subprocess.CompletedProcess[str]:
        assert command[1:5] == ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
        assert not check
        ours = {name: value for name, value in env.items() if name not in LAUNCHER} | {"PYTHONPATH": str(ROOT)}
        ended.extend(ran(servers, 2, command[5:], ours, 120))
        return subprocess.CompletedProcess(command, int(any(one.code for one in ended)))

    patches.setattr(subprocess, "run", start)
    return ended


def _as_script(rank: int, world: int, command: tuple[str, ...], environment: dict[str, str], folder: str) -> Ran:
    os.chdir(folder)
    os.environ.update(environment)
    module = command[0] == "-m"
    first = "" if module else str(Path(command[0]).parent)
    sys.path[:0] = [first, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = [*command[module:]]
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        with _without_tests():
            code = _code(command[1] if module else "", command[0])
        sys.stdout.flush()
        sys.stderr.flush()
        out.seek(0)
        err.seek(0)
        return Ran(code, out.read(), err.read())


@contextmanager
def _without_tests() -> Iterator[None]:
    """Inside, no module of the tests is among what the process has imported: a script's process has none."""
    tests = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "tests"}
    try:
        yield
    finally:
        sys.modules.update(tests)


_left: list[dict[str, Any]] = []
"""Globals of scripts, which live as long as the process: a wrapper that goes away while its group is there may wait in
C++ for the other rank, with nobody to tell where."""


def _code(module: str, script: str) -> int:
    """The exit status that an interpreter would end with."""
    try:
        if module:
            _left.append(runpy.run_module(module, run_name="__main__", alter_sys=True))
        else:
            _left.append(runpy.run_path(script, run_name="__main__"))
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
