"""The header of a safetensors file: from its bytes to where each tensor lies. Reads no file and no tensor.

A file is eight bytes with the header's length (little-endian), the header as JSON, then the tensors' bytes, without
gaps (format description of the safetensors library).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from math import prod
from typing import Any

from attrs import frozen

from prepkit.facts.checkpoint import StoredTensor
from prepkit.plan.layout import itemsize

PREFIX = 8
"""Bytes that hold the header's length."""

LONGEST = 100_000_000
"""Bytes of a header at most; the safetensors library refuses longer ones."""

DTYPES: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""Dtype of the format to its name in torch."""


class HeaderError(ValueError):
    """The bytes are no header of a safetensors file; the text says why."""


@frozen(kw_only=True)
class Header:
    """What a header says."""

    tensors: tuple[StoredTensor, ...]
    """In the order of their bytes."""
    data: int
    """Where the first tensor begins."""
    end: int
    """Size that the whole file must have."""


def header_size(prefix: bytes) -> int:
    """Length of the header that begins with these eight bytes, without them. Raises ``HeaderError``."""
    if len(prefix) < PREFIX:
        raise HeaderError(f"it has {len(prefix)} bytes, and a safetensors file begins with the {PREFIX} of a length")
    length = int.from_bytes(prefix[:PREFIX], "little")
    if not 2 <= length <= LONGEST:
        raise HeaderError(f"its first {PREFIX} bytes give a header of {length:,} bytes; it is no safetensors file")
    return length


def header_digest(head: bytes) -> str:
    """Digest of the first bytes of a file, length and header together."""
    return f"sha256:{hashlib.sha256(head).hexdigest()}"


def parse_header(head: bytes, file: int = 0) -> Header:
    """The tensors of a file that begins with ``head``, length and header together. ``file`` is put into each.

    Raises ``HeaderError`` for anything that is not exactly a header of the format.
    """
    length = header_size(head)
    if len(head) != PREFIX + length:
        raise HeaderError(f"it ends after {len(head):,} bytes, inside its header of {length:,}")
    try:
        data: Any = json.loads(head[PREFIX:].decode("utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError):
        raise HeaderError("its header is no JSON; it is damaged, or no safetensors file") from None
    if not isinstance(data, dict):
        raise HeaderError("its header is no JSON object; it is damaged, or no safetensors file")
    found = tuple(_tensors(data, PREFIX + length, file))
    tensors = tuple(sorted(found, key=lambda tensor: (tensor.start, tensor.length)))
    end = PREFIX + length
    for tensor in tensors:
        if tensor.start != end:
            raise HeaderError(f"`{tensor.key}` begins at byte {tensor.start:,}, where {end:,} is due: bytes overlap")
        end += tensor.length
    return Header(tensors=tensors, data=PREFIX + length, end=end)


def _tensors(data: dict[str, Any], begin: int, file: int) -> Iterator[StoredTensor]:
    for key, entry in data.items():
        if key == "__metadata__":
            continue
        if not is_unicode(key):
            raise HeaderError(f"it has the name {key!a:.200}, which is no Unicode text; the file is damaged")
        match entry:
            case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(first), int(last)]}:
                pass
            case _:
                raise HeaderError(f"the entry of `{key}` lacks dtype, shape or data_offsets")
        if not all(type(size) is int and size >= 0 for size in shape) or not 0 <= first <= last:
            raise HeaderError(f"`{key}` has shape {shape} and bytes {first} to {last}")
        name = DTYPES.get(kind, kind)
        length = prod(shape) * itemsize(name)
        if kind in DTYPES and last - first != length:
            raise HeaderError(f"`{key}` is {name}{shape}, and has {last - first:,} bytes, not {length:,}")
        yield StoredTensor(key=key, dtype=name, shape=tuple(shape), file=file, start=begin + first, length=last - first)


def is_unicode(text: str) -> bool:
    """True if the text can be written anywhere: JSON may escape one half of a surrogate pair, which nothing can print.

    >>> is_unicode("layer.weight"), is_unicode("layer" + chr(0xD800))
    (True, False)
    """
    return not any("\ud800" <= char <= "\udfff" for char in text)
