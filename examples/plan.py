"""Plans the byte-level GPT for processes that do not run yet, from a config file, without a byte of weights.

python examples/plan.py examples/engines/fsdp2.toml --processes 2 -o plan.json
"""

from __future__ import annotations

import argparse

import torch
from gpt import small
from train import BATCH, samples, tools

import prepkit as pk


def plan(config: str, processes: int, steps: int) -> pk.Plan:
    """The plan of one engine. The ranks that read different samples share the batch; the plan says how many do."""
    cfg = pk.read_config(config)
    env = pk.Env.declare(world_size=processes, device="cpu", torch=torch.__version__)
    with torch.device("meta"):
        model = small()
    optimizer, scheduler = tools(model)
    parts = pk.build_plan(cfg, model, optimizer=optimizer, loaders=[samples(steps, BATCH)], env=env).data_parallel_size
    loader = samples(steps, BATCH // parts)
    return pk.build_plan(cfg, model, optimizer=optimizer, scheduler=scheduler, loaders=[loader], env=env)


def main() -> None:
    """Writes the plan of one config file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("-o", "--out", default="plan.json")
    args = parser.parse_args()
    pk.save(plan(args.config, args.processes, args.steps), args.out)


if __name__ == "__main__":
    main()
