"""A batch on its way to the device, whatever it is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree  # public under this name before torch 2.9 has another


def to_device(batch: Any, device: torch.device, *, non_blocking: bool) -> Any:
    """The batch with all in it that can be moved on the device; the given one is untouched.

    Goes into dicts, lists, tuples, named tuples, other mappings and data classes. What has a ``to`` of its own, such as
    the ``BatchEncoding`` of transformers or a ``PackedSequence``, moves itself. Everything else stays what it is.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        if callable(getattr(leaf, "to", None)):
            try:
                return leaf.to(device, non_blocking=non_blocking)
            except TypeError:  # its ``to`` knows no such option
                return leaf.to(device)
        if isinstance(leaf, Mapping):
            return type(leaf)({key: inner(value) for key, value in leaf.items()})  # type: ignore[call-arg]
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return replace(leaf, **{one.name: inner(getattr(leaf, one.name)) for one in fields(leaf) if one.init})
        return leaf

    def inner(part: Any) -> Any:
        kind = type(part)
        if kind is tuple or kind is list:  # most batches: pytree takes longer than the move itself
            return kind([inner(item) for item in part])
        if kind is dict:
            return {key: inner(value) for key, value in part.items()}
        if isinstance(part, torch.Tensor):
            return move(part)
        return pytree.tree_map(move, part, is_leaf=_moves_itself)

    return inner(batch)


def _moves_itself(part: Any) -> bool:
    """A ``PackedSequence`` is a named tuple, and would be taken apart."""
    return not isinstance(part, torch.Tensor) and callable(getattr(part, "to", None))
