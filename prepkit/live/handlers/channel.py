"""The way that bytes take between ranks: several messages at a time, and straight from where they lie if they can."""

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

PIECE = 16 * 2**20
"""Bytes of the buffer, and at most of one message, but for single rows that are longer."""

ALIGNED = 16
"""Bytes: at every multiple of it any dtype may begin."""

WINDOW = 32 * 2**20
"""Bytes that may be on the way at a time: enough that rank 0 copies its own part while gloo's thread sends."""


@define(eq=False)
class InFlight:
    """Messages on their way. torch's works hold their tensors."""

    works: list[Any]
    size: int
    landed: Callable[[], None] | None
    """What to do once they have arrived; None also from when they are waited for."""


@define(eq=False)
class P2PChannel:
    """Messages of one process group, and the one buffer for those that cannot be sent from, or received, in place.

    Every rank starts its messages in one order that all share. On the host some are on the way while a rank goes on. On
    a device a rank only queues them, and each waits in the stream for the one before: what another rank needs first
    could otherwise stand behind a message that waits for that rank.
    """

    device: torch.device
    """Where messages lie while they are sent: one that the group's backend can communicate on."""
    group: Any = None
    """Of all ranks; None: the default one."""
    advance: Callable[[int], object] = int
    """Called with the bytes of what has arrived."""
    window: int = field(default=Factory(lambda self: WINDOW if self.on_host else 0, takes_self=True))
    """Bytes that may be on the way while a rank goes on."""
    piece: int = field(factory=lambda: PIECE)
    _flights: deque[InFlight] = field(factory=deque, init=False)
    _size: int = field(default=0, init=False)
    _batch: list[tuple[Tensor, int]] = field(factory=list, init=False)
    """What is to be sent together with what comes next."""
    _buffer: Tensor = field(factory=lambda: torch.empty(0, dtype=torch.uint8), init=False)
    _used: int = field(default=0, init=False)

    @property
    def on_host(self) -> bool:
        """Whether messages lie in the memory of the host, and a thread of gloo takes them away and brings them."""
        return self.device.type == "cpu"

    def open(self) -> None:
        """One byte to all: only after a collective of all ranks may NCCL send between some (``batch_isend_irecv``)."""
        if not self.on_host:
            self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))

    def straight(self, tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The bytes of ``tensor`` where they lie, if that is how they travel; None where they have to be copied."""
        plain = type(tensor) is Tensor and not tensor.is_conj() and not tensor.is_neg()
        if not plain or tensor.dtype != dtype or tensor.device != self.device or not tensor.is_contiguous():
            return None
        flat = tensor.view(-1)
        return flat.view(torch.uint8) if flat.stride(0) == 1 else None  # of a single element it may be anything

    def packed(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The bytes of ``tensor`` as they travel: in place, or copied."""
        raw = self.straight(tensor, dtype)
        if raw is None:
            raw = self.room(tensor.numel() * dtype.itemsize)
            raw.view(dtype).view(tensor.shape).copy_(tensor)
        return raw

    def room(self, count: int) -> Tensor:
        """So many bytes of the buffer, which nothing on the way uses; it is longer than a piece where it has to be."""
        if self._used + count > self._buffer.numel():
            self.flush()
            self.drain()
            self._used = 0
        if self._buffer.numel() < count:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the shorter one goes first
            self._buffer = torch.empty(max(count, self.piece), dtype=torch.uint8, device=self.device)
        given = self._buffer[self._used : self._used + count]
        self._used += -(-count // ALIGNED) * ALIGNED
        return given

    def send(self, raw: Tensor, to: int) -> None:
        """Bytes to one rank, with the next ``flush``, or when the buffer is full."""
        self._batch.append((raw, to))

    def flush(self) -> None:
        """Starts what was given to ``send``, as one batch."""
        batch, self._batch = self._batch, []
        self._start(dist.isend, batch)
        self._settle(self.window)

    def receive(self, raw: Tensor, source: int, landed: Callable[[], None]) -> None:
        """Bytes from one rank; ``landed`` is called when they are here, before anything that is received later is."""
        self._start(dist.irecv, [(raw, source)], landed)
        self._settle(self.window)

    def relay(self, raw: Tensor, to: Iterable[int]) -> None:
        """Starts sending what has landed on, from within ``landed``."""
        self._start(dist.isend, [(raw, one) for one in to])

    def broadcast(self, raw: Tensor, landed: Callable[[], None] | None = None) -> None:
        """Rank 0's bytes to every rank, by the backend.

        Not on the host: the thread of gloo that broadcasts would hold tensors when the group ends, and wait for the
        interpreter, which waits for the thread. And its broadcast is the tree in which parts are handed on here.
        """
        work = dist.broadcast(raw, src=ROOT, group=self.group, async_op=True)
        self._fly(InFlight([work], raw.numel(), landed))
        self._settle(self.window)

    def drain(self) -> None:
        """Returns when nothing is on the way."""
        self._settle(0)

    def close(self) -> Any:
        """Ends what is on the way; returns the group, which it no longer holds.

        What this rank has started the others have started too, or will before they wait for what it has not. A group
        that ends in the middle of a message would leave its sender waiting for good (gloo, torch 2.13).
        """
        self._batch.clear()
        while self._flights:
            with suppress(RuntimeError):  # of another rank that has failed; this one says why it has itself
                self._land()
        group, self.group = self.group, None
        return group

    def _start(self, how: Any, batch: list[tuple[Tensor, int]], landed: Callable[[], None] | None = None) -> None:
        if batch:
            ops = [dist.P2POp(how, raw, peer, self.group) for raw, peer in batch]
            self._fly(InFlight(dist.batch_isend_irecv(ops), sum(raw.numel() for raw, _ in batch), landed))

    def _fly(self, flight: InFlight) -> None:
        self._flights.append(flight)
        self._size += flight.size

    def _settle(self, most: int) -> None:
        """Waits for what started first, until no more than ``most`` bytes are on the way."""
        while self._size > most:
            self._land()

    def _land(self) -> None:
        """Waits for what started first; raises what torch does. No work is waited for twice: gloo would not return."""
        flight = self._flights[0]
        landed, flight.landed = flight.landed, None
        while flight.works:
            flight.works.pop(0).wait()
        self._flights.popleft()
        self._size -= flight.size
        self.advance(flight.size)
        if landed is not None:
            landed()
