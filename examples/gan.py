"""A GAN that draws scikit-learn's digits: two models, two optimizers, two plans, one process group.

python examples/gan.py
torchrun --nproc-per-node 2 examples/gan.py --config examples/engines/ddp.toml
"""

import torch
from options import config, options
from plots import plot
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import prepkit as pk

args = options("runs/gan", 300)
torch.manual_seed(0)
images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1  # (1797, 64), from -1 to 1
batches = DataLoader(images, batch_size=64, shuffle=True, drop_last=True)
generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

cfg = config(
    args, optimizer=pk.optim.Adam(lr=1e-3, betas=(0.5, 0.999)), loaders=pk.data.ShardLoaders(split_batches=True)
)
draws = pk.apply(pk.build_plan(cfg, generator))
judges = pk.apply(pk.build_plan(cfg, critic, loaders=[batches]))
judges.log.to(pk.track.JsonLines(f"{args.folder}/log.jsonl"))

while judges.steps < args.steps:
    for real in judges.ranks.progress(judges.loaders[0], desc=f"epoch {judges.epoch}"):
        drawn = draws.model(torch.randn(len(real), 16, device=real.device))
        both = judges.model(torch.cat([real, drawn.detach()]))
        judged = functional.softplus(-both[: len(real)]).mean() + functional.softplus(both[len(real) :]).mean()
        judges.backward(judged)
        judges.step()
        for param in judges.model.parameters():
            param.requires_grad_(requires_grad=False)  # the generator's step is none of the critic's
        fooled = functional.softplus(-judges.model(drawn)).mean()
        draws.backward(fooled)
        draws.step()
        for param in judges.model.parameters():
            param.requires_grad_(requires_grad=True)
        losses = judges.ranks.reduce((judged.detach(), fooled.detach()))
        judges.log({"critic": losses[0], "generator": losses[1]})
        if judges.steps >= args.steps:
            break

judges.ranks.print(f"{judges.steps} steps of each; critic {float(losses[0]):.2f}, generator {float(losses[1]):.2f}")
plot(judges, f"{args.folder}/log.jsonl")
draws.close()
judges.close()
