"""Messages between ranks that are no processes: they run one after the other, and what is sent waits for them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from attrs import define, field, frozen
from torch import Tensor


@define
class InMemoryNetwork:
    """Stands in for ``torch.distributed`` where ranks run one after the other. Works do nothing until they are waited
    for: what is sent is read as late, and what is received is written as late, as torch may."""

    rank: int = 0
    messages: dict[tuple[int, int], deque[Tensor]] = field(factory=lambda: defaultdict(deque))
    """Sender and receiver to what is on the way; a broadcast has no receiver, and is read by all."""
    sizes: dict[int, list[int]] = field(factory=lambda: defaultdict(list))
    """Rank to the bytes of each message that it has sent, or received of a broadcast."""
    broadcasts_read: dict[int, int] = field(factory=lambda: defaultdict(int))
    """Rank to how many broadcasts it has received."""
    waiting: int = 0
    """Bytes that rank 0 has started to send and not waited for."""
    isend, irecv = "send", "receive"

    def P2POp(self, how: str, raw: Tensor, peer: int, group: object) -> tuple[str, Tensor, int]:  # noqa: N802
        assert peer != self.rank, group
        return how, raw, peer

    def batch_isend_irecv(self, ops: list[tuple[str, Tensor, int]]) -> list[Work]:
        return [
            self.start_send(raw, peer) if how == "send" else self.start_receive(raw, peer) for how, raw, peer in ops
        ]

    def broadcast(self, raw: Tensor, src: int, group: object, *, async_op: bool) -> Work:
        assert (src, async_op) == (0, True), group
        return self.start_send(raw, -1) if self.rank == 0 else self.start_receive(raw, -1)

    def start_send(self, raw: Tensor, peer: int) -> Work:
        self.sizes[self.rank].append(raw.numel())
        self.waiting += raw.numel()
        rank = self.rank

        def read() -> None:
            self.messages[rank, peer].append(raw.clone())
            self.waiting -= raw.numel()

        return Work(read)

    def start_receive(self, raw: Tensor, peer: int) -> Work:
        raw.fill_(7)  # what was there is lost from the start
        rank = self.rank

        def write() -> None:
            messages = self.messages[max(peer, 0), -1 if peer < 0 else rank]
            raw.copy_(messages[self.broadcasts_read[rank]] if peer < 0 else messages.popleft())
            self.broadcasts_read[rank] += peer < 0

        return Work(write)


@frozen(eq=False)
class Work:
    """What has been started, and is done when it is waited for."""

    wait: Callable[[], None]
