"""What prepkit's loop adds to a step: loader, accumulation, clipping and tick, against the same lines by hand.

Both ways train one model with one optimizer, a window each in turn, because where weights lie in memory makes several
per cent between equal models. accelerate has a model of its own, so that its ratio is rougher. One run on one rank is
``python -m tests.benchmarks.loop ENGINE WIDTH OUT``, under torchrun where there are several.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

import prepkit as pk
from tests.benchmarks.rivals import has_accelerate
from tests.support.launch import torchrun

ENGINES: dict[str, tuple[pk.config.Engine, int]] = {
    "single": (pk.Single(), 1),
    "ddp": (pk.DDP(), 2),
    "fsdp2": (pk.FSDP2(wrap=pk.wrap.WrapPaths(tuple("012345"))), 2),
}
"""Name to the engine and how many processes it runs in."""
WIDTHS = (256, 1024)
"""Width of the model: a micro-batch takes a few milliseconds, or some tens."""
WINDOWS = 30
WINDOW, ROWS, LIMIT = 4, 32, 1.0


def loop() -> Table:
    """CPU time, median over windows in turn; the slower rank counts."""
    table = Table(title=f"training loop against one by hand, windows of {WINDOW}, median of {WINDOWS} pairs in turn")
    for column in ("engine", "micro-batch by hand, CPU ms", "prepkit", "prepkit, mean_over", "accelerate"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, (_, ranks) in ENGINES.items():
        for width in WIDTHS:
            found = _launch(name, width, ranks)
            cells = (f"{found[way]:.3f}" if way in found else "" for way in ("prepkit", "mean_over", "accelerate"))
            table.add_row(f"{name}, width {width}", f"{found['ms']:.1f}", *cells)
    return table


def _launch(name: str, width: int, ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "result.json")
        start = torchrun(ranks) if ranks > 1 else [sys.executable]
        command = [*start, "-m", "tests.benchmarks.loop", name, str(width), out]
        subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
        result: dict[str, float] = json.loads(Path(out).read_text())
        return result


def model(width: int) -> nn.Module:
    """Six layers, all of whose parameters are trained."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(6))
    return nn.Sequential(*blocks, nn.Linear(width, 10))


def data(width: int) -> list[tuple[Tensor, Tensor]]:
    """As many samples as all measured windows of one way read, so that no pass ends on the way."""
    samples = ROWS * WINDOW * (WINDOWS + 2) * (dist.get_world_size() if dist.is_initialized() else 1)
    return [(torch.ones(width), torch.tensor(at % 10)) for at in range(samples)]


def optimized(trained: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW and a scheduler that ticks."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    return optimizer, LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def prepared(ready: Any, loader: Any, *, weighed: bool) -> Iterator[None]:
    """The loop of the documentation; yields after each window."""
    for inputs, labels in loader:
        loss = cross_entropy(ready.model(inputs), labels)
        ready.backward(loss, mean_over=labels.numel() if weighed else None)
        if ready.step():
            yield


def by_hand(ready: Any, width: int) -> Iterator[None]:
    """What a careful user writes in its place, around the same model and optimizer."""
    trained, optimizer, scheduler = ready.model, ready.optimizer, ready.scheduler
    ranks = dist.is_initialized()
    given = data(width)
    sampler: Any = DistributedSampler(given) if ranks else None  # type: ignore[arg-type]  # a list is a data set
    loader = DataLoader(given, batch_size=ROWS, sampler=sampler, shuffle=not ranks)  # type: ignore[arg-type]
    for at, (inputs, labels) in zip(count(1), loader, strict=False):
        last = at % WINDOW == 0
        if isinstance(trained, DistributedDataParallel):
            trained.require_backward_grad_sync = last  # what no_sync() sets; prepkit's loop has left its own
        elif isinstance(trained, FSDPModule):
            trained.set_requires_gradient_sync(last)
        (cross_entropy(trained(inputs), labels) / WINDOW).backward()
        if last:
            norm = nn.utils.clip_grad_norm_(trained.parameters(), LIMIT)
            float(norm.full_tensor()) if hasattr(norm, "full_tensor") else None
            with ready.loop.allowed():  # or prepkit refuses a step that is not its own, and below a tick
                optimizer.step()
            scheduler.step()
            ready.loop.expect_scheduler()
            optimizer.zero_grad()
            yield


def accelerated(width: int) -> Iterator[None]:
    """accelerate's own loop, as its guide has it."""
    from accelerate import Accelerator

    helper = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    trained = model(width)
    optimizer, scheduler = optimized(trained)
    loader = DataLoader(data(width), batch_size=ROWS, shuffle=True)  # type: ignore[arg-type]
    trained, optimizer, loader, scheduler = helper.prepare(trained, optimizer, loader, scheduler)
    for inputs, labels in loader:
        with helper.accumulate(trained):
            helper.backward(cross_entropy(trained(inputs), labels))
            if helper.sync_gradients:
                helper.clip_grad_norm_(trained.parameters(), LIMIT)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if helper.sync_gradients:
            yield


def measure(name: str, width: int) -> dict[str, float]:
    """Ratios of the windows of each way to those by hand beside them, and milliseconds of a micro-batch by hand."""
    trained = model(width)
    optimizer, scheduler = optimized(trained)
    loaders = [DataLoader(data(width), batch_size=ROWS, shuffle=True) for _ in range(2)]  # type: ignore[arg-type]
    cfg = pk.Config(engine=ENGINES[name][0], accumulation=WINDOW, clip=pk.ClipNorm(LIMIT))
    ready = pk.apply(pk.build_plan(cfg, trained, optimizer=optimizer, scheduler=scheduler, loaders=loaders))
    ways: dict[str, Iterator[None]] = {
        "hand": by_hand(ready, width),
        "prepkit": prepared(ready, ready.loaders[0], weighed=False),
        "mean_over": prepared(ready, ready.loaders[1], weighed=True),
    }
    if has_accelerate() and name != "fsdp2":  # which it takes for DDP on a CPU
        ways["accelerate"] = accelerated(width)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(WINDOWS + 1):
        for way in sorted(ways, reverse=round_ % 2 == 0):  # each goes first as often as the others
            if dist.is_initialized():
                dist.barrier()
            times[way].append(_seconds(lambda w=way: next(ways[w])))  # type: ignore[misc]  # bound now
    hand = times["hand"][1:]
    found = {
        way: statistics.median(b / a for a, b in zip(hand, taken[1:], strict=True))
        for way, taken in times.items()
        if way != "hand"
    }
    return found | {"ms": 1e3 * statistics.median(hand) / WINDOW}


def _seconds(call: Callable[[], object]) -> float:
    """Of this process on the CPU: what waits for other ranks is no part of a loop, and neighbours change little."""
    began = time.process_time()
    call()
    return time.process_time() - began


if __name__ == "__main__":
    chosen, wide, path = sys.argv[1:]
    if ENGINES[chosen][1] > 1:
        dist.init_process_group("gloo")
    figures: Any = measure(chosen, int(wide))
    if dist.is_initialized():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, figures)
        figures = {way: max(rank[way] for rank in everyone) for way in figures}
    if not dist.is_initialized() or dist.get_rank() == 0:
        Path(path).write_text(json.dumps(figures))
    if dist.is_initialized():
        dist.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()
