"""The main job: plan a language model, look at the plan, train from it on two processes, and compare the engines."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from attrs import frozen
from plan import plan
from rich.console import Console
from rich.table import Table

import prepkit as pk

HERE = Path(__file__).parent
OUT = Path("demo-out")
TOLERANCE = 1e-4
"""Largest difference in nats that reordered float32 sums may make over the whole run."""


@frozen
class Run:
    """One engine of the comparison."""

    name: str
    config: str
    """File in ``examples/engines``: what differs between the runs."""
    processes: int


RUNS = (
    Run("FSDP2", "fsdp2.toml", 2),
    Run("FSDP1", "fsdp1.toml", 2),
    Run("DDP", "ddp.toml", 2),
    Run("tensor parallel", "tensor.toml", 2),
    Run("single", "single.toml", 1),
)
ZERO = tuple(Run(f"ZeRO-{stage}", f"zero{stage}.toml", 2) for stage in (1, 2, 3))


def runs() -> tuple[Run, ...]:
    """All engines; DeepSpeed's where it is installed and a compiler is there for its CPU collectives."""
    able = importlib.util.find_spec("deepspeed") and shutil.which(os.environ.get("CXX", "c++"))
    return (*RUNS, *ZERO) if able else RUNS


def main(steps: int = 30) -> int:
    """Returns 0 if the loss curves of all engines agree."""
    console = Console()
    OUT.mkdir(exist_ok=True)
    results = {}
    if len(runs()) == len(RUNS):
        console.print("ZeRO is left out: it takes pip install 'prepkit[deepspeed]' and a C++ compiler")
    for run in runs():
        path = OUT / f"{Path(run.config).stem}.json"
        pk.save(plan(str(HERE / "engines" / run.config), run.processes, steps), str(path))
        if run is RUNS[0]:
            console.rule("the plan, made without a process group and saved")
            subprocess.run([sys.executable, "-m", "prepkit", "show", str(path)], check=True)
        console.rule(f"training from {path} ({run.name}, {run.processes} process{'es' * (run.processes > 1)})")
        results[run.name] = train(run, path, steps)
    table, agree = compare(results)
    console.print(table)
    console.print("all loss curves agree" if agree else "the loss curves do not agree")
    return 0 if agree else 1


def train(run: Run, path: Path, steps: int) -> dict:
    """Runs ``train.py`` with the saved plan and reads what rank 0 wrote."""
    result = path.with_name(f"{path.stem}-result.json")
    launcher = [sys.executable]
    if run.processes > 1:
        local = ("--standalone", "--local-addr", "127.0.0.1")  # the host's name, torchrun's choice, need not resolve
        launcher += ["-m", "torch.distributed.run", *local, "--nproc-per-node", str(run.processes)]
    script = [str(HERE / "train.py"), str(path), "--steps", str(steps), "--out", str(result)]
    quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # what torch says to itself
    environment = {**os.environ, **quiet, "DS_ACCELERATOR": "cpu"}  # DeepSpeed would take a GPU that it finds
    subprocess.run([*launcher, *script], check=True, timeout=1800, env=environment)
    return json.loads(result.read_text())


def compare(results: dict[str, dict]) -> tuple[Table, bool]:
    """The table, and whether every curve stays within the tolerance of the single-process one."""
    reference = results["single"]["losses"]
    table = Table(title="same data, same global batch of 16")
    for column in ("engine", "loss at start", "loss at end", "largest difference", "s / step", "peak MiB on rank 0"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    agree = True
    for name, result in results.items():
        losses = result["losses"]
        gap = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        agree = agree and gap <= TOLERANCE and losses[-1] < losses[0]
        row = (f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{gap:.1e}", f"{result['seconds']:.3f}")
        table.add_row(name, *row, f"{result['memory_mib']:.0f}")
    return table, agree


if __name__ == "__main__":
    sys.exit(main())
