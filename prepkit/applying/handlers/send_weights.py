"""Rank 0's stashed values reach the shards of every rank.

When this runs, every rank has storage for its own shards, and rank 0 has the values of the whole model on the host
(``stash``). Tensor by tensor, in planned order:

1. *Rank 0* takes the stashed tensor, slices out the shard of every rank that it sends to (``plan.broadcast`` says to
   whom, and explains the tree), starts the messages, copies its own shard into place while they are in flight, and lets
   go of the stashed tensor.
2. *Another rank* starts receiving its shard, straight into place where dtype, device and layout allow, else into a
   buffer from which it copies. What it is to hand on it sends as soon as it has arrived.
3. On a device, a tensor that goes whole is not handed on from rank to rank: the backend broadcasts it (NCCL).

*Who waits for whom*: a rank waits for the rank that it receives from, always a lower one, and only once too many bytes
are in flight, or at the end. All ranks take tensors and messages in the same order; ``channel`` says why no circle of
waiting ranks can form from that. Before the first and after the last tensor all ranks wait for each other, and there a
failure anywhere is heard; a rank that fails in between closes the channel's own group, so that its peers fail too.

*Memory*: rank 0 holds what is not sent yet, on the host, and its own shards. Every rank holds a buffer of
``MESSAGE_BYTES`` at most, and only if something cannot travel in place. No rank but 0 ever holds a whole sharded
tensor: a tensor travels as runs of rows of dim 0, each at most as long as that buffer.
"""

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

from prepkit.applying.handlers import problems
from prepkit.applying.handlers.named_tensors import named_parts, named_tensors
from prepkit.applying.handlers.stash import require_values
from prepkit.court import refused
from prepkit.interpreter import Handler
from prepkit.objects.target import Target
from prepkit.plan.broadcast import ROOT, bytes_sent, kept_slices, sends, sent_whole, source_rank
from prepkit.plan.byte_ranges import Slice
from prepkit.plan.layout import itemsize
from prepkit.ranks.channel import P2PChannel
from prepkit.ranks.progress import progress
from prepkit.ranks.world import new_group, world
from prepkit.steps import Axis, SendTensors, Transfer


def send_ready(step: SendTensors, target: Target) -> problems.Problems:
    """Every name must be a parameter or buffer of the planned shape."""
    tensors = named_tensors(target)
    known = [transfer for transfer in step.tensors if transfer.name in tensors]
    odd = (t.name for t in known if (tensors[t.name].numel(),) != t.shape != tuple(tensors[t.name].shape))
    return (
        *problems.absent("tensor", (transfer.name for transfer in step.tensors), tensors),
        *problems.told("plan.other-model", odd, "not of the planned shape"),
    )


def send_do(step: SendTensors, target: Target) -> tuple[str, ...]:
    """Sends tensor by tensor, in planned order, after all ranks have come; then waits for them again.

    Rank 0 frees what it had stashed once it is sent. Returns the names of what had values on this rank and has rank
    0's now. Raises ``RunRefused`` where rank 0 has no values, and where this rank holds another shard than planned.
    """
    tensors, rank = named_tensors(target), world().rank
    if rank == ROOT:
        require_values([t.name for t in step.tensors if t.name not in target.stashed and _lacks(t, tensors, target)])
    parts = named_parts(target)
    target.together()
    lost = () if rank == ROOT else tuple(t.name for t in step.tensors if t.name not in target.unfilled)
    with problems.half_done(lost), torch.no_grad(), _own_channel(parts, target) as channel:
        _send_all(step, parts, target, channel)
        target.together()
        target.unfilled -= {transfer.name for transfer in step.tensors}
        return lost


def send_undo(step: SendTensors, target: Target, memo: tuple[str, ...]) -> str | None:
    """Return what had no values before has none again: its storage goes with ``AllocateTensors``."""
    if world().rank != ROOT:
        target.unfilled |= {transfer.name for transfer in step.tensors} - set(memo)
    return problems.overwritten(memo)


