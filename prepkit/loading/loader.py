"""What a training loop iterates over: batches on the device, epochs that advance by themselves, a position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from attrs import define, field
from attrs import fields as attributes
from torch.utils import _pytree as pytree  # public under this name before torch 2.9 has another
from torch.utils.data import DataLoader

from prepkit.loading.batch_sampler import RankBatches
from prepkit.loading.draws import Drawing
from prepkit.loading.joint_sources import BatchSource
from prepkit.loading.sources import IndexedSource, StreamSource
from prepkit.loading.streams import BatchRead


@define(kw_only=True, eq=False, repr=False)
class Loader:
    """A loader as it was prepared. Attributes that it does not have are those of the loader that it reads.

    Each pass has a number, ``epoch``, which gives the order: the next pass shuffles anew, whether or not this one went
    to its end. ``state_dict`` says where the pass stands; after ``load_state_dict`` the next loop goes on from there.
    """

    source: BatchSource
    device: torch.device | None = None
    """Where batches arrive; None: they stay where they are."""
    part: int = 0
    """Which part of the data this rank reads."""
    evaluation: bool = False
    """True if samples are counted, not trained on."""
    ends_window: bool = False
    """True if the last batch of a pass ends the accumulation window."""
    epoch: int = 0
    """Number of the pass under way, or of the next one."""
    present: BatchRead | None = field(default=None, init=False)
    """What is known of the batch in use, without the batch; None outside a pass."""
    watchers: list[Callable[[Loader], None]] = field(factory=list, init=False)
    """Called when ``present`` has changed."""
    before_batch: Callable[[], None] | None = field(default=None, init=False)
    """Called before a batch is read of training data, while it can still be left to another run."""
    _consumed: int = field(default=0, init=False)
    _begun: bool = field(default=False, init=False)
    """True if the pass ``epoch`` has been begun in this process, so that the next one is another."""

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self.epoch, self._consumed = self.epoch + 1, 0
        self._begun = True
        pinned = bool(getattr(self.source.loader, "pin_memory", False))
        try:
            move = None if self.device is None else mover(self.device, non_blocking=pinned)
            reads = self.source.reads(self.epoch, self._consumed)
            while True:
                if self.before_batch is not None and not (self.present and self.present.last):  # the pass ends first
                    self.before_batch()
                if (read := next(reads, None)) is None:
                    break
                batch, size, counted, self._consumed, last, _ = read
                self._tell(BatchRead(None, size, counted, self._consumed, last))
                yield batch if move is None else move(batch)
            self.epoch, self._consumed, self._begun = self.epoch + 1, 0, False
        finally:
            self._tell(None)

    def __len__(self) -> int:
        """Batches of a whole pass on this rank. Raises ``TypeError`` where nobody knows, as of most streams."""
        return self.source.length()

    def __getstate__(self) -> dict[str, Any]:
        """Return what it reads, and where it stands. A copy is in no pass, and no run hears of its batches."""
        run = ("present", "watchers", "before_batch")
        return {one.name: getattr(self, one.name) for one in attributes(type(self)) if one.name not in run}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in (state | {"present": None, "watchers": [], "before_batch": None}).items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in ("source", "__setstate__"):  # before there is one, as while it is copied
            raise AttributeError(name)
        return getattr(self.source.loader, name)

    @property
    def exhausted(self) -> bool:
        """True if its last pass went to its end, and none has been begun since."""
        return self.present is None and not self._begun

    @property
    def repeats(self) -> bool:
        """Whether the pass under way would go on in its order after a resume."""
        return self._order is None or self._order.repeats

    @property
    def at_window_end(self) -> bool:
        """True if the batch in use is the last of its pass, and ends the accumulation window."""
        return self.ends_window and self.present is not None and self.present.last

    @property
    def rank_batches(self) -> RankBatches | None:
        """What divides its batches over the ranks by index; None for what is divided otherwise, or not at all."""
        return self.source.batches if isinstance(self.source, IndexedSource) else None

    @property
    def divides_stream(self) -> bool:
        """True if it divides a stream over the ranks."""
        return isinstance(self.source, StreamSource) and self.source.divided is not None

    @property
    def stream_began(self) -> int:
        """A digest of what its stream gave first, before it was divided; 0: there is none, or nobody can tell."""
        return self.source.began if isinstance(self.source, StreamSource) else 0

    @property
    def batches_read(self) -> int:
        """Batches of this rank that the next loop leaves out, as after ``load_state_dict``; 0 for a stream."""
        batches = getattr(self.source, "batches", None)
        if self._begun or batches is None:
            return 0
        return int(self._consumed // (batches.parts * (batches.size or 1)))

    @property
    def total_batch_size(self) -> int:
        """Samples that all ranks read together in one whole batch of each; 0 where nobody knows, as of a stream."""
        batches = getattr(self.source, "batches", None)
        if batches is None:
            return 0
        return int(batches.parts * (batches.size or getattr(batches.order, "batch_size", None) or 0))

    @property
    def order_length(self) -> int:
        """Samples of a whole pass on all ranks together, or batches where they stay whole; 0 where nobody knows."""
        try:
            return len(getattr(self._order, "order", ()))
        except TypeError:  # a sampler, or a list, without a length
            return 0

    @property
    def open_epoch(self) -> int:
        """Number of the first pass that has batches left: after the last batch of one, that of the next."""
        return self.epoch + (self.present is not None and self.present.last)

    def set_epoch(self, epoch: int) -> None:
        """The next pass has this number, from its start; without effect where that is so already, as after resuming."""
        if self._begun or epoch != self.epoch:
            self.epoch, self._consumed, self._begun = epoch, 0, False

    def skip(self, batches: int) -> Loader:
        """The loader itself, whose next pass begins after so many batches of this rank; those after it are whole.

        Raises ``ValueError`` for what is no number of batches. ``len`` stays that of a whole pass.
        """
        if not isinstance(batches, int) or isinstance(batches, bool) or batches < 0:
            raise ValueError(f"loader.skip({batches!r}): give the number of batches to leave out, 0 or more")
        state = {"epoch": self.epoch + self._begun, "consumed": self.source.consumed(batches), "loader": None}
        resumed = None if self._order is None else self._order.resumed
        self.load_state_dict(state)
        if self._order is not None and state["consumed"]:
            self._order.resumed = resumed
        return self

    def rest(self) -> None:
        """Let workers go that stay up between passes; another pass would start its own.

        Left to the collector of cycles they would be waited for, five seconds each: it closes the queue of their orders
        before the order to end is put into it (torch ``_MultiProcessingDataLoaderIter._shutdown_workers``).
        """
        if isinstance(self.source.loader, DataLoader):
            self.source.loader._iterator = None

    def state_dict(self) -> dict[str, Any]:
        """Return where the pass stands after the batch in use, for ``load_state_dict`` on any number of ranks.

        ``loader`` is the loader's own state, of this rank, where it has one (torchdata's ``StatefulDataLoader``), or
        what a batch was drawn from that is read already; ``drawing`` what the order was drawn from, if by no seed.
        """
        if self.open_epoch > self.epoch:
            return {"epoch": self.open_epoch, "consumed": 0, "loader": None}
        state = {"epoch": self.epoch, "consumed": self._consumed, "loader": self.source.state()}
        if self._consumed and self._order is not None and getattr(self._order, "seed", None) is None:
            drawing = self._order.resumed or self._order.drawing
            state["drawing"] = None if drawing is None else {"common": drawing.common, "own": drawing.own}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next loop goes on after the batch that was in use; ``len`` stays that of a whole pass.

        Of data with indices none are read twice: what was read is skipped by index. A stream is read up to there again,
        unless its loader has a state of its own.
        """
        self.epoch, self._consumed, self._begun = state["epoch"], state["consumed"], False
        self.source.restore(state["loader"])
        if self._order is not None:
            drawing = state.get("drawing")
            self._order.resumed = None if drawing is None else Drawing(**drawing)

    @property
    def _order(self) -> RankBatches | StreamSource | None:
        """What draws the order here, or on rank 0 for all; None for what reads no loader of this process."""
        source = getattr(self.source, "stream", None) or getattr(self.source, "inner", self.source)
        found = getattr(source, "batches", source)
        return found if isinstance(found, RankBatches | StreamSource) else None

    def _tell(self, read: BatchRead | None) -> None:
        self.present = read
        for watcher in self.watchers:
            watcher(self)


