"""Streaming: text that is read while the model trains, from files that need not fit on the disk of any rank.

python examples/streaming.py
torchrun --nproc-per-node 2 examples/streaming.py --config examples/engines/fsdp2.toml
"""

import sysconfig
from itertools import chain
from pathlib import Path

import torch
from datasets import IterableDataset, load_dataset
from gpt import CONTEXT, GPT
from options import config, options
from plots import plot
from torch.utils.data import DataLoader

import prepkit as pk

args = options("runs/streaming", 60)
files = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))


def windows(lines: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    """The bytes of many lines, cut into windows; what is left at their end is dropped."""
    text = list(chain.from_iterable(f"{line}\n".encode() for line in lines["text"]))
    return {"tokens": [text[start : start + CONTEXT] for start in range(0, len(text) - CONTEXT + 1, CONTEXT)]}


# A file is a shard: datasets gives each rank whole files where they divide evenly, else every n-th sample.
stream: IterableDataset = load_dataset("text", data_files=files, split="train", streaming=True)
stream = stream.map(windows, batched=True, remove_columns=["text"]).with_format("torch").shuffle(seed=0)
batches = DataLoader(stream, batch_size=8)

torch.manual_seed(0)
model = GPT(width=96, depth=3, heads=4)
cfg = config(args, optimizer=pk.optim.AdamW(lr=3e-3), clip=pk.ClipNorm(1.0))
ready = pk.apply(pk.build_plan(cfg, model, loaders=[batches]))
ready.log.to(pk.track.JsonLines(f"{args.folder}/log.jsonl"))
for batch in ready.ranks.progress(ready.loaders[0], desc="training", total=args.steps):
    loss = ready.model(batch["tokens"])
    ready.backward(loss)
    ready.step()
    ready.log({"loss": ready.ranks.reduce(loss.detach())})
    if ready.steps == args.steps:
        break

ready.save(f"{args.folder}/checkpoint")  # where the stream stands on every rank, too
ready.ranks.print(f"{ready.steps} steps; the last loss is {float(loss.detach()):.2f}")
plot(ready, f"{args.folder}/log.jsonl")
ready.close()
