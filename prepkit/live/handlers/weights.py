"""A model gets storage, and every rank reads the bytes of its own shards from safetensors files into it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import c_char
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.nn import Parameter

from prepkit.headers import header_digest
from prepkit.interpreter import Handler
from prepkit.live import launcher, names
from prepkit.live.handlers import lookup
from prepkit.live.progress import progress
from prepkit.live.standing import local
from prepkit.live.target import Target
from prepkit.reads import ITEMSIZES, Range, ranges
from prepkit.steps import AllocateTensors, CheckFiles, File, ReadTensors, Source

STAGING = 16 * 2**20
"""Bytes of the one buffer that values pass through on their way to another dtype or device."""


class FileError(RuntimeError):
    """A file is not as planned; names it, and the tensor where there is one."""


# --- files ---------------------------------------------------------------------------------------------------------


def check_ready(step: CheckFiles, target: Target) -> tuple[str, ...]:
    """Always: a rank that refused here would leave the others waiting, so files are looked at when all are there."""
    del step, target
    return ()


def check_do(step: CheckFiles, target: Target) -> None:
    """Looks at every file, then waits for the other ranks. Raises ``FileError``, or what the first to fail has said."""
    bad = [text for file in step.files if (text := _difference(file))]
    if bad:
        raise FileError("; ".join(bad))
    target.together()


def check_undo(step: CheckFiles, target: Target, memo: None) -> None:
    """Nothing was changed."""
    del step, target, memo


def _difference(file: File) -> str:
    """How a file is not the one that was planned with; empty when it is."""
    try:
        size = Path(file.path).stat().st_size
        if size != file.size:
            return f"{file.path} has {size:,} bytes, {file.size:,} when the plan was made; restore it, or plan again"
        with Path(file.path).open("rb") as opened:
            head = opened.read(file.data)
    except OSError as error:
        return f"{file.path} cannot be read: {error.strerror or error}"
    if header_digest(head) != file.header:
        return f"{file.path} has another header than when the plan was made; restore it, or plan again"
    return ""


CHECK: Handler[CheckFiles, Target, None] = Handler(ready=check_ready, do=check_do, undo=check_undo)

# --- storage -------------------------------------------------------------------------------------------------------


def allocate_ready(step: AllocateTensors, target: Target) -> tuple[str, ...]:
    """The devices must be there."""
    del target
    found = launcher.device_problems(step.device.type)
    return found + (launcher.device_problems(step.buffers.type) if step.buffers else ())


@frozen(eq=False)
class Places:
    """Where everything was."""

    devices: dict[str, torch.device]
    buffers: tuple[tuple[dict[str, Tensor | None], str, Tensor], ...]
    """The dictionary that holds each buffer, its key in it, and the buffer."""


def allocate_do(step: AllocateTensors, target: Target) -> Places:
    """Gives every tensor storage on the device and notes in ``target.unfilled`` which have no values yet.

    Buffers that have values keep them, which ``to_empty`` would lose. Returns where things were.
    """
    device = launcher.bind(step.device)
    computes = launcher.bind(step.buffers) if step.buffers else device
    before = Places(
        devices={name: tensor.device for name, tensor in tensors(target).items()},
        buffers=tuple(
            (site.module._buffers, key, buffer)
            for site in names.sites(target.model)
            for key, buffer in site.module._buffers.items()
            if buffer is not None
        ),
    )
    try:
        target.unfilled |= {name for name, where in before.devices.items() if where.type == "meta"}
        _each(target, lambda tensor: _on(tensor, device if isinstance(tensor, Parameter) else computes))
        return before
    except BaseException:
        allocate_undo(step, target, before)
        raise


def allocate_undo(step: AllocateTensors, target: Target, memo: Places) -> None:
    """Puts every tensor back to where it was; what had no values has no storage again."""
    del step
    places = {id(tensor): memo.devices[name] for name, tensor in tensors(target).items()}
    _each(target, lambda tensor: _on(tensor, places[id(tensor)]))
    for slots, key, buffer in memo.buffers:
        slots[key] = buffer
    target.unfilled -= memo.devices.keys()


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.is_meta or device.type == "meta":
        return torch.empty_like(tensor, device=device)
    return tensor.to(device)


def _each(target: Target, change: Callable[[Tensor], Tensor]) -> None:
    """``Module._apply``, as ``to`` and ``to_empty`` call it: FSDP2 hooks into it to take over new shards.

    Tensors are swapped in place, so that ties stay tied and an optimizer keeps what it holds.
    """
    changed: dict[int, tuple[Tensor, Tensor]] = {}

    def once(tensor: Tensor) -> Tensor:
        """A buffer that two modules share stays one; a parameter is itself again when it is met a second time."""
        if isinstance(tensor, Parameter):
            return change(tensor)
        return changed.setdefault(id(tensor), (tensor, change(tensor)))[1]

    with _swapping():
        target.model._apply(once)  # type: ignore[no-untyped-call]  # torch has no types here


@contextmanager
def _swapping() -> Iterator[None]:
    """Meanwhile torch exchanges a converted parameter's content, not its ``data``, which cannot leave meta."""
    own = torch.__future__.get_swap_module_params_on_conversion()
    try:
        torch.__future__.set_swap_module_params_on_conversion(True)
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(own)


