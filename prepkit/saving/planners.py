"""torch's planners of checkpoints, which find the shards of torch's classes alone, with ``FlatRange`` among them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from prepkit.objects.flat_range import FlatRange


class SavePlanner(DefaultSavePlanner):
    """Looks up what torch does not know (``find_state_dict_object``)."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is written for an index."""
        found = self.state_dict.get(index.fqn)
        return found.__get_tensor_shard__(index) if isinstance(found, FlatRange) else super().lookup_object(index)


class LoadPlanner(DefaultLoadPlanner):
    """As ``SavePlanner``, for reading."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Puts back what torch does not know, and has written None over (``_init_state_dict``)."""
        ranges = {name: one for name, one in flatten_state_dict(state_dict)[0].items() if isinstance(one, FlatRange)}
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict.update(ranges)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return what is filled for an index."""
        found = self.state_dict.get(index.fqn)
        return found.__get_tensor_shard__(index) if isinstance(found, FlatRange) else super().lookup_tensor(index)
