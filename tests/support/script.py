"""Scripts in processes that are forked from a server which has imported torch: what torchrun starts, without the wait.

torchrun itself, and the end of an interpreter, are tested where it matters (``tests/ranks/test_rendezvous.py``).
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.fork_server import ForkServers
from tests.support.gang import Gang


def run_script(
    servers: ForkServers,
    world: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    timeout: float,
    folder: Path | None = None,
) -> str:
    """Run a script, ``command[0]``, as torchrun would on so many processes; return what they wrote, rank by rank.

    ``folder``: where it is run; None: where the test runs.

    Raises ``GangError`` where it raises on a rank, or is there after ``timeout`` seconds of an idle machine.
    """
    gang = Gang(world, servers)
    try:
        where = str(folder or Path.cwd())
        return "".join(gang.run_fresh(_as_script, tuple(command), dict(environment), where, timeout=timeout))
    finally:
        gang.close()


def _as_script(rank: int, world: int, command: tuple[str, ...], environment: dict[str, str], folder: str) -> str:
    os.chdir(folder)
    os.environ.update(environment)
    sys.path[:0] = [str(Path(command[0]).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = list(command)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"{command[0]} ended with {end.code}") from end
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        log.seek(0)
        return log.read()