def tensors(target: Target) -> dict[str, Tensor]:
    """Canonical name to parameter or buffer, each once, under its first name."""
    found: dict[str, Tensor] = dict(names.named_parameters(target.model))
    seen: set[int] = set()
    for site in names.sites(target.model):
        for name, buffer in site.module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found[f"{site.path}.{name}" if site.path else name] = buffer
    return found


ALLOCATE: Handler[AllocateTensors, Target, Places] = Handler(ready=allocate_ready, do=allocate_do, undo=allocate_undo)

# --- reading -------------------------------------------------------------------------------------------------------


def read_ready(step: ReadTensors, target: Target) -> tuple[str, ...]:
    """Every name must be a parameter or buffer of the shape that the file has."""
    there = tensors(target)
    found = lookup.absent("tensor", [source.name for source in step.sources], there)
    wrong = [s.name for s in step.sources if s.name in there and tuple(there[s.name].shape) != s.shape]
    if wrong:
        found += (f"{lookup.listed(wrong)}: not of the shape that the checkpoint has; build the plan again",)
    return found


def read_do(step: ReadTensors, target: Target) -> tuple[str, ...]:
    """Reads this rank's bytes of every source, then waits for the other ranks.

    Returns the names of what had values before. Raises ``FileError`` that names file and tensor.
    """
    lost = tuple(source.name for source in step.sources if source.name not in target.unfilled)
    with lookup.half_done(lost):
        _read_all(step, target)
        target.together()
        target.unfilled -= {source.name for source in step.sources}
        return lost


def read_undo(step: ReadTensors, target: Target, memo: tuple[str, ...]) -> str | None:
    """What had no values before has none again: no more than a note, as its storage goes with ``AllocateTensors``."""
    target.unfilled |= {source.name for source in step.sources} - set(memo)
    return lookup.overwritten(memo)


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
                _fill(local(there[source.name]).detach(), source, some, opened[source.file], staging)
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


def _fill(part: Tensor, source: Source, some: Sequence[Range], descriptor: int, staging: Staging) -> None:
    """Bytes of one source into the part of this rank."""
    item = ITEMSIZES[source.dtype]
    if sum(one.length for one in some) != part.numel() * item:
        held = f"{part.numel():,} elements, the plan reads {sum(one.length for one in some) // item:,}"
        raise FileError(f"does not fit: this rank holds {held}")
    dtype: torch.dtype = getattr(torch, source.dtype)
    straight = part.dtype == dtype and part.device.type == "cpu" and part.is_contiguous()
    flat = part.view(-1) if part.is_contiguous() else part.new_empty(part.numel())
    done = 0
    for one in some:
        for start, length in _pieces(one, one.length if straight else STAGING // item * item):
            count = length // item
            into = flat[done : done + count] if straight else staging.view(count, dtype)
            _pread(descriptor, into, start)
            if not straight:
                flat[done : done + count].copy_(into)
            done += count
    if not part.is_contiguous():
        part.copy_(flat.view(part.shape))


def _pieces(one: Range, most: int) -> Iterator[tuple[int, int]]:
    for start in range(0, one.length, max(most, 1)):
        yield one.start + start, min(most, one.length - start)


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
