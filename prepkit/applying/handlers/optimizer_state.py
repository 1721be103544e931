"""Optimizer state of one parameter: where it is, what of it can be moved, and how it takes its parameter's layout."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Parameter

from prepkit.applying.handlers import problems
from prepkit.court import found, refused
from prepkit.objects.fsdp1_flat import FlatShard
from prepkit.objects.target import Target
from prepkit.plan.layout import chunk

ParamState = dict[str, Any]
"""What an optimizer keeps for one parameter: name of the entry to its value, a tensor or a number."""


def state_of(target: Target, name: str, param: Parameter) -> ParamState:
    """The state itself, wherever it is now: released, or in the optimizer. Empty when there is none."""
    if name in target.released:
        released: ParamState = target.released[name]
        return released
    if target.optimizer is None:
        return {}
    state: ParamState = target.optimizer.state.get(param, {})
    return state


def unmovable(name: str, state: ParamState, shape: torch.Size) -> problems.Problems:
    """Texts for the entries that no shard of the parameter could take along, such as Adafactor's factored moments."""
    return tuple(
        found(
            "optimizer.state-layout",
            f"optimizer.state[{name}][{key!r}]",
            f"is {_shown(value)}, neither of the parameter's shape {tuple(shape)} nor a scalar, and cannot be sharded",
        )
        for key, value in state.items()
        if not _movable(value, shape)
    )


def _movable(value: object, shape: torch.Size) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 or value.shape == shape
    return value is None or isinstance(value, bool | int | float | str)


def _shown(value: object) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def lay_out(
    state: ParamState, param: Parameter, *, scalars_on_device: bool, piece: FlatShard | None = None
) -> ParamState:
    """The state as ``param`` lies: same device; for a sharded parameter the same shards, in the state's own dtype.

    Communicates nothing: every rank holds the whole tensor and keeps its part. Scalars stay on the CPU unless the
    optimizer is capturable or fused, as torch does when it loads a state dict (``Optimizer.load_state_dict``).
    ``piece`` is the parameter's place in a flat parameter: a rank that holds none of it keeps no state, as torch's
    optimizers make none.
    """
    if piece is not None and piece.cut and piece.first == piece.last:
        return {}
    return {
        key: _place(key, value, param, scalars_on_device, piece) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _place(
    key: str, value: torch.Tensor, param: Parameter, scalars_on_device: bool, piece: FlatShard | None
) -> torch.Tensor:
    counter = value.ndim == 0 and (param.ndim > 0 or key == "step")
    if counter and not scalars_on_device:
        return value
    if isinstance(param, DTensor) and value.shape == param.shape:
        return shard(value, param)
    if piece is not None and piece.cut and value.shape == piece.shape:
        return piece.part(value).to(param.device, copy=True)  # a view would keep the whole tensor alive
    return value.to(_local(param).device)


def shard(whole: torch.Tensor, like: DTensor) -> DTensor:
    """The part of a whole tensor that this rank holds, placed as ``like``; ``whole`` may be freed afterwards.

    Raises ``RunRefused`` when the part has another shape than the local part of ``like``.
    """
    part = whole
    # What is strided is divided last, whatever its axis: fully_shard divides what another axis has divided already.
    for axis, placement in sorted(enumerate(like.placements), key=lambda pair: isinstance(pair[1], _StridedShard)):
        match placement:
            case Replicate():
                pass
            case Shard(dim=dim) | _StridedShard(dim=dim):
                index, count = like.device_mesh.get_local_rank(axis), like.device_mesh.size(axis)
                part = part.narrow(dim, *chunk(part.size(dim), count, index))
            case _:
                raise refused("optimizer.state-layout", "optimizer.state", f"cannot be laid out as {placement}")
    local = _local(like)
    if part.shape != local.shape:
        raise refused(
            "optimizer.state-layout",
            "optimizer.state",
            f"the part of a {tuple(whole.shape)} state for {like.placements} has shape {tuple(part.shape)}, the "
            f"parameter's has {tuple(local.shape)}",
        )
    own = part.to(local.device, copy=True)  # a view would keep the whole tensor alive
    return DTensor.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.size(), stride=like.stride()
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        part: torch.Tensor = tensor.to_local()
        return part
