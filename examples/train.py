"""Trains the byte-level GPT from a saved plan. The script is the same for every engine: only the plan differs.

python examples/train.py plan.json
torchrun --nproc-per-node 2 examples/train.py plan.json
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import StandardLibrary, small
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.data import DataLoader

import prepkit as pk

BATCH = 16
"""Samples per optimizer step, all ranks together: the same for every engine."""
WARMUP = 10


def main() -> None:
    """Trains, and rank 0 writes the losses, the time and the memory."""
    args = _arguments()
    before = _peak_mib()
    ready = prepare(pk.load(args.plan), args.steps)
    losses, seconds = train(ready, args.steps)
    if _rank() == 0:
        result = {"losses": losses, "seconds": seconds / args.steps, "memory_mib": _peak_mib() - before}
        Path(args.out).write_text(json.dumps(result))
    ready.close()


def prepare(plan: pk.Plan, steps: int) -> pk.Prepared:
    """Applies the plan to a fresh model, its optimizer, scheduler and loader."""
    torch.manual_seed(0)
    model = small()
    optimizer, scheduler = tools(model)
    loader = samples(steps, BATCH // plan.data_parallel_size)
    return pk.apply(plan, model=model, optimizer=optimizer, scheduler=scheduler, loaders=[loader])


def train(ready: pk.Prepared, steps: int) -> tuple[list[float], float]:
    """The loss of every step, averaged over the ranks, and the seconds of all."""
    losses: list[float] = []
    started = time.perf_counter()
    with _progress() as progress:
        task = progress.add_task("training", total=steps, loss=float("nan"))
        for tokens in ready.loaders[0]:
            loss = ready.model(tokens)
            ready.backward(loss)
            ready.step()
            losses.append(float(ready.ranks.reduce(loss.detach())))  # the mean over the ranks
            progress.update(task, advance=1, loss=losses[-1])
    return losses, time.perf_counter() - started


def samples(steps: int, batch_size: int) -> DataLoader[torch.Tensor]:
    """The data of the whole run, before it is divided over ranks."""
    return DataLoader(StandardLibrary(windows=BATCH * steps), batch_size=batch_size)


def tools(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Optimizer and warm-up.

    ``eps`` is large on purpose: with Adam's usual 1e-8, gradients that are zero but for rounding (those of the key
    biases) become full-sized updates, and any two orders of summation part after twenty steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, eps=1e-5)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="result.json")
    return parser.parse_args()


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _progress() -> Progress:
    bar = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("loss {task.fields[loss]:.3f}"))
    return Progress(TextColumn("{task.description}"), *bar, disable=_rank() != 0)


if __name__ == "__main__":
    main()
