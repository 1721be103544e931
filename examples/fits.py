"""Does my 70B fit on 64 x 80 GB, and if not, what is the smallest change? No GPU, no weights, no process group."""

from __future__ import annotations

import time

import torch
from llama import seventy
from torch.nn import Module

import prepkit as pk


def ask(model: Module, memory: str) -> None:
    """Prints whether it fits, and what would; with activations of one sequence of 4,096 tokens."""
    cluster = pk.Env.declare(world_size=64, per_node=8, device="cuda", torch="2.13")
    cfg = pk.Config(
        engine=pk.FSDP2(),
        mesh=pk.Mesh(replicate=8, shard=8),  # shards inside a node, copies over the nodes: the usual advice
        precision=pk.BF16(),
        checkpointing=pk.CheckpointBlocks(),
        optimizer=pk.optim.AdamW(lr=3e-4),
    )
    began = time.perf_counter()
    plan = pk.build_plan(cfg, model, env=cluster)
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    activations = pk.activations(plan, model, pk.ExampleInputs(input_ids=tokens, labels=tokens))
    print(pk.fits(plan, memory, activations=activations))
    print(f"planned, estimated, predicted and searched in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    ask(seventy(), memory="80GB")
