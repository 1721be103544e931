"""A script for accelerate; the first argument says which library its one import names.

torchrun --nproc-per-node 2 tests/compat/script.py prepkit.compat.accelerate 2 bf16 losses.json

A further argument is the number of ticks that its schedule is made for.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader


def main(library: str, accumulation: str, precision: str, out: str, total: str = "") -> object:
    accelerator = importlib.import_module(library).Accelerator(
        cpu=True, gradient_accumulation_steps=int(accumulation), mixed_precision=precision
    )
    with accelerator.main_process_first():
        torch.manual_seed(0)
        features = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    samples: Any = [(row, row.sum()[None]) for row in features]
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
    if total:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=int(total))
    train, evaluation = DataLoader(samples, batch_size=8), DataLoader(samples[:21], batch_size=8)
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
    said: list[Any] = []
    for _ in range(2):
        model.train()
        for row, target in train:
            with accelerator.accumulate(model):
                loss = mse_loss(model(row), target)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean = accelerator.gather(loss.detach()).mean().item()
            said.append([mean, scheduler.get_last_lr()[0], accelerator.sync_gradients])
        model.eval()
        predicted = []
        for row, target in evaluation:
            with torch.no_grad():
                output = model(row)
            predicted.append(accelerator.gather_for_metrics((output, target))[0])
        said.append([len(torch.cat(predicted)), torch.cat(predicted).mean().item()])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        Path(out).write_text(json.dumps(said))
    accelerator.end_training()
    return model


if __name__ == "__main__":
    kept = main(*sys.argv[1:])  # a wrapper that goes away behind its group may wait for the other rank
