"""What ``fully_shard`` costs one rank of a large world: torch's own chunking against the replacement, on meta."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from rich.table import Table

OWN = (8, 512, 4096)
"""Where torch's own code is measured; at 16,384 ranks it takes two minutes."""


def worlds() -> Table:
    """Seconds of CPU time of all ``fully_shard`` calls for the shapes of Llama 3.1 405B, best of three."""
    from prepkit.applying.handlers.fsdp2 import lean_chunks

    table = Table(title="fully_shard of Llama 405B (1,137 parameters, meta), one rank, best of 3, CPU seconds")
    for column in ("ranks", "torch's own chunks", "prepkit's", "ratio"):
        table.add_column(column, justify="right")
    for world in (8, 512, 4096, 16384):
        lean = _shard(world, lean_chunks, 3)
        own = _shard(world, nullcontext, 1 if world > 1000 else 3) if world in OWN else None
        shown = ("not run", "") if own is None else (f"{own:.2f}", f"{lean / own:.3f}")
        table.add_row(f"{world:,}", shown[0], f"{lean:.2f}", shown[1])
    return table


def _shard(world: int, around: Callable[[], Any], rounds: int) -> float:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.applying.handlers.test_fsdp2_chunks import llama_405b

    times = []
    for _ in range(rounds):
        model: Any = llama_405b()
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=world)
        mesh = init_device_mesh("cpu", (world,))
        began = time.process_time()
        with around():
            for layer in model["layers"]:
                fully_shard(layer, mesh=mesh)
            fully_shard(model["head"], mesh=mesh)
            fully_shard(model["embed"], mesh=mesh)
        times.append(time.process_time() - began)
        dist.destroy_process_group()
    return min(times)
