"""Values that rank 0 holds travel to all: set aside while the model is cut and sharded, then sent piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from prepkit.interpreter import Handler
from prepkit.live import names
from prepkit.live.agree import wire
from prepkit.live.handlers import lookup
from prepkit.live.handlers.weights import tensors
from prepkit.live.progress import progress
from prepkit.live.standing import local
from prepkit.live.target import Aside, Target
from prepkit.reads import Part, parts
from prepkit.steps import Axis, SendTensors, Sent, SetTensorsAside

PIECE = 64 * 2**20
"""Bytes that are sent at a time, in whole rows of dim 0: at least one row, at most one tensor."""

ROOT = 0
"""The rank that has the values."""


class NoValues(RuntimeError):
    """Rank 0 was to send tensors that it has no values of; names them."""


# --- set aside -----------------------------------------------------------------------------------------------------


def aside_ready(step: SetTensorsAside, target: Target) -> tuple[str, ...]:
    """Every name must be there. That rank 0 has values is asked when all are there, or the others would wait for it."""
    there = tensors(target)
    return lookup.absent("tensor", (*step.params, *step.buffers), there)


def aside_do(step: SetTensorsAside, target: Target) -> tuple[str, ...]:
    """Exchanges every parameter's content with one on meta: ties stay tied, an optimizer keeps what it holds.

    Waits for the other ranks. Returns the names of what had values. Raises ``NoValues`` on rank 0, and what the first
    to fail has said on the others; ``RuntimeError`` where a graph or a weak reference holds a parameter.
    """
    there, held = tensors(target), names.named_parameters(target.model)
    if _rank() == ROOT:
        _expect([name for name in (*step.params, *step.buffers) if there[name].is_meta])
    try:
        for name in step.params:
            if not held[name].is_meta:
                _set_aside(name, held[name], target)
        target.together()
        return tuple(target.aside)
    except BaseException:
        aside_undo(step, target, ())
        raise


def aside_undo(step: SetTensorsAside, target: Target, memo: tuple[str, ...]) -> str | None:
    """Gives every parameter its values again, but for those that were sent and are freed."""
    del step
    gone = [name for name in memo if name not in target.aside]
    while target.aside:
        _, one = target.aside.popitem()
        if one.held.is_meta:
            continue  # a failure came before the exchange
        one.held.data = one.held.data.to(one.device)
        _swap(one.param, one.held)
    return f"{lookup.listed(gone)}: sent, and freed on this rank" if gone else None


def _set_aside(name: str, param: Parameter, target: Target) -> None:
    bare = Parameter(torch.empty_like(param, device="meta", requires_grad=False), requires_grad=param.requires_grad)
    vars(bare).update(vars(param))  # what an author has noted on a parameter stays to be read
    target.aside[name] = Aside(param=param, held=bare, device=param.device)
    try:
        _swap(param, bare)  # from here on ``bare`` is what the parameter was
    except RuntimeError as error:
        raise RuntimeError(
            f"{name}: held by more than the model and its optimizer; let go of the losses, outputs and references from "
            f"before apply ({error})"
        ) from error
    bare.data = bare.data.to("cpu")


def _swap(one: Tensor, other: Tensor) -> None:
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]  # torch has no types here


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else ROOT


def _expect(empty: list[str]) -> None:
    if empty:
        raise NoValues(
            f"rank {ROOT} has no values of {lookup.listed(empty)}, which it is to send; build its model outside "
            "torch.device('meta'), or plan with weights=LoadWeights(path) or InitWeights()"
        )


ASIDE: Handler[SetTensorsAside, Target, tuple[str, ...]] = Handler(ready=aside_ready, do=aside_do, undo=aside_undo)

# --- send ----------------------------------------------------------------------------------------------------------


def send_ready(step: SendTensors, target: Target) -> tuple[str, ...]:
    """Every name must be a parameter or buffer of the planned shape."""
    there = tensors(target)
    found = lookup.absent("tensor", [one.name for one in step.tensors], there)
    wrong = [one.name for one in step.tensors if one.name in there and tuple(there[one.name].shape) != one.shape]
    if wrong:
        found += (f"{lookup.listed(wrong)}: not of the planned shape; build the plan again from this model",)
    return found


def send_do(step: SendTensors, target: Target) -> tuple[str, ...]:
    """Sends tensor by tensor, in planned order, after all ranks have come; then waits for them again.

    Rank 0 frees what it had set aside once it is sent. Returns the names of what had values on this rank and has rank
    0's now. Raises ``NoValues``, and ``RuntimeError`` where this rank holds another part than planned.
    """
    there, rank = tensors(target), _rank()
    if rank == ROOT:
        _expect([one.name for one in step.tensors if one.name not in target.aside and _lacks(one, there, target)])
    target.together()
    lost = () if rank == ROOT else tuple(one.name for one in step.tensors if one.name not in target.unfilled)
    with lookup.half_done(lost), torch.no_grad(), _own_group(target) as groups:
        _send_all(step, there, target, groups)
        target.together()
        target.unfilled -= {one.name for one in step.tensors}
        return lost


def send_undo(step: SendTensors, target: Target, memo: tuple[str, ...]) -> str | None:
    """What had no values before has none again: its storage goes with ``AllocateTensors``."""
    if _rank() != ROOT:
        target.unfilled |= {one.name for one in step.tensors} - set(memo)
    return lookup.overwritten(memo)


def _lacks(one: Sent, there: dict[str, Tensor], target: Target) -> bool:
    """Whether the model itself has no whole values either."""
    return one.name in target.unfilled or isinstance(there[one.name], DTensor)


@contextmanager
def _own_group(target: Target) -> Iterator[list[Any]]:
    """A list with a process group of all ranks for the sending alone, which nothing else holds.

    A rank that fails closes its connections by letting go of it, so that no other waits for what never comes; of the
    default group it could not, as the sharded model holds that.
    """
    groups = [dist.new_group()]
    try:
        yield groups
    except BaseException:
        groups.clear()
        raise
    target.ended += groups  # a thread of gloo may have its last work in its hands still
    dist.destroy_process_group(groups.pop())


def _send_all(step: SendTensors, there: dict[str, Tensor], target: Target, groups: list[Any]) -> None:
    sends = _rank() == ROOT
    total = sum(prod(one.shape) * getattr(torch, one.dtype).itemsize for one in step.tensors)
    first = next((local(there[one.name]).device for one in step.tensors), torch.device("cpu"))
    lane = Lane(device=wire(first), groups=groups)
    with progress("sending weights", total) as advance:
        for one in step.tensors:
            aside, own = target.aside.get(one.name), there[one.name]
            whole = (aside.held if aside else own).detach() if sends else None
            # What rank 0 has in its place already is sent from there, and not written over.
            into = local(own).detach() if aside or not sends else None
            for done in _send(one, step.axes, whole, into, lane):
                advance(done)
            target.aside.pop(one.name, None)


@define
class Lane:
    """The one buffer that everything passes through, as long as the longest piece so far."""

    device: torch.device
    groups: list[Any] = field(factory=list)
    """The process group that it leads through; empty: the default one."""
    _buffer: Tensor = field(factory=lambda: torch.empty(0, dtype=torch.uint8), init=False)

    def bytes(self, count: int) -> Tensor:
        """Its first ``count`` bytes."""
        if self._buffer.numel() < count:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the shorter one goes first
            self._buffer = torch.empty(count, dtype=torch.uint8, device=self.device)
        return self._buffer[:count]

    def send(self, sent: Tensor) -> None:
        """Rank 0's bytes to every rank."""
        dist.broadcast(sent, src=ROOT, group=self.groups[0] if self.groups else None)