def _lacks(transfer: Transfer, tensors: dict[str, Tensor], target: Target) -> bool:
    """True if the model itself has no whole values either."""
    return transfer.name in target.unfilled or isinstance(tensors.get(transfer.name), DTensor)


@contextmanager
def _own_channel(parts: dict[str, Tensor], target: Target) -> Iterator[P2PChannel]:
    """A channel in a process group of all ranks for these messages alone, which nothing else holds.

    A rank that fails closes its connections by letting go of the group, so that no other waits for what never comes; of
    the default group it could not, as the sharded model holds that.
    """
    first = next((part.device for part in parts.values()), torch.device("cpu"))
    channel = P2PChannel(device=world().wire(first), group=new_group())
    try:
        yield channel
    except BaseException:
        channel.close()
        raise
    group = channel.close()
    target.ended.append(group)  # a thread of gloo may have its last work in its hands still
    dist.destroy_process_group(group)


def _send_all(step: SendTensors, parts: dict[str, Tensor], target: Target, channel: P2PChannel) -> None:
    """The side of this rank in every transfer. A stashed tensor is let go of as soon as its messages are started."""
    sending = world().rank == ROOT
    axes = step.axes or (Axis(name="all", size=world().size),)
    total = sum(_wire_bytes(transfer, axes, channel) for transfer in step.tensors)
    with progress("sending weights", total) as channel.advance:
        channel.open()
        for transfer in step.tensors:
            stashed, part = target.stashed.get(transfer.name), parts[transfer.name]
            values = (stashed.held.detach() if stashed else part).reshape(transfer.shape) if sending else None
            # What rank 0 has in its place already is sent from there, and not written over.
            shard = part if stashed or not sending else None
            send(transfer, axes, values, shard, channel)
            target.stashed.pop(transfer.name, None)
            del stashed, values  # or it would live until the next one is sent
        channel.drain()


def _wire_bytes(transfer: Transfer, axes: tuple[Axis, ...], channel: P2PChannel) -> int:
    """Return what leaves rank 0; what the backend broadcasts counts once."""
    if _broadcast_by_backend(transfer, axes, channel):
        return prod(transfer.shape) * itemsize(transfer.dtype)
    return bytes_sent(transfer, axes)


def _broadcast_by_backend(transfer: Transfer, axes: tuple[Axis, ...], channel: P2PChannel) -> bool:
    return sent_whole(transfer, axes) and not channel.on_host


def send(
    transfer: Transfer, axes: tuple[Axis, ...], values: Tensor | None, shard: Tensor | None, channel: P2PChannel
) -> None:
    """The side of this rank in one transfer: starts its messages, and fills its shard; waits for as few as it can.

    ``values`` is the whole tensor on rank 0, and None on the others. ``shard`` is where this rank's shard goes; None on
    rank 0 where that has its values already. Every dtype travels as plain bytes, as no backend knows them all.
    Afterwards messages may still be in flight, and a shard still empty, until ``channel.drain``. Raises
    ``RunRefused`` where ``shard`` has another shape than the plan's.
    """
    kept = kept_slices(transfer, axes, world().rank)
    if not transfer.shape:  # a scalar travels as a tensor of one element
        values, shard = (None if tensor is None else tensor.view(1) for tensor in (values, shard))
    if shard is not None and tuple(shard.shape) != (planned := tuple(part.size for part in kept)):
        raise refused(
            "plan.other-model", transfer.name, f"this rank holds {list(shard.shape)}, planned {list(planned)}"
        )
    if values is not None:
        _send_from_root(transfer, axes, values, channel)
        if shard is not None:
            shard.copy_(_view(values, kept))  # while the others' shards are in flight
    elif shard is not None:
        _receive(transfer, axes, shard, channel)


