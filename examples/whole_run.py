"""The whole run, the same for every engine and number of processes; killed at any moment, it goes on.

python examples/whole_run.py examples/engines/single.toml runs/1
torchrun --nproc-per-node 2 examples/whole_run.py examples/engines/fsdp2.toml runs/1
"""

import sys

import torch
from attrs import evolve
from gpt import GPT, StandardLibrary
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import prepkit as pk

config, folder = sys.argv[1:]
torch.manual_seed(0)
model = GPT(width=32, depth=2, heads=2)
train = DataLoader(StandardLibrary(windows=136), batch_size=8, shuffle=True)
held_out = DataLoader(StandardLibrary(windows=16, seed=1), batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
scheduler = CosineAnnealingLR(optimizer, T_max=18)

loaders = pk.data.EachLoader(
    (pk.data.ShardLoaders(split_batches=True), pk.data.ShardLoaders(purpose="evaluation", split_batches=True))
)
cfg = evolve(pk.read_config(config), accumulation=2, loaders=loaders)
ready = pk.apply(pk.build_plan(cfg, model, optimizer=optimizer, scheduler=scheduler, loaders=[train, held_out]))
ready.resume(folder, missing_ok=True)
ready.log.to(pk.track.JsonLines(f"{folder}/log.jsonl"))

with pk.processes.save_on_sigterm(ready, folder, keep=2):
    for epoch in range(ready.epoch, 2):
        for batch in ready.ranks.progress(ready.loaders[0], desc=f"epoch {epoch}"):
            loss = ready.model(batch)
            ready.backward(loss)
            if ready.step():
                ready.log({"loss": ready.ranks.reduce(loss.detach()), "norm": ready.grad_norm})
                if ready.steps % 3 == 0:
                    with ready.evaluating():
                        losses = [ready.ranks.reduce(ready.model(batch)) for batch in ready.loaders[1]]
                    ready.log({"held out": torch.stack(losses).mean()})
                    ready.save(folder, keep=2, wait=False)

ready.save(folder, keep=2)
ready.export(f"{folder}/exported")
ready.ranks.print(f"{ready.steps} steps, exported to {folder}/exported")
ready.close()
