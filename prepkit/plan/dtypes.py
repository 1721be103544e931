"""Dtypes by their torch names. No torch."""

from __future__ import annotations

import re
from functools import cache


@cache
def itemsize(dtype: str) -> int:
    """Bytes of one element of a torch dtype, by the bits in its name; packed 4-bit types fill a byte.

    >>> [itemsize(name) for name in ("float32", "bfloat16", "float8_e4m3fn", "complex64", "bool", "uint4")]
    [4, 2, 1, 8, 1, 1]
    """
    bits = re.search(r"[0-9]+", dtype)
    return max(1, int(bits.group()) // 8) if bits else 1