def _send_from_root(transfer: Transfer, axes: tuple[Axis, ...], values: Tensor, channel: P2PChannel) -> None:
    """Rank 0: to each of its receivers the slices that this one is to have, or everything to all at once."""
    dtype: torch.dtype = getattr(torch, transfer.dtype)
    if _broadcast_by_backend(transfer, axes, channel):
        for rows in _runs(tuple(values.shape), dtype.itemsize, channel.message_bytes):
            channel.broadcast(channel.bytes_of(rows.of(values), dtype))
        return
    for message in sends(transfer, axes, ROOT):
        part = _view(values, message.slices)
        for rows in _runs(tuple(part.shape), dtype.itemsize, channel.message_bytes):
            channel.send(channel.bytes_of(rows.of(part), dtype), message.to)
    channel.flush()


def _receive(transfer: Transfer, axes: tuple[Axis, ...], shard: Tensor, channel: P2PChannel) -> None:
    """Another rank: takes its shard, or everything, from the rank before it in the tree, and hands on what it got.

    Both sides divide what travels into the same runs of rows, so the messages match one by one.
    """
    dtype: torch.dtype = getattr(torch, transfer.dtype)
    source = source_rank(transfer, axes, world().rank)
    by_backend = _broadcast_by_backend(transfer, axes, channel)
    receivers = [] if by_backend else [message.to for message in sends(transfer, axes, world().rank)]
    arriving = tuple(shard.shape)  # the shape of what arrives
    kept = tuple(Slice(start=0, size=size) for size in arriving)  # and what of that is this rank's shard
    if sent_whole(transfer, axes):
        arriving, kept = transfer.shape or (1,), kept_slices(transfer, axes, world().rank)
    for rows in _runs(arriving, dtype.itemsize, channel.message_bytes):
        raw = channel.bytes_in_place(rows.of(shard), dtype) if arriving == tuple(shard.shape) else None
        copy_out = None
        if raw is None:
            shape = (rows.count, *arriving[1:])
            raw = channel.reserve(prod(shape) * dtype.itemsize)
            copy_out = partial(_copy_kept, raw.view(dtype).view(shape), rows, kept, shard)
        on_arrival = partial(_arrived, raw, receivers, channel, copy_out)
        if by_backend:
            channel.broadcast(raw, on_arrival)
        else:
            channel.receive(raw, source, on_arrival)


def _arrived(raw: Tensor, receivers: list[int], channel: P2PChannel, copy_out: Callable[[], None] | None) -> None:
    """Hands on what has arrived, and copies it to where it belongs if it is not there."""
    channel.relay(raw, receivers)
    if copy_out is not None:
        copy_out()


def _copy_kept(arrived: Tensor, rows: Rows, kept: tuple[Slice, ...], shard: Tensor) -> None:
    """Copies what of the arrived rows belongs to the shard into it; casts, and moves to the device."""
    first, last = max(rows.start, kept[0].start), min(rows.start + rows.count, kept[0].start + kept[0].size)
    if first >= last:
        return
    values = _view(arrived, (Slice(start=first - rows.start, size=last - first), *kept[1:]))
    shard.narrow(0, first - kept[0].start, last - first).copy_(values)


def _view(tensor: Tensor, slices: tuple[Slice, ...]) -> Tensor:
    """A view of these slices."""
    for dim, part in enumerate(slices):
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


def _runs(shape: tuple[int, ...], item: int, longest: int) -> Iterator[Rows]:
    """The rows of each message: at least one, at most ``longest`` bytes. Nothing of an empty tensor."""
    row_bytes = prod(shape[1:]) * item
    if not row_bytes:
        return
    count = max(1, longest // row_bytes)
    for start in range(0, shape[0], count):
        yield Rows(start, min(count, shape[0] - start))


SEND: Handler[SendTensors, Target, tuple[str, ...]] = Handler(ready=send_ready, do=send_do, undo=send_undo)
