"""A number for the bits of a tensor that does not depend on how the tensor is divided."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Elements that are looked at together, so that the memory beside the tensor stays small."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = -7046029254386353131  # 2**64 / golden ratio, odd, as int64 (Knuth, multiplicative hashing)


def fingerprint(part: Tensor, start: int = 0) -> int:
    """Sum over elements of bits times a hash of the global index, modulo 2**64; ``start`` is the first one's index.

    Additive: the fingerprints of the parts of a tensor add up, modulo 2**64, to that of the whole. One changed bit
    changes it: the hash of an index is odd, so that no power of two below 2**64 times it is zero.
    Reads the elements once, in the order of their indices, and changes nothing. 0 for a tensor without elements.

    >>> whole = torch.arange(6.0)
    >>> (fingerprint(whole[:4]) + fingerprint(whole[4:], start=4)) % 2**64 == fingerprint(whole)
    True
    """
    row = part.detach()
    row = torch.view_as_real(row.resolve_conj()) if row.is_complex() else row.resolve_neg()
    row = row.reshape(-1).view(_INTEGERS[row.element_size()])
    total = 0
    for begin in range(0, row.numel(), CHUNK):
        bits = row[begin : begin + CHUNK].to(torch.int64)
        index = torch.arange(start + begin, start + begin + bits.numel(), dtype=torch.int64, device=bits.device)
        total += int((bits * _hash(index)).sum().item())
    return total % 2**64


def _hash(index: Tensor) -> Tensor:
    """An odd number for each index, modulo 2**64: neighbours get numbers that have nothing in common."""
    mixed = index * _ODD
    mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * -4658895280553007687
    return (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) | 1
