"""The same with prepkit: also under every other engine, and going on under any of them."""

import json
import sys

import torch
from gpt import GPT, StandardLibrary
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import prepkit as pk

folder = sys.argv[1]
torch.manual_seed(0)
model = GPT(width=32, depth=2, heads=2)
train = DataLoader(StandardLibrary(windows=64), batch_size=8)
held_out = DataLoader(StandardLibrary(windows=16, seed=1), batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5)
scheduler = CosineAnnealingLR(optimizer, T_max=8)

loaders = pk.data.EachLoader(
    (pk.data.ShardLoaders(split_batches=True), pk.data.ShardLoaders(split_batches=True, purpose="evaluation"))
)
cfg = pk.Config(engine=pk.DDP(), accumulation=2, clip=pk.ClipNorm(1.0), loaders=loaders)
ready = pk.apply(pk.build_plan(cfg, model, optimizer=optimizer, scheduler=scheduler, loaders=[train, held_out]))
ready.resume(folder, missing_ok=True)

for _ in range(ready.epoch, 2):
    for batch in ready.loaders[0]:
        loss = ready.model(batch)
        ready.backward(loss)
        if ready.step():
            loss = ready.ranks.reduce(loss.detach())
            ready.ranks.print(json.dumps({"step": ready.steps, "loss": loss.item()}))
            if ready.steps % 3 == 0:
                ready.save(folder, keep=2)
    with ready.evaluating():
        losses = [ready.ranks.gather_for_metrics(ready.model(batch)) for batch in ready.loaders[1]]
    ready.ranks.print(json.dumps({"step": ready.steps, "held out": torch.cat(losses).mean().item()}))

ready.export(f"{folder}/exported")
ready.close()
