"""The usual script with accelerate: accumulation, clipping, evaluation, trackers, saving, going on inside an epoch."""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from gpt import GPT, StandardLibrary
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

folder = Path(sys.argv[1])
project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
data = DataLoaderConfiguration(split_batches=True)
accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    dataloader_config=data,
    project_config=project,
    step_scheduler_with_optimizer=True,
)
set_seed(0)
model = GPT(width=32, depth=2, heads=2)
train = DataLoader(StandardLibrary(windows=64), batch_size=8)
held_out = DataLoader(StandardLibrary(windows=16, seed=1), batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
scheduler = CosineAnnealingLR(optimizer, T_max=8)
model, optimizer, train, held_out, scheduler = accelerator.prepare(model, optimizer, train, held_out, scheduler)

steps = 0
saved = sorted((folder / "checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name.split("_")[1]))
if saved:
    accelerator.load_state(str(saved[-1]))
    steps = json.loads((saved[-1] / "steps.json").read_text())
    accelerator.project_configuration.iteration = int(saved[-1].name.split("_")[1]) + 1
first, skip = divmod(2 * steps, len(train))

for epoch in range(first, 2):
    model.train()
    batches = accelerator.skip_first_batches(train, skip) if epoch == first else train
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps += 1
            loss = accelerator.gather(loss.detach()).mean()
            accelerator.print(json.dumps({"step": steps, "loss": loss.item()}))
            if steps % 3 == 0:
                path = accelerator.save_state()
                if accelerator.is_main_process:
                    Path(path, "steps.json").write_text(json.dumps(steps))
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(model(batch)[None]) for batch in held_out]
    accelerator.print(json.dumps({"step": steps, "held out": torch.cat(losses).mean().item()}))

accelerator.wait_for_everyone()
accelerator.save_model(model, str(folder / "exported"))
accelerator.end_training()
