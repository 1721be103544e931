"""Bytes between ranks: several messages in flight at a time, sent from where they lie if they can be.

One ``P2PChannel`` per rank serves one ``SendTensors`` step. ``send_weights`` says what travels in which order; here is
how messages are started and waited for, and which memory they use:

- *Memory*: one buffer of ``MESSAGE_BYTES``, made when a message cannot be sent from, or received into, the tensor
  itself (another dtype or device, not contiguous). Whoever reserves more of it than is free first waits for all
  messages in flight, so nothing that still travels is written over.
- *Waiting*: messages are waited for in the order in which they were started, and only when more than ``window`` bytes
  are in flight. On the host a thread of gloo moves the bytes meanwhile.
- *No deadlock*: see ``P2PChannel``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from attrs import Factory, define, field
from torch import Tensor

from prepkit.plan.broadcast import ROOT

MESSAGE_BYTES = 16 * 2**20
"""Bytes of the buffer, and at most of one message, but for single rows that are longer."""

ALIGNED = 16
"""Bytes: at every multiple of it any dtype may begin."""

WINDOW = 32 * 2**20
"""Bytes that may be in flight at a time: enough that rank 0 copies its own shard while gloo's thread sends."""


@define(eq=False)
class InFlight:
    """Messages that were started together and not waited for. torch's works keep their tensors alive."""

    works: list[Any]
    """As torch returned them; each is taken out before it is waited for, so that none is waited for twice."""
    size: int
    """Bytes of all of them."""
    on_arrival: Callable[[], None] | None
    """What to do once they have arrived; None also from when they are waited for."""


