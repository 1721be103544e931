"""A causal language model on the sources of Python's standard library, byte by byte.

python examples/causal_lm.py
torchrun --nproc-per-node 2 examples/causal_lm.py --config examples/engines/fsdp2.toml
"""

import torch
from gpt import GPT, StandardLibrary
from options import config, options
from plots import plot
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import prepkit as pk

args = options("runs/causal_lm", 60)
torch.manual_seed(0)
model = GPT(width=96, depth=3, heads=4)
batches = DataLoader(StandardLibrary(windows=16 * args.steps), batch_size=16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = OneCycleLR(optimizer, max_lr=3e-3, total_steps=args.steps + 1)

cfg = config(args, clip=pk.ClipNorm(1.0), loaders=pk.data.ShardLoaders(split_batches=True))
ready = pk.apply(pk.build_plan(cfg, model, optimizer=optimizer, scheduler=scheduler, loaders=[batches]))
ready.log.to(pk.track.JsonLines(f"{args.folder}/log.jsonl"))
for tokens in (bar := ready.ranks.progress(ready.loaders[0], desc="training")):
    loss = ready.model(tokens)
    ready.backward(loss)
    loss = ready.ranks.reduce(loss.detach())
    ready.step()
    ready.log({"loss": loss, "norm": ready.grad_norm})
    bar.set_postfix(loss=f"{float(loss):.2f}")

ready.export(f"{args.folder}/exported")
ready.ranks.print(f"{ready.steps} steps, {float(loss) / 0.6931:.2f} bits per byte at the end")
plot(ready, f"{args.folder}/log.jsonl")
ready.close()