def mover(device: torch.device, *, non_blocking: bool) -> Callable[[Any], Any]:
    """A function that gives a batch with all in it that can be moved on the device; the given one is untouched.

    Goes into dicts, lists, tuples, named tuples, other mappings and data classes. What has a ``to`` of its own, such as
    the ``BatchEncoding`` of transformers or a ``PackedSequence``, moves itself. Everything else stays what it is.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=non_blocking)
        if callable(getattr(leaf, "to", None)):
            try:
                return leaf.to(device, non_blocking=non_blocking)
            except TypeError:  # its ``to`` knows no such option
                return leaf.to(device)
        if isinstance(leaf, Mapping):
            return type(leaf)({key: inner(value) for key, value in leaf.items()})  # type: ignore[call-arg]
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return replace(leaf, **{one.name: inner(getattr(leaf, one.name)) for one in fields(leaf) if one.init})
        return leaf

    def inner(part: Any) -> Any:
        kind = type(part)
        if kind is tuple or kind is list:  # most batches: pytree takes longer than the move itself
            return kind([inner(item) for item in part])
        if kind is dict:
            return {key: inner(value) for key, value in part.items()}
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=non_blocking)
        return pytree.tree_map(move, part, is_leaf=_moves_itself)

    return inner


def _moves_itself(part: Any) -> bool:
    """A ``PackedSequence`` is a named tuple, and would be taken apart."""
    return not isinstance(part, torch.Tensor) and callable(getattr(part, "to", None))
