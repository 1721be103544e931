"""Scripts under torchrun, as tests and benchmarks start them, and a launcher's variables."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import psutil

from tests.support.patience import Patience

STACKS_S = 10.0
"""Seconds that processes get to write their stacks."""


def torchrun(processes: int) -> list[str]:
    """The command that starts so many processes here.

    The address is given because torchrun would take the host's name, which need not resolve: all ranks then wait.
    """
    local = ("--standalone", "--local-addr", "127.0.0.1")
    return [sys.executable, "-m", "torch.distributed.run", *local, "--nproc-per-node", str(processes)]


@contextmanager
def launched(rank: int, world: int) -> Iterator[None]:
    """The variables that a launcher sets, for accelerate and DeepSpeed; afterwards all is as before."""
    import torch

    before, off = dict(os.environ), torch._dynamo.config.disable
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": 29511}
    if torch.distributed.is_initialized():
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    try:
        yield
    finally:
        torch._dynamo.config.disable = off
        os.environ.clear()
        os.environ.update(before)
        state = sys.modules.get("accelerate.state")
        for kind in ("AcceleratorState", "GradientState", "PartialState") if state is not None else ():
            getattr(state, kind)._reset_state()


def launch(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> str:
    """What a launcher and everything it starts wrote.

    Raises ``AssertionError`` if it fails, or if it is still there after ``timeout`` seconds (of an idle machine): then
    its processes show their stacks and are killed, those too that the launcher has put into sessions of their own.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        environment = {**os.environ, **environment, "PYTHONFAULTHANDLER": "1"}
        with psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT) as launched:
            try:
                code = _awaited(launched, Patience(timeout))
            finally:
                _end(launched)
        log.seek(0)
        said = log.read()
    assert code is not None, f"still running after {timeout:.0f} s:\n{said}"
    assert code == 0, f"exit status {code}:\n{said}"
    return said


def _awaited(launched: psutil.Popen, patience: Patience) -> int | None:
    while (left := patience.left()) > 0:
        with suppress(psutil.TimeoutExpired):
            return int(launched.wait(left))
    return None


def _end(launched: psutil.Popen) -> None:
    """Ends a launcher that is still there and all that it started; the workers show their stacks, one after the other.

    The launcher is stopped meanwhile: once a worker has gone, it would end the others.
    """
    if not launched.is_running():
        return
    launched.suspend()
    workers = launched.children(recursive=True)
    for worker in workers:
        worker.send_signal(signal.SIGABRT)
        _await_end(worker)
    for process in (*workers, launched):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs([*workers, launched], STACKS_S)


def _await_end(worker: psutil.Process) -> None:
    """Until it has ended, if only as a zombie: the launcher is stopped and takes no leave of it."""
    until = time.monotonic() + STACKS_S
    with suppress(psutil.NoSuchProcess):
        while worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
            time.sleep(0.05)
