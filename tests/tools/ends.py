"""How runs end: the same few steps on two processes many times, and how many of the processes are aborted at the end.

``python -m tests.tools.ends [--runs 500] [WAY ...]`` prints a row for each way to end, and ends with 1 where a process
did not end with 0. The processes are forked from this one, which has imported torch; each ends as an interpreter does:
wrappers, process groups and gloo's threads are torn down in whatever order Python and C++ choose.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import prepkit as pk
import prepkit.applying.apply
import prepkit.training.loop
from tests.benchmarks.rivals import has_accelerate
from tests.support.gang import free_port

STEPS, LONGEST_S = 3, 60.0
_kept: list[object] = []
"""What lives until the interpreter ends, as a global of a script does."""


def _train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    _kept.extend((model, optimizer))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))


def _torch(*, ends: bool) -> None:
    dist.init_process_group("gloo")
    _train(DistributedDataParallel(_model()))
    if ends:
        dist.destroy_process_group()


def _prepkit(engine: pk.config.Engine, *, closes: bool, beside: bool = False) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cfg = pk.Config(engine=engine, loaders=pk.data.KeepLoaders())
    ready = pk.apply(pk.build_plan(cfg, model, optimizer))
    if beside:
        _train(DistributedDataParallel(_model()))
    loss = None
    for _ in range(STEPS):
        loss = ready.model(torch.ones(4, 32)).square().mean()
        ready.backward(loss)
        ready.step()
    _kept.extend((ready, loss))
    if closes:
        ready.close()


def _accelerate() -> None:
    from prepkit.compat.accelerate import Accelerator

    accelerator = Accelerator()
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        accelerator.backward(model(torch.ones(4, 32)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    _kept.extend((accelerator, model))
    accelerator.end_training()


WAYS: dict[str, Callable[[], None]] = {
    "torch's DDP, left": lambda: _torch(ends=False),
    "torch's DDP, its group destroyed": lambda: _torch(ends=True),
    "prepkit under DDP, left": lambda: _prepkit(pk.DDP(), closes=False),
    "prepkit under DDP, closed": lambda: _prepkit(pk.DDP(), closes=True),
    "prepkit under DDP, closed while another wrapper lives on": lambda: _prepkit(pk.DDP(), closes=True, beside=True),
    "prepkit under FSDP1, closed": lambda: _prepkit(pk.FSDP1(wrap=pk.wrap.WrapRoot()), closes=True),
    "prepkit under FSDP2, closed": lambda: _prepkit(pk.FSDP2(wrap=pk.wrap.WrapRoot()), closes=True),
    "the face of accelerate, end_training()": _accelerate,
}


def main() -> int | None:
    """The exit code; None in a forked process, which ends as a script does."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.ends", description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("ways", nargs="*", help="a part of the name of each way; none: all")
    asked = parser.parse_args()
    chosen = [way for way in WAYS if not asked.ways or any(part in way for part in asked.ways)]
    if not has_accelerate():
        chosen = [way for way in chosen if WAYS[way] is not _accelerate]
    print("| way to end | runs | not ended with 0 | how | s each |\n|---|--:|--:|---|--:|", flush=True)
    wrong = 0
    for way in chosen:
        found, begun = Counter[str](), time.perf_counter()
        for _ in range(asked.runs):
            codes = _run(way)
            if codes is None:
                return None
            found.update(_how(code) for code in codes if code)
        wrong += found.total()
        each = (time.perf_counter() - begun) / asked.runs
        how = ", ".join(f"{count} x {what}" for what, count in found.items())
        print(f"| {way} | {asked.runs} | {found.total()} | {how} | {each:.2f} |", flush=True)
    return 1 if wrong else 0


def _run(way: str) -> list[int] | None:
    """How both processes have ended, as ``waitstatus_to_exitcode`` has it; None in one of them."""
    port, children = free_port(), list[int]()
    for rank in range(2):
        if (child := os.fork()) == 0:
            _act(way, rank, port)
            return None
        children.append(child)
    return [_waited(child) for child in children]


def _act(way: str, rank: int, port: int) -> None:
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()} | {"MASTER_ADDR": "127.0.0.1"})
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    WAYS[way]()


def _waited(child: int) -> int:
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _how(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


if __name__ == "__main__":
    sys.exit(main())
