"""How activations lie over the tensor-parallel ranks."""

from __future__ import annotations

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

PLACEMENTS: dict[str, Placement] = {
    "replicate": Replicate(),
    "features": Shard(-1),
    "heads": Shard(-2),
    "sequence": Shard(1),
}
"""How an activation lies over the tensor-parallel ranks, in torch's words."""
