"""What a parameter that ZeRO-3 has partitioned holds on this rank: an equal run of its elements, the last ones padded.

Reads the attributes that ``deepspeed.zero.Init`` writes on a parameter (deepspeed ``partition_parameters.py``), and
imports nothing of DeepSpeed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_partitioned(tensor: Any) -> bool:
    """True if ZeRO-3 has divided the tensor over the ranks, so that it is empty itself."""
    return getattr(tensor, "ds_tensor", None) is not None


def held(param: Any) -> Tensor:
    """The elements of the parameter on this rank, in a row and without padding: a view of what DeepSpeed keeps."""
    first, last = _range(param)
    part: Tensor = param.ds_tensor.detach().view(-1)[: last - first]
    return part


def part(param: Any, whole: Tensor) -> Tensor:
    """The elements of a tensor of the parameter's shape that are on this rank, in a row."""
    first, last = _range(param)
    return whole.reshape(-1)[first:last]


def _range(param: Any) -> tuple[int, int]:
    """First and one past the last of the parameter's elements on this rank; equal where it has padding alone."""
    size, rank = param.ds_tensor.numel(), param.ds_zero_partition_rank
    return min(rank * size, param.ds_numel), min((rank + 1) * size, param.ds_numel)
