"""Every rank reads the bytes of its own shards from safetensors files, straight into their storage.

A safetensors file holds each tensor as one run of bytes in row-major order, so the plan knows where each begins, and
which bytes of it are a rank's shard is arithmetic (``plan.byte_ranges``). Rank by rank, and without a word between
them:

1. All slices of all files that this rank needs are sorted by file and position, so that a disk is read in one sweep.
2. Each is read into the storage of the shard itself, where that has the file's dtype, lies on the host and is
   contiguous. Where it does not, bytes come through one buffer of ``STAGING`` bytes and are copied: cast, moved to the
   device, or laid out in the shard's own order.
3. At the end all ranks wait for each other once. A rank that failed to read says so there, and all of them fail.

Memory: the shards, and that one buffer. Nobody holds a whole tensor, and no rank reads what another one keeps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import c_char
from math import prod

import torch
from torch import Tensor

from prepkit.applying.handlers import problems
from prepkit.applying.handlers.check_files import unreadable
from prepkit.applying.handlers.named_tensors import named_parts, named_tensors
from prepkit.court import refused
from prepkit.interpreter import Handler
from prepkit.objects.target import Target
from prepkit.plan.byte_ranges import BoxRead, Range, complete, reads
from prepkit.plan.layout import itemsize
from prepkit.ranks.progress import progress
from prepkit.ranks.world import world
from prepkit.steps import FileSlice, ReadTensors

STAGING = 16 * 2**20
"""Bytes of the one buffer that values pass through on their way to another dtype, device, or order."""


class Misread(Exception):
    """What is read of a tensor does not fit into its place; who reads the file refuses it by its name."""


def read_ready(step: ReadTensors, target: Target) -> problems.Problems:
    """Every name must be a parameter or buffer of the shape that the checkpoint gives it, in one or in chunks."""
    tensors = named_tensors(target)
    odd = (s.name for s in step.sources if s.name in tensors and tuple(tensors[s.name].shape) != s.shape)
    return (
        *problems.absent("tensor", (source.name for source in step.sources), tensors),
        *problems.told("plan.other-model", dict.fromkeys(odd), "not of the shape that the checkpoint has"),
    )


def read_do(step: ReadTensors, target: Target) -> tuple[str, ...]:
    """Reads this rank's bytes of every source, then waits for the other ranks.

    What is read in chunks has values when all of them are read. Returns the names of what had values before. Raises
    ``RunRefused`` that names file and tensor.
    """
    lost = tuple(dict.fromkeys(source.name for source in step.sources if source.name not in target.unfilled))
    with problems.half_done(lost):
        _read_all(step, target)
        target.together()
        target.unfilled -= complete(step.sources)
        return lost


def read_undo(step: ReadTensors, target: Target, memo: tuple[str, ...]) -> str | None:
    """What had no values before has none again: no more than a note, as its storage goes with ``AllocateTensors``."""
    target.unfilled |= {source.name for source in step.sources} - set(memo)
    return problems.overwritten(memo)


def _read_all(step: ReadTensors, target: Target) -> None:
    parts = named_parts(target)
    planned = [(source, reads(source, step.axes, world().rank)) for source in step.sources]
    total = sum(part.length for _, boxes in planned for box in boxes for part in box.ranges)
    staging = Staging()
    with ExitStack() as stack:
        advance = stack.enter_context(progress("reading weights", total))
        descriptors = [stack.enter_context(_descriptor(file.path)) for file in step.files]
        for source, boxes in sorted(planned, key=lambda pair: (pair[0].file, pair[0].start)):
            file = step.files[source.file]
            try:
                _check_size(parts[source.name], boxes)
                for box in boxes:
                    into = _filled_part(parts[source.name], box)
                    _fill(into, source, box.ranges, descriptors[source.file], staging)
            except (Misread, OSError) as error:
                reason = getattr(error, "strerror", None) or error
                raise refused("weights.unreadable", file.path, f"`{source.key}` {reason}") from None
            advance(sum(part.length for box in boxes for part in box.ranges))


@contextmanager
def _descriptor(path: str) -> Iterator[int]:
    """Of the file, open for reading. Raises ``RunRefused`` where it cannot be opened."""
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        yield number
    finally:
        os.close(number)


class Staging:
    """The buffer for casts and copies, made when it is first needed."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def view(self, count: int, dtype: torch.dtype) -> Tensor:
        """Its first ``count`` elements of that dtype."""
        if self._buffer is None:
            self._buffer = torch.empty(STAGING, dtype=torch.uint8)
        return self._buffer[: count * dtype.itemsize].view(dtype)


