"""A number for the bits of a tensor that does not depend on how the tensor is divided."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 1 << 16
"""Elements that are looked at together on a CPU: what is computed from them stays in its cache."""
CHUNK_DEVICE = 1 << 24
"""The same on an accelerator, where each call costs more than its elements; 0.4 GiB beside the tensor."""

Dim = tuple[int, int, int]
"""Of a part along one dim: how many indices it has, the first of them, and how far apart two are in the whole."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131  # 2**64 / golden ratio, odd, as int64 (Knuth, multiplicative hashing)
_ALSO_ODD = -4658895280553007687


def fingerprint(part: Tensor, start: int = 0) -> int:
    """Sum over elements of bits times a hash of the global index, modulo 2**64; ``start`` is the first one's index.

    Additive: the fingerprints of the parts of a tensor add up, modulo 2**64, to that of the whole. One changed bit
    changes it: the hash of an index is odd, so that no power of two below 2**64 times it is zero. Works for every
    dtype with elements of 1, 2, 4 or 8 bytes, complex ones included: NaN and -0.0 count as the bits that they are.
    Reads the elements once, in the order of their indices, and changes nothing. 0 for a tensor without elements.

    >>> whole = torch.arange(6.0)
    >>> (fingerprint(whole[:4]) + fingerprint(whole[4:], start=4)) % 2**64 == fingerprint(whole)
    True
    """
    return unsigned(int(fingerprint_sum(part, start).item()))


@torch.no_grad()
def bits_sum(tensor: Tensor) -> Tensor:
    """The sum of the elements' bits as integers, one int64 on the tensor's device, which waits for no device.

    A tenth of a fingerprint's work, and blind to the order of the elements. As there, of 1, 2, 4 or 8 bytes each.
    """
    held = tensor.detach()
    real = torch.view_as_real(held.resolve_conj()) if held.is_complex() else held
    return real.view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)


def unsigned(wrapped: int) -> int:
    """An int64 that has wrapped around, as a number modulo 2**64."""
    return wrapped % 2**64


def as_hex(number: int) -> str:
    """As text of 16 hex digits: a JSON number of that size would be rounded by other readers."""
    return f"{number:016x}"


@torch.no_grad()
def fingerprint_sum(
    part: Tensor, start: int = 0, dims: tuple[Dim, ...] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """The same as one int64 on the tensor's device, which waits for no device.

    ``dims`` None: the elements follow each other in the whole. Else the element at ``start + k``, counted in rows over
    the sizes in ``dims``, has the index that offsets and strides give. ``dtype``: as if the tensor were cast to it.
    """
    tensor = part.detach()
    tensor = tensor.resolve_conj().resolve_neg()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    done = start
    for row in _rows(tensor, CHUNK if tensor.device.type == "cpu" else CHUNK_DEVICE):
        cast = row if dtype is None else row.to(dtype)
        bits = _bits(cast)
        scale = bits.numel() // row.numel()  # two numbers for a complex one
        if dims is not None and scale == 1 and dims[-1][0] <= bits.numel():
            index = _by_rows(done, bits.numel(), dims, bits)
        else:
            index = torch.arange(done * scale, done * scale + bits.numel(), dtype=torch.int64, device=bits.device)
            index = index if dims is None else _global(index, dims, scale)
        total += _hash_(index).mul_(bits).sum()
        done += row.numel()
    return total


def _bits(row: Tensor) -> Tensor:
    real = torch.view_as_real(row).reshape(-1) if row.is_complex() else row
    return real.view(_INTEGERS[real.element_size()])


def _rows(tensor: Tensor, chunk: int) -> Iterator[Tensor]:
    """The elements in the order of their indices, at most ``chunk`` at a time; copies no more than that."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        yield from (flat[begin : begin + chunk] for begin in range(0, flat.numel(), chunk))
    elif tensor.numel() <= chunk:
        yield tensor.reshape(-1)
    else:
        many = max(1, chunk // max(1, tensor[0].numel()))
        for begin in range(0, len(tensor), many):
            some = tensor[begin : begin + many]
            yield from _rows(some[0] if len(some) == 1 else some, chunk)


def _by_rows(first: int, many: int, dims: tuple[Dim, ...], like: Tensor) -> Tensor:
    """As ``_global`` for ``many`` places from ``first`` on: a division for each run along the last dim only."""
    run, offset, stride = dims[-1]
    rows = torch.arange(first // run, (first + many - 1) // run + 1, dtype=torch.int64, device=like.device)
    inner = torch.arange(offset, offset + run, dtype=torch.int64, device=like.device).mul_(stride)
    grid = _global(rows, dims[:-1], 1).unsqueeze(1) + inner
    return grid.view(-1)[first % run : first % run + many]


def _global(index: Tensor, dims: tuple[Dim, ...], scale: int) -> Tensor:
    """Index in the whole for each place in the part; the last dim varies fastest."""
    rest = index // scale if scale > 1 else index.clone()
    found = torch.zeros_like(index)
    for size, offset, stride in reversed(dims):
        found += (rest % size + offset) * stride
        rest = rest // size
    return found * scale + index % scale if scale > 1 else found


def _hash_(index: Tensor) -> Tensor:
    """An odd number for each index, modulo 2**64, in its place: neighbours get numbers with nothing in common."""
    mixed = index.mul_(_ODD)
    mixed ^= (mixed >> 29).bitwise_and_(0x7FFFFFFFF)
    mixed.mul_(_ALSO_ODD)
    mixed ^= (mixed >> 32).bitwise_and_(0xFFFFFFFF)
    return mixed.bitwise_or_(1)