@define(eq=False)
class P2PChannel:
    """Messages of one process group, and the one buffer for those that cannot be sent from, or received, in place.

    All ranks go through the same tensors in the same order, and through the messages of a tensor in the same order, and
    messages between two ranks arrive in the order in which they were sent. A rank receives only from a lower one
    (``plan.broadcast``). So the oldest message that anybody still waits for is one whose sender waits for nothing
    older: it has started it, or will. That is why no circle of waiting ranks can form.

    On the host a rank goes on while up to ``window`` bytes are in flight. On a device ``window`` is 0: a rank only
    queues its messages, and in the device's stream each waits for the one before. If several were in flight, one that
    another rank needs first could stand in the stream behind a message that waits for that very rank.
    """

    device: torch.device
    """Where messages lie while they are sent: one that the group's backend can communicate on."""
    group: Any = None
    """Of all ranks; None: the default one."""
    advance: Callable[[int], object] = int
    """Called with the bytes of what has arrived."""
    window: int = field(default=Factory(lambda self: WINDOW if self.on_host else 0, takes_self=True))
    """Bytes that may be in flight while a rank goes on."""
    message_bytes: int = field(factory=lambda: MESSAGE_BYTES)
    _in_flight: deque[InFlight] = field(factory=deque, init=False)
    _size: int = field(default=0, init=False)
    """Bytes of all that is in flight."""
    _batch: list[tuple[Tensor, int]] = field(factory=list, init=False)
    """Messages that the next ``flush`` starts together, each with its receiver."""
    _buffer: Tensor = field(factory=lambda: torch.empty(0, dtype=torch.uint8), init=False)
    _used: int = field(default=0, init=False)
    """Bytes from the start of the buffer that are reserved."""

    @property
    def on_host(self) -> bool:
        """True if messages lie in the memory of the host, and a thread of gloo sends and receives them."""
        return self.device.type == "cpu"

    def open(self) -> None:
        """One byte to all: only after a collective of all ranks may NCCL send between some (``batch_isend_irecv``)."""
        if not self.on_host:
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))

    def bytes_in_place(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The bytes of ``tensor`` where they lie, if that is how they travel; None where they have to be copied."""
        plain = type(tensor) is Tensor and not tensor.is_conj() and not tensor.is_neg()
        if not plain or tensor.dtype != dtype or tensor.device != self.device or not tensor.is_contiguous():
            return None
        flat = tensor.view(-1)
        return flat.view(torch.uint8) if flat.stride(0) == 1 else None  # of a single element it may be anything

    def bytes_of(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The bytes of ``tensor`` as they travel: in place, or copied into the buffer."""
        raw = self.bytes_in_place(tensor, dtype)
        if raw is None:
            raw = self.reserve(tensor.numel() * dtype.itemsize)
            raw.view(dtype).view(tensor.shape).copy_(tensor)
        return raw

    def reserve(self, count: int) -> Tensor:
        """So many bytes of the buffer, which nothing in flight uses.

        Waits for all that is in flight where less is free. A single row that is longer makes the buffer longer.
        """
        if self._used + count > self._buffer.numel():
            self.flush()
            self.drain()
            self._used = 0
        if self._buffer.numel() < count:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the shorter one goes first
            self._buffer = torch.empty(max(count, self.message_bytes), dtype=torch.uint8, device=self.device)
        reserved = self._buffer[self._used : self._used + count]
        self._used += -(-count // ALIGNED) * ALIGNED
        return reserved

    def send(self, raw: Tensor, to: int) -> None:
        """Bytes to one rank, with the next ``flush``, or when the buffer is full."""
        self._batch.append((raw, to))

    def flush(self) -> None:
        """Starts what was given to ``send``, as one batch."""
        batch, self._batch = self._batch, []
        self._start(dist.isend, batch)
        self._wait_down_to(self.window)

    def receive(self, raw: Tensor, source: int, on_arrival: Callable[[], None]) -> None:
        """Bytes from one rank; ``on_arrival`` is called when they are here, before that of anything received later."""
        self._start(dist.irecv, [(raw, source)], on_arrival)
        self._wait_down_to(self.window)

    def relay(self, raw: Tensor, to: Iterable[int]) -> None:
        """Starts sending on what has arrived; called from within ``on_arrival``."""
        self._start(dist.isend, [(raw, receiver) for receiver in to])

    def broadcast(self, raw: Tensor, on_arrival: Callable[[], None] | None = None) -> None:
        """Rank 0's bytes to every rank, by the backend.

        Not on the host: the thread of gloo that broadcasts would hold tensors when the group ends, and wait for the
        interpreter, which waits for the thread. And its broadcast is the tree in which shards are handed on here.
        """
        work = dist.broadcast(raw, src=ROOT, group=self.group, async_op=True)
        self._track(InFlight([work], raw.numel(), on_arrival))
        self._wait_down_to(self.window)

    def drain(self) -> None:
        """Returns when nothing is in flight."""
        self._wait_down_to(0)

    def close(self) -> Any:
        """Waits for what is in flight, whatever became of it; returns the group, which it no longer holds.

        What this rank has started the others have started too, or will before they wait for what it has not. A group
        that ends in the middle of a message would leave its sender waiting for good (gloo, torch 2.13).
        """
        self._batch.clear()
        while self._in_flight:
            with suppress(RuntimeError):  # of another rank that has failed; this one says why it has itself
                self._wait_for_oldest()
        group, self.group = self.group, None
        return group

    def _start(self, verb: Any, batch: list[tuple[Tensor, int]], on_arrival: Callable[[], None] | None = None) -> None:
        if batch:
            ops = [dist.P2POp(verb, raw, peer, self.group) for raw, peer in batch]
            self._track(InFlight(dist.batch_isend_irecv(ops), sum(raw.numel() for raw, _ in batch), on_arrival))

    def _track(self, messages: InFlight) -> None:
        self._in_flight.append(messages)
        self._size += messages.size

    def _wait_down_to(self, size: int) -> None:
        """Waits for what was started first, until no more than ``size`` bytes are in flight."""
        while self._size > size:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        """Raises what torch does. No work is waited for twice, even after an error: gloo would not return."""
        oldest = self._in_flight[0]
        on_arrival, oldest.on_arrival = oldest.on_arrival, None
        while oldest.works:
            oldest.works.pop(0).wait()
        self._in_flight.popleft()
        self._size -= oldest.size
        self.advance(oldest.size)
        if on_arrival is not None:
            on_arrival()
