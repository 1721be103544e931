"""Processes that have imported torch already: two servers import it once, and every worker of a gang is a fork of one.

There are two, because ranks that share one interpreter's hash seed would iterate over a set in the same order, and a
rank whose order differs is what tests on several processes shall notice.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

from attrs import define, field, frozen

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "functorch.compile",
    "transformers.models.llama.modeling_llama",
    "rich.progress",
    "prepkit.api.acting",
    "prepkit.api.planning",
    "prepkit.applying.apply",
    "prepkit.applying.checks",
    "prepkit.applying.handlers",
    "prepkit.applying.rehearse",
    "prepkit.auditing.script",
    "prepkit.cli",
    "prepkit.formats.importers.accelerate",
    "prepkit.proving.live",
    "prepkit.saving.session",
    "prepkit.training.prepared",
    "tests.support.gang_worker",
)
"""What nearly every task of a gang imports."""


@frozen
class Server:
    """One process that forks, and the wire to it."""

    process: subprocess.Popen[bytes]
    wire: Connection


@define
class ForkServers:
    """The two servers. They start with the first worker, and end with this process at the latest."""

    imports: tuple[str, ...] = IMPORTS
    servers: list[Server] = field(factory=list)

    def fork(self, rank: int, world: int, wire: Connection, log: int) -> Forked:
        """A worker of this rank that talks over ``wire`` and writes its stderr into the file descriptor ``log``."""
        if not self.servers:
            self.servers.extend(_start(self.imports) for _ in range(2))
        server = self.servers[rank % 2]
        assert server.process.poll() is None, "a fork server ended; its stderr is this process's"
        server.wire.send((rank, world))
        for descriptor in (wire.fileno(), log):
            send_handle(server.wire, descriptor, server.process.pid)
        return Forked(pid=server.wire.recv(), server=server)

    def close(self) -> None:
        """Ends the servers, and with them all workers that are left."""
        for server in self.servers:
            assert server.process.stdin is not None, "servers are started with a pipe as stdin"
            server.process.stdin.close()
            server.wire.close()
            server.process.wait()
        self.servers.clear()


@frozen
class Forked:
    """A worker's process, whose parent is its server."""

    pid: int
    server: Server

    def exit_code(self) -> int | None:
        """The exit code once it has ended, negative for a signal."""
        self.server.wire.send(self.pid)
        code: int | None = self.server.wire.recv()
        return code

    def send_signal(self, number: int) -> None:
        """A signal, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _start(imports: tuple[str, ...]) -> Server:
    ours, theirs = Pipe()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name need not resolve
    process = subprocess.Popen(
        [sys.executable, "-c", f"from tests.support.fork_server import serve; serve({theirs.fileno()}, {imports})"],
        stdin=subprocess.PIPE,  # never written to: its end tells the workers that we are gone
        pass_fds=(theirs.fileno(),),
        env=environment,
        cwd=ROOT,
    )
    theirs.close()
    return Server(process, ours)


# --- the far end -----------------------------------------------------------------------------------------------------


def serve(descriptor: int, imports: tuple[str, ...]) -> None:
    """Main function of a server: forks workers and reports their ends, until the wire ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # no collection of a worker looks at the modules, or copies their pages
    from tests.support.gang_worker import work

    wire = Connection(descriptor)
    codes: dict[int, int] = {}
    with suppress(EOFError, ConnectionError):
        while True:
            match wire.recv():
                case (int(rank), int(world)):
                    wire.send(_fork(wire, rank, world, work))
                case int(pid):
                    wire.send(_exit_code(pid, codes))


def _fork(wire: Connection, rank: int, world: int, work: Callable[[int, int, int], None]) -> int:
    task_wire, log = recv_handle(wire), recv_handle(wire)
    pid = os.fork()
    if pid:
        os.close(task_wire)
        os.close(log)
        return pid
    code = 1
    try:
        os.close(wire.fileno())
        os.dup2(log, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        work(rank, world, task_wire)
        code = 0
    finally:
        os._exit(code)


def _exit_code(pid: int, codes: dict[int, int]) -> int | None:
    if pid not in codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return None
        codes[pid] = os.waitstatus_to_exitcode(status)
    return codes[pid]