def _check_size(part: Tensor, boxes: Sequence[BoxRead]) -> None:
    """Raises ``Misread`` for a part of another size than planned."""
    planned = sum(prod(box.box) for box in boxes)
    if planned != part.numel():
        raise Misread(f"does not fit: this rank holds {part.numel():,} elements, the plan reads {planned:,}")


def _filled_part(part: Tensor, read: BoxRead) -> Tensor:
    """Return what of the rank's part is read: a view."""
    if read.offset is not None:
        part = part[read.offset : read.offset + prod(read.box)].view(read.box)
    for dim, filled in enumerate(read.filled):
        part = part.narrow(dim, filled.start, filled.size)
    return part


def _fill(into: Tensor, source: FileSlice, parts: Sequence[Range], descriptor: int, staging: Staging) -> None:
    """The bytes of the ranges, in turn, into the elements of a tensor, in row-major order."""
    dtype: torch.dtype = getattr(torch, source.dtype)
    item = itemsize(source.dtype)
    in_place = into.dtype == dtype and into.device.type == "cpu"
    ahead = list(reversed(parts))
    for view in _views(into, max(STAGING // item, 1), in_place=in_place):
        if in_place and view.is_contiguous():
            # ``view(-1)`` of a single element may keep another stride than 1, and could then not be seen as bytes
            _read(ahead, view.as_strided((view.numel(),), (1,)), descriptor)
        else:
            values = staging.view(view.numel(), dtype)
            _read(ahead, values, descriptor)
            view.copy_(values.view(view.shape))


def _views(into: Tensor, most: int, *, in_place: bool) -> Iterator[Tensor]:
    """Views that are the tensor in row-major order: of at most so many elements, but contiguous ones whole in place.

    >>> [tuple(view.shape) for view in _views(torch.empty(3, 4).t(), 7, in_place=True)]
    [(2, 3), (2, 3)]
    """
    if not into.numel():
        return
    if into.numel() <= most or (in_place and into.is_contiguous()):
        yield into
    elif into.is_contiguous():
        yield from torch.split(into.view(-1), most)
    elif (rows := most * len(into) // into.numel()) > 0:
        yield from torch.split(into, rows)
    else:
        for row in into.unbind(0):
            yield from _views(row, most, in_place=in_place)


def _read(ahead: list[Range], into: Tensor, descriptor: int) -> None:
    """Fills a contiguous host tensor from the ranges that lie ahead, the next one last, and takes them away."""
    flat = into.view(torch.uint8)
    done = 0
    while done < flat.numel():
        if not ahead:
            raise Misread(f"does not fit: the plan reads {done:,} bytes of {flat.numel():,}")
        part = ahead.pop()
        length = min(part.length, flat.numel() - done)
        _pread(descriptor, flat[done : done + length], part.start)
        if length < part.length:
            ahead.append(Range(start=part.start + length, length=part.length - length))
        done += length


def _pread(descriptor: int, into: Tensor, start: int) -> None:
    """Fills a contiguous host tensor from a file. Raises ``Misread`` where the file ends first."""
    length = into.numel() * into.element_size()
    view = memoryview((c_char * length).from_address(into.data_ptr())).cast("B")
    done = 0
    while done < length:
        count = os.preadv(descriptor, [view[done:]], start + done)
        if count == 0:
            raise Misread(f"ends after {done:,} of {length:,} bytes: the file was truncated")
        done += count


READ: Handler[ReadTensors, Target, tuple[str, ...]] = Handler(ready=read_ready, do=read_do, undo=read_undo)
