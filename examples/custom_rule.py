"""A rule of your own, seen refusing: `python examples/custom_rule.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import prepkit as pk


def _head_stays_whole(resolved: pk.rules.Resolved) -> Iterator[pk.rules.Hit]:
    """Our serving code reads the head's weight directly, so the head must not be sharded over many ranks."""
    shards = resolved.axis_size("shard")
    if isinstance(resolved.cfg.engine, pk.FSDP2) and shards > 64:
        for param in resolved.facts.model.params:
            if param.name.startswith("head."):
                yield pk.rules.Hit(param.name, f"is sharded over {shards} ranks, and serving reads it whole")


HEAD = pk.rules.Rule(
    id="ours.head-stays-whole",
    summary="The head is sharded over at most 64 ranks.",
    check=_head_stays_whole,
    fix="set config.mesh to Mesh(replicate=-1, shard=64)",
    source=("our serving code",),
)


def model() -> torch.nn.Module:
    """Four equal layers and a head, without weights."""
    with torch.device("meta"):
        layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        return torch.nn.ModuleDict({"layers": layers, "head": torch.nn.Linear(64, 8)})


if __name__ == "__main__":
    try:
        cluster = pk.Env.declare(world_size=512, per_node=8)
        pk.build_plan(pk.Config(engine=pk.FSDP2()), model(), env=cluster, rules=(*pk.rules.RULES, HEAD))
    except pk.PlanRejected as rejected:
        print(rejected)
