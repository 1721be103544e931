"""Whole tensors out of what the ranks have recorded of them, one for each replica."""

from __future__ import annotations

from math import prod

import torch
from attrs import frozen
from torch import Tensor

from prepkit.proving.record_file import HeldPart, Record


class CannotReplay(RuntimeError):
    """The window cannot be done again plainly; the text says why."""


@frozen(eq=False)
class Replica:
    """One whole tensor."""

    holder: int
    """The first rank that holds it or a part of it."""
    values: Tensor
    owners: Tensor | None
    """Of the first replica the rank that holds each element; None: of any other, or where one rank holds all."""


def numbers(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as a row that torch can add up: of complex ones both parts, float8 and integers wider."""
    row = tensor.detach()
    row = row.dequantize() if row.is_quantized else row
    row = torch.view_as_real(row.resolve_conj()) if row.is_complex() else row.to_dense()
    adds = row.is_floating_point() and row.itemsize > 1
    return (row if adds else row.double()).reshape(-1)


def as_wide(dtype: torch.dtype, like: Tensor) -> torch.dtype:
    """The dtype, or for complex numbers the complex one of its width."""
    return dtype.to_complex() if like.is_complex() else dtype


def replicas(records: tuple[Record, ...], kind: str, name: str, instead: str = "") -> tuple[Replica, ...]:
    """Each whole tensor that the parts of the ranks make, in the order of its holders; nothing where a part lacks.

    ``instead``: the kind of which a rank's part is taken that has none of the former.
    """
    found: dict[tuple[int, object, int], list[tuple[int, Tensor, HeldPart]]] = {}
    shape: tuple[int, ...] = ()
    for record in records:
        held = next((one for one in record.head.params if one.name == name), None)
        key = f"{kind}/{name}" if f"{kind}/{name}" in record.tensors else f"{instead}/{name}"
        part = record.tensors.get(key)
        if held is None or part is None or (part.numel() == 0 and 0 not in held.shape):
            continue
        shape = held.shape
        found.setdefault((held.start, held.dims, part.numel()), []).append((record.head.rank, part, held))
    if not found or sum(numel for _, _, numel in found) != prod(shape):
        return ()
    made = []
    for at in range(min(map(len, found.values()))):
        whole = found_dtype(found).new_empty(prod(shape))
        owners = torch.empty(prod(shape), dtype=torch.int32) if at == 0 and len(found) > 1 else None
        for ranks in found.values():
            rank, part, held = ranks[at]
            _put(whole, part.reshape(-1), held)
            if owners is not None:
                _put(owners, torch.full((part.numel(),), rank, dtype=torch.int32), held)
        made.append(Replica(min(ranks[at][0] for ranks in found.values()), whole.view(shape), owners))
    return tuple(made)


def found_dtype(found: dict[tuple[int, object, int], list[tuple[int, Tensor, HeldPart]]]) -> Tensor:
    """A part, whose dtype the whole has."""
    return next(iter(found.values()))[0][1]


def _put(whole: Tensor, part: Tensor, held: HeldPart) -> None:
    if held.dims is None:
        whole[held.start : held.start + part.numel()] = part
        return
    index = torch.zeros((), dtype=torch.int64)
    for size, offset, stride in held.dims:
        index = index.unsqueeze(-1) + (torch.arange(size, device="cpu") + offset) * stride
    whole[index.reshape(-1)[held.start : held.start + part.numel()]] = part
