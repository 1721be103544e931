"""``examples/whole_run.py`` in the workers of a gang: run to its end, or killed at a moment, and its log read back."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Literal

import pytest
from attrs import frozen

from tests.support.gang import Gang, GangError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

WORLDS = {
    "single": 1,
    "ddp": 2,
    "fsdp1": 2,
    "fsdp2": 2,
    "hsdp": 4,
    "tensor_fsdp2": 4,
    "zero0": 2,
    "zero1": 2,
    "zero2": 2,
    "zero3": 2,
}
"""Files of ``examples/engines`` to the number of processes that they are tried with."""

STEPS = 18

Curve = dict[tuple[str, int], set[float]]
"""Name of a value and step, to all that was ever logged for it: steps that were lost are taken again."""


@frozen(kw_only=True)
class Kill:
    """When which ranks kill themselves with SIGKILL."""

    victims: tuple[int, ...]
    when: Literal["training", "saving"]
    at: int
    """The step that has been logged, or the number of the checkpoint that is being written."""
    after_s: float
    """Seconds from there on."""

    def __str__(self) -> str:
        who = "all ranks" if len(self.victims) > 1 else f"rank {self.victims[0]}"
        where = f"after step {self.at}" if self.when == "training" else f"saving number {self.at}"
        return f"{who}, {where} + {1000 * self.after_s:.0f} ms"


def train(rank: int, world: int, engine: str, folder: str, kill: Kill | None) -> None:
    """The script as its reader would start it. For ``Gang.run_fresh``."""
    del world
    if engine.startswith("zero"):
        from tests.support.deepspeed_cpu import lean

        lean()
    if kill is not None and rank in kill.victims:
        threading.Thread(target=_wait_and_kill, args=(Path(folder), kill), daemon=True).start()
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = ["whole_run.py", str(EXAMPLES / "engines" / f"{engine}.toml"), folder]
    runpy.run_path(str(EXAMPLES / "whole_run.py"), run_name="__main__")


def _wait_and_kill(folder: Path, kill: Kill) -> None:
    while not _come(folder, kill):
        time.sleep(0.001)
    time.sleep(kill.after_s)
    os.kill(os.getpid(), signal.SIGKILL)


def _come(folder: Path, kill: Kill) -> bool:
    if kill.when == "saving":
        return any(folder.glob(f"{kill.at:06d}-step-*.partial"))
    log = folder / "log.jsonl"
    return log.exists() and f'{{"step": {kill.at}, ' in log.read_text()


def kill(gang: Gang, engine: str, folder: Path, how: Kill) -> None:
    """Trains until the kill. Fails where the run came to its end before."""
    with pytest.raises(GangError, match="exit code -9"):
        gang.run_fresh(train, engine, str(folder), how, timeout=60)


def curve(folder: Path) -> Curve:
    """All that the log holds."""
    found: Curve = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        values = json.loads(line)
        step = values.pop("step")
        for name, value in values.items():
            found.setdefault((name, step), set()).add(value)
    return found


def difference(one: Curve, other: Curve) -> float:
    """The largest relative difference of any two values of one step; fails where one has steps that the other lacks."""
    assert one.keys() == other.keys(), sorted(one.keys() ^ other.keys())
    pairs = (one[key] | other[key] for key in one)
    return max((max(values) - min(values)) / max(map(abs, values)) for values in pairs)
