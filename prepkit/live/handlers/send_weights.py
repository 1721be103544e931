"""Values that rank 0 has set aside travel: to every rank the part that it keeps, and to all what all keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor

from prepkit.live.handlers import messages
from prepkit.live.handlers.channel import P2PChannel
from prepkit.live.handlers.stash import expect, own_rank
from prepkit.live.handlers.weights import tensors
from prepkit.live.interpreter import Handler
from prepkit.live.model.state import local
from prepkit.live.model.target import Target
from prepkit.live.progress import progress
from prepkit.live.ranks.agree import wire
from prepkit.plan.broadcast import ROOT, box, bytes_sent, goes_whole, legs, origin
from prepkit.plan.byte_ranges import Part
from prepkit.plan.dtypes import itemsize
from prepkit.steps import Axis, SendTensors, Transfer


def send_ready(step: SendTensors, target: Target) -> tuple[str, ...]:
    """Every name must be a parameter or buffer of the planned shape."""
    there = tensors(target)
    found = messages.absent("tensor", [one.name for one in step.tensors], there)
    wrong = [one.name for one in step.tensors if one.name in there and tuple(there[one.name].shape) != one.shape]
    if wrong:
        found += (f"{messages.listed(wrong)}: not of the planned shape; build the plan again from this model",)
    return found


def send_do(step: SendTensors, target: Target) -> tuple[str, ...]:
    """Sends tensor by tensor, in planned order, after all ranks have come; then waits for them again.

    Rank 0 frees what it had set aside once it is sent. Returns the names of what had values on this rank and has rank
    0's now. Raises ``NoValues``, and ``RuntimeError`` where this rank holds another part than planned.
    """
    there, rank = tensors(target), own_rank()
    if rank == ROOT:
        expect([one.name for one in step.tensors if one.name not in target.stashed and _lacks(one, there, target)])
    target.together()
    lost = () if rank == ROOT else tuple(one.name for one in step.tensors if one.name not in target.unfilled)
    with messages.half_done(lost), torch.no_grad(), _own_lane(step, there, target) as lane:
        _send_all(step, there, target, lane)
        target.together()
        target.unfilled -= {one.name for one in step.tensors}
        return lost


def send_undo(step: SendTensors, target: Target, memo: tuple[str, ...]) -> str | None:
    """What had no values before has none again: its storage goes with ``AllocateTensors``."""
    if own_rank() != ROOT:
        target.unfilled |= {one.name for one in step.tensors} - set(memo)
    return messages.overwritten(memo)


def _lacks(one: Transfer, there: dict[str, Tensor], target: Target) -> bool:
    """Whether the model itself has no whole values either."""
    return one.name in target.unfilled or isinstance(there[one.name], DTensor)


@contextmanager
def _own_lane(step: SendTensors, there: dict[str, Tensor], target: Target) -> Iterator[P2PChannel]:
    """A lane in a process group of all ranks for the sending alone, which nothing else holds.

    A rank that fails closes its connections by letting go of it, so that no other waits for what never comes; of the
    default group it could not, as the sharded model holds that.
    """
    first = next((local(there[one.name]).device for one in step.tensors), torch.device("cpu"))
    lane = P2PChannel(device=wire(first), group=dist.new_group())
    try:
        yield lane
    except BaseException:
        lane.close()
        raise
    group = lane.close()
    target.ended.append(group)  # a thread of gloo may have its last work in its hands still
    dist.destroy_process_group(group)


def _send_all(step: SendTensors, there: dict[str, Tensor], target: Target, lane: P2PChannel) -> None:
    sends = own_rank() == ROOT
    axes = step.axes or (Axis(name="all", size=dist.get_world_size()),)
    with progress("sending weights", sum(_bytes(one, axes, lane) for one in step.tensors)) as lane.advance:
        lane.open()
        for one in step.tensors:
            aside, own = target.stashed.get(one.name), there[one.name]
            whole = (aside.held if aside else own).detach() if sends else None
            # What rank 0 has in its place already is sent from there, and not written over.
            into = local(own).detach() if aside or not sends else None
            send(one, axes, whole, into, lane)
            target.stashed.pop(one.name, None)
            del aside, whole  # or it would live until the next one is sent
        lane.drain()


def _bytes(one: Transfer, axes: tuple[Axis, ...], lane: P2PChannel) -> int:
    """What rank 0 gives away of ``one``; what the backend broadcasts counts once."""
    broadcast = goes_whole(one, axes) and not lane.on_host
    return prod(one.shape) * itemsize(one.dtype) if broadcast else bytes_sent(one, axes)


def send(one: Transfer, axes: tuple[Axis, ...], whole: Tensor | None, into: Tensor | None, lane: P2PChannel) -> None:
    """Starts sending ``whole`` if there is one, and taking this rank's part into ``into`` if there is one.

    Every dtype travels as bytes, as no backend knows them all. Raises ``RuntimeError`` where ``into`` is no such part.
    """
    mine = box(one, axes, own_rank())
    if not one.shape:
        whole, into = (None if tensor is None else tensor.view(1) for tensor in (whole, into))
    if into is not None and tuple(into.shape) != (held := tuple(part.size for part in mine)):
        raise RuntimeError(f"{one.name}: this rank holds {list(into.shape)}, planned {list(held)}; plan again")
    if whole is not None:
        _give(one, axes, whole, lane)
        if into is not None:
            into.copy_(_cut(whole, mine))  # while the others' parts are on the way
    elif into is not None:
        _take(one, axes, into, lane)


def _give(one: Transfer, axes: tuple[Axis, ...], whole: Tensor, lane: P2PChannel) -> None:
    """Rank 0: to each the part that it has to have, or all to all."""
    dtype: torch.dtype = getattr(torch, one.dtype)
    if goes_whole(one, axes) and not lane.on_host:
        for rows in _runs(tuple(whole.shape), dtype.itemsize, lane.piece):
            lane.broadcast(lane.packed(rows.of(whole), dtype))
        return
    for leg in legs(one, axes, ROOT):
        part = _cut(whole, leg.box)
        for rows in _runs(tuple(part.shape), dtype.itemsize, lane.piece):
            lane.send(lane.packed(rows.of(part), dtype), leg.to)
    lane.flush()


def _take(one: Transfer, axes: tuple[Axis, ...], into: Tensor, lane: P2PChannel) -> None:
    """Another rank: its part, or all, from whom it gets that, and on to those who get it from this one."""
    dtype: torch.dtype = getattr(torch, one.dtype)
    source, held = origin(one, axes, own_rank()), tuple(into.shape)
    shape, mine = held, tuple(Part(start=0, size=size) for size in held)
    if whole := goes_whole(one, axes):
        shape, mine = one.shape or (1,), box(one, axes, own_rank())
    alone = whole and not lane.on_host
    onwards = [] if alone else [leg.to for leg in legs(one, axes, own_rank())]
    for rows in _runs(shape, dtype.itemsize, lane.piece):
        size = (rows.count, *shape[1:])
        raw, pick = lane.straight(rows.of(into), dtype) if shape == held else None, None
        if raw is None:
            raw = lane.room(prod(size) * dtype.itemsize)
            pick = partial(_pick, raw.view(dtype).view(size), rows, mine, into)
        landed = partial(_landed, raw, onwards, lane, pick)
        if alone:
            lane.broadcast(raw, landed)
        else:
            lane.receive(raw, source, landed)


def _landed(raw: Tensor, onwards: list[int], lane: P2PChannel, pick: Callable[[], None] | None) -> None:
    """Hands on what has come, and puts it where it belongs if it is not there."""
    lane.relay(raw, onwards)
    if pick is not None:
        pick()


def _pick(piece: Tensor, rows: Rows, mine: tuple[Part, ...], into: Tensor) -> None:
    """Copies what ``mine`` and these rows have in common to where it belongs; casts, and moves to the device."""
    first, last = max(rows.start, mine[0].start), min(rows.start + rows.count, mine[0].start + mine[0].size)
    if first >= last:
        return
    taken = _cut(piece, (Part(start=first - rows.start, size=last - first), *mine[1:]))
    into.narrow(0, first - mine[0].start, last - first).copy_(taken)


def _cut(tensor: Tensor, wanted: tuple[Part, ...]) -> Tensor:
    """A view of these slices."""
    for dim, part in enumerate(wanted):
        tensor = tensor.narrow(dim, part.start, part.size)
    return tensor


@frozen
class Rows:
    """A run of rows of dim 0."""

    start: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """A view of them."""
        return tensor.narrow(0, self.start, self.count)


def _runs(shape: tuple[int, ...], item: int, most: int) -> Iterator[Rows]:
    """Rows of dim 0 that are sent together: at least one, at most ``most`` bytes. Nothing where there are none."""
    row = prod(shape[1:]) * item
    if not row:
        return
    count = max(1, most // row)
    for start in range(0, shape[0], count):
        yield Rows(start, min(count, shape[0] - start))


SEND: Handler[SendTensors, Target, tuple[str, ...]] = Handler(ready=send_ready, do=send_do, undo=send_undo)