@frozen
class Rows:
    """A run of rows of dim 0."""

    start: int
    count: int


def _send(one: Sent, axes: tuple[Axis, ...], whole: Tensor | None, into: Tensor | None, lane: Lane) -> Iterator[int]:
    """Sends ``whole`` if there is one, and takes this rank's part into ``into`` if there is one; yields bytes sent.

    Every dtype travels as bytes, as no backend knows them all.
    """
    shape, mine = (one.shape, parts(one, axes, _rank())) if one.shape else ((1,), (Part(start=0, size=1),))
    held = tuple(part.size for part in mine)
    if not one.shape:
        whole, into = (None if tensor is None else tensor.view(1) for tensor in (whole, into))
    if into is not None and tuple(into.shape) != held:
        raise RuntimeError(f"{one.name}: this rank holds {list(into.shape)}, planned {list(held)}; plan again")
    dtype: torch.dtype = getattr(torch, one.dtype)
    for rows in _runs(shape, dtype.itemsize):
        size = (rows.count, *shape[1:])
        sent = lane.bytes(prod(size) * dtype.itemsize)
        piece = sent.view(dtype).view(size)
        if whole is not None:
            piece.copy_(whole.narrow(0, rows.start, rows.count))
        lane.send(sent)
        if into is not None:
            _take(piece, rows, mine, into)
        yield sent.numel()


def _runs(shape: tuple[int, ...], item: int) -> Iterator[Rows]:
    """Rows of dim 0 that are sent together; nothing for a tensor without elements."""
    row = prod(shape[1:]) * item
    if not row:
        return
    most = max(1, PIECE // row)
    for start in range(0, shape[0], most):
        yield Rows(start, min(most, shape[0] - start))


def _take(piece: Tensor, rows: Rows, mine: tuple[Part, ...], into: Tensor) -> None:
    """Copies what ``mine`` and these rows have in common to where it belongs; casts, and moves to the device."""
    first, last = max(rows.start, mine[0].start), min(rows.start + rows.count, mine[0].start + mine[0].size)
    if first >= last:
        return
    taken = piece.narrow(0, first - rows.start, last - first)
    for dim, part in enumerate(mine[1:], 1):
        taken = taken.narrow(dim, part.start, part.size)
    into.narrow(0, first - mine[0].start, last - first).copy_(taken)


SEND: Handler[SendTensors, Target, tuple[str, ...]] = Handler(ready=send_ready, do=send_do, undo=send_undo)
