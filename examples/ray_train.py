"""Ray Train starts the processes and their group; prepkit plans and applies inside each.

pip install 'ray[train]'
python examples/ray_train.py --workers 2 --config examples/engines/fsdp2.toml
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import ray
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer

EXAMPLES = str(Path(__file__).resolve().parent)


def on_each_worker(given: dict[str, str | int]) -> None:
    """The run: as under torchrun, but that its group is there before ``apply``, and stays when ``close`` is called."""
    sys.path.insert(0, EXAMPLES)
    import torch
    from gpt import GPT, StandardLibrary
    from torch.utils.data import DataLoader

    import prepkit as pk

    torch.manual_seed(0)
    model = GPT(width=96, depth=3, heads=4)
    batches = DataLoader(StandardLibrary(windows=8 * int(given["steps"])), batch_size=4)
    cfg = pk.read_config(str(given["config"]))
    plan = pk.build_plan(cfg, model, optimizer=pk.optim.AdamW(lr=3e-3), loaders=[batches])
    ready = pk.apply(plan)
    for batch in ready.loaders[0]:
        loss = ready.model(batch)
        ready.backward(loss)
        ready.step()
    here = f"{given['folder']}/checkpoint"
    ready.save(here)
    told = {"step": ready.steps, "loss": float(ready.ranks.reduce(loss.detach()))}
    train.report(told, checkpoint=train.Checkpoint.from_directory(here) if ready.ranks.is_main else None)
    ready.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--config", default=f"{EXAMPLES}/engines/fsdp2.toml")
    parser.add_argument("--folder", default="runs/ray")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    given = {
        "config": str(Path(args.config).resolve()),
        "folder": str(Path(args.folder).resolve()),
        "steps": args.steps,
    }
    ray.init(include_dashboard=False, log_to_driver=False)
    trainer = TorchTrainer(
        on_each_worker,
        train_loop_config=given,
        torch_config=TorchConfig(backend="gloo"),  # "nccl" where every worker has a GPU
        scaling_config=train.ScalingConfig(num_workers=args.workers, use_gpu=False),
        run_config=train.RunConfig(name="prepkit", storage_path=given["folder"]),
    )
    result = trainer.fit()
    print(f"{result.metrics['step']} steps on {args.workers} workers; the last loss is {result.metrics['loss']:.2f}")
