"""The handwritten digits of scikit-learn with a convolutional network; batch normalisation over all ranks under DDP.

python examples/digits.py
torchrun --nproc-per-node 2 examples/digits.py --config examples/engines/ddp.toml
"""

import torch
from attrs import evolve
from options import config, options
from plots import plot
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import prepkit as pk

args = options("runs/digits", 200)
torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels))
train, held_out = torch.utils.data.random_split(data, [1437, 360])


def block(of: int, to: int) -> nn.Sequential:
    """Convolution, normalisation, and half the height and width; input and output (batch, channels, height, width)."""
    return nn.Sequential(nn.Conv2d(of, to, 3, padding=1, bias=False), nn.BatchNorm2d(to), nn.ReLU(), nn.MaxPool2d(2))


model = nn.Sequential(block(1, 16), block(16, 32), nn.Flatten(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
loaders = [DataLoader(train, batch_size=64, shuffle=True, drop_last=True), DataLoader(held_out, batch_size=90)]

choices = (pk.data.ShardLoaders(split_batches=True), pk.data.ShardLoaders(purpose="evaluation"))
cfg = config(args, loaders=pk.data.EachLoader(choices))
if isinstance(cfg.engine, pk.DDP):  # torch's SyncBatchNorm needs an accelerator
    cfg = evolve(cfg, engine=evolve(cfg.engine, sync_batchnorm=torch.accelerator.is_available()))
ready = pk.apply(pk.build_plan(cfg, model, optimizer=optimizer, loaders=loaders))
ready.log.to(pk.track.JsonLines(f"{args.folder}/log.jsonl"))


def accuracy() -> torch.Tensor:
    """Share of the held-out digits that are recognised, each counted once over all ranks."""
    with ready.evaluating():
        right = [ready.ranks.gather_for_metrics(ready.model(x).argmax(1) == y) for x, y in ready.loaders[1]]
    return torch.cat(right).float().mean()


while ready.steps < args.steps:
    for x, y in ready.ranks.progress(ready.loaders[0], desc=f"epoch {ready.epoch}"):
        loss = functional.cross_entropy(ready.model(x), y)
        ready.backward(loss)
        ready.step()
        ready.log({"loss": ready.ranks.reduce(loss.detach())})
        if ready.steps >= args.steps:
            break
    ready.log({"accuracy": accuracy()})

ready.ranks.print(f"{ready.steps} steps, {100 * float(accuracy()):.1f} % of the held-out digits")
plot(ready, f"{args.folder}/log.jsonl")
ready.close()
