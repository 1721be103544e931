"""Distillation: a small student learns from the outputs of a frozen teacher, which is trained first.

python examples/distillation.py
torchrun --nproc-per-node 2 examples/distillation.py --config examples/engines/ddp.toml
"""

import torch
from gpt import GPT, StandardLibrary
from options import config, options
from plots import plot
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import prepkit as pk

args = options("runs/distillation", 60)


class Predictor(nn.Module):
    """The logits of a GPT's next bytes, (batch, time, 256), for tokens of (batch, time)."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.gpt = GPT(width=width, depth=depth, heads=4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Every place predicts the byte after it."""
        x = self.gpt.embed(tokens) + self.gpt.position(self.gpt.places[: tokens.shape[1]])
        for block in self.gpt.blocks:
            x = block(x)
        return self.gpt.head(self.gpt.norm(x))


def prepared(model: nn.Module, **changes: object) -> pk.Prepared:
    """Model and data under the engine of the command line."""
    cfg = config(args, loaders=pk.data.ShardLoaders(split_batches=True), **changes)
    batches = DataLoader(StandardLibrary(windows=16 * args.steps), batch_size=16)
    return pk.apply(pk.build_plan(cfg, model, loaders=[batches]))


def likelihood(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of the bytes that follow."""
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


torch.manual_seed(0)
large = Predictor(width=96, depth=3)
first = prepared(large, optimizer=pk.optim.AdamW(lr=2e-3), clip=pk.ClipNorm(1.0))
for tokens in first.ranks.progress(first.loaders[0], desc="teacher"):
    first.backward(likelihood(first.model(tokens[:, :-1]), tokens))
    first.step()
first.export(f"{args.folder}/teacher")
first.close()

frozen = Predictor(width=96, depth=3).requires_grad_(requires_grad=False).eval()
cfg = config(args, intent=pk.Intent.INFERENCE, weights=pk.LoadWeights(f"{args.folder}/teacher"), clip=None)
teacher = pk.apply(pk.build_plan(cfg, frozen))
ready = prepared(Predictor(width=32, depth=1), optimizer=pk.optim.AdamW(lr=5e-3), clip=pk.ClipNorm(1.0))
ready.log.to(pk.track.JsonLines(f"{args.folder}/log.jsonl"))
for tokens in ready.ranks.progress(ready.loaders[0], desc="student"):
    with torch.no_grad():
        wanted = teacher.model(tokens[:, :-1]).log_softmax(-1).flatten(0, 1)
    logits = ready.model(tokens[:, :-1])
    loss = functional.kl_div(logits.log_softmax(-1).flatten(0, 1), wanted, log_target=True, reduction="batchmean")
    ready.backward(loss)
    both = ready.ranks.reduce((loss.detach(), likelihood(logits, tokens).detach()))
    ready.step()
    ready.log({"divergence": both[0], "cross-entropy": both[1]})

ready.ranks.print(f"{ready.steps} steps; divergence from the teacher {float(both[0]):.3f} nats per byte")
plot(ready, f"{args.folder}/log.jsonl")
ready.close()
teacher.close()
