"""Every rank reads the bytes of its own shards from safetensors files, straight into their storage."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import c_char
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from prepkit.live.handlers import messages
from prepkit.live.handlers.weights import FileError, tensors
from prepkit.live.interpreter import Handler
from prepkit.live.model.state import local
from prepkit.live.model.target import Target
from prepkit.live.progress import progress
from prepkit.plan.byte_ranges import Range, complete, held, parts, ranges
from prepkit.plan.dtypes import itemsize
from prepkit.steps import Axis, FileSlice, ReadTensors

STAGING = 16 * 2**20
"""Bytes of the one buffer that values pass through on their way to another dtype, device, or order."""


def read_ready(step: ReadTensors, target: Target) -> tuple[str, ...]:
    """Every name must be a parameter or buffer of the shape that the checkpoint gives it, in one or in parts."""
    there = tensors(target)
    found = messages.absent("tensor", [source.name for source in step.sources], there)
    wrong = [s.name for s in step.sources if s.name in there and tuple(there[s.name].shape) != s.shape]
    if wrong:
        names = tuple(dict.fromkeys(wrong))
        found += (f"{messages.listed(names)}: not of the shape that the checkpoint has; build the plan again",)
    return found


def read_do(step: ReadTensors, target: Target) -> tuple[str, ...]:
    """Reads this rank's bytes of every source, then waits for the other ranks.

    What is read in parts has values when all of them are read. Returns the names of what had values before. Raises
    ``FileError`` that names file and tensor.
    """
    lost = tuple(dict.fromkeys(source.name for source in step.sources if source.name not in target.unfilled))
    with messages.half_done(lost):
        _read_all(step, target)
        target.together()
        target.unfilled -= complete(step.sources)
        return lost


def read_undo(step: ReadTensors, target: Target, memo: tuple[str, ...]) -> str | None:
    """What had no values before has none again: no more than a note, as its storage goes with ``AllocateTensors``."""
    target.unfilled |= {source.name for source in step.sources} - set(memo)
    return messages.overwritten(memo)


def _read_all(step: ReadTensors, target: Target) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    there = tensors(target)
    planned = [(source, ranges(source, step.axes, rank)) for source in step.sources]
    total = sum(part.length for _, some in planned for part in some)
    staging = Staging()
    with ExitStack() as stack:
        advance = stack.enter_context(progress("reading weights", total))
        opened = [stack.enter_context(_descriptor(file.path)) for file in step.files]
        for source, some in sorted(planned, key=lambda pair: (pair[0].file, pair[0].start)):
            file = step.files[source.file]
            try:
                into = _into(local(there[source.name]).detach(), source, step.axes, rank)
                _fill(into, source, some, opened[source.file], staging)
            except (FileError, OSError) as error:
                said = getattr(error, "strerror", None) or error
                raise FileError(
                    f"{file.path}: `{source.key}` {said}; restore the file, and build the model anew"
                ) from None
            advance(sum(part.length for part in some))


@contextmanager
def _descriptor(path: str) -> Iterator[int]:
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}; restore it, and build the model anew") from None
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


def _into(part: Tensor, source: FileSlice, axes: tuple[Axis, ...], rank: int) -> Tensor:
    """What of this rank's part the source fills, as a view. Raises ``FileError`` for a part that is not as planned."""
    planned = [one.size for one in parts(source, axes, rank)]
    if prod(planned) != part.numel():
        raise FileError(f"does not fit: this rank holds {part.numel():,} elements, the plan reads {prod(planned):,}")
    if source.chunk is None:
        return part
    for dim, one in enumerate(held(source, axes, rank)):
        part = part.narrow(dim, one.start, one.size)
    return part


def _fill(into: Tensor, source: FileSlice, some: Sequence[Range], descriptor: int, staging: Staging) -> None:
    """The bytes of the ranges, in turn, into the elements of a tensor, in row-major order."""
    dtype: torch.dtype = getattr(torch, source.dtype)
    item = itemsize(source.dtype)
    straight = into.dtype == dtype and into.device.type == "cpu"
    ahead = list(reversed(some))
    for piece in _pieces(into, max(STAGING // item, 1), straight=straight):
        if straight and piece.is_contiguous():
            # ``view(-1)`` of a single element may keep another stride than 1, and could then not be seen as bytes
            _read(ahead, piece.as_strided((piece.numel(),), (1,)), descriptor)
        else:
            values = staging.view(piece.numel(), dtype)
            _read(ahead, values, descriptor)
            piece.copy_(values.view(piece.shape))


def _pieces(into: Tensor, most: int, *, straight: bool) -> Iterator[Tensor]:
    """Views that are the tensor in row-major order: of at most so many elements, but contiguous ones whole if straight.

    >>> [tuple(piece.shape) for piece in _pieces(torch.empty(3, 4).t(), 7, straight=True)]
    [(2, 3), (2, 3)]
    """
    if not into.numel():
        return
    if into.numel() <= most or (straight and into.is_contiguous()):
        yield into
    elif into.is_contiguous():
        yield from torch.split(into.view(-1), most)
    elif (rows := most * len(into) // into.numel()) > 0:
        yield from torch.split(into, rows)
    else:
        for row in into.unbind(0):
            yield from _pieces(row, most, straight=straight)


def _read(ahead: list[Range], into: Tensor, descriptor: int) -> None:
    """Fills a contiguous host tensor from the ranges that lie ahead, the next one last, and takes them away."""
    flat = into.view(torch.uint8)
    done = 0
    while done < flat.numel():
        if not ahead:
            raise FileError(f"does not fit: the plan reads {done:,} bytes of {flat.numel():,}")
        one = ahead.pop()
        length = min(one.length, flat.numel() - done)
        _pread(descriptor, flat[done : done + length], one.start)
        if length < one.length:
            ahead.append(Range(start=one.start + length, length=one.length - length))
        done += length


def _pread(descriptor: int, into: Tensor, start: int) -> None:
    """Fills a contiguous host tensor from a file. Raises ``FileError`` where the file ends first."""
    length = into.numel() * into.element_size()
    view = memoryview((c_char * length).from_address(into.data_ptr())).cast("B")
    done = 0
    while done < length:
        count = os.preadv(descriptor, [view[done:]], start + done)
        if count == 0:
            raise FileError(f"ends after {done:,} of {length:,} bytes: the file was truncated")
        done += count


READ: Handler[ReadTensors, Target, tuple[str, ...]] = Handler(ready=read_ready, do=read_do, undo=read_undo)
