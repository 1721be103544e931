"""Streams (``IterableDataset``) divided over ranks: every rank reads the whole stream, and keeps its part (DL-22).

The part is chosen where the stream is read, in the loader's workers, so that no other rank's batches are collated.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import torch
from attrs import frozen
from torch.utils.data import IterableDataset, get_worker_info

from prepkit.loading.draws import drawn, set_epoch, with_own_generators
from prepkit.loading.rounds import Share, Tail, length, rounds


class BatchRead(NamedTuple):
    """One batch as it comes out of a loader, with what is known of it. A tuple, so that torch pins what is in it."""

    batch: Any
    size: int | None = None
    """Number of samples; None: not known."""
    counted: int | None = None
    """How many of them, from the first, are no repeats; None: all."""
    consumed: int = 0
    """What all ranks have read in this pass once this batch is used: samples, or batches."""
    last: bool = False
    """True if it is the last of its pass."""
    began: int = 0
    """In the first batch of a stream that is divided, a digest of what all ranks began with; 0: not known."""


class StreamPart(IterableDataset[Share]):
    """One rank's part of a stream, in whole batches: the loader makes none (``batch_size=None``).

    The random numbers that the stream draws follow from seed, epoch and worker, so that all ranks see one stream.
    """

    def __init__(
        self, stream: Any, *, size: int | None, drop_last: bool, parts: int, part: int, tail: Tail, seed: int
    ) -> None:
        self.stream, self.size, self.drop_last = stream, size, drop_last
        self.parts, self.part, self.tail, self.seed = parts, part, tail, seed
        self.epoch = torch.zeros((), dtype=torch.int64)
        self.epoch.share_memory_()  # type: ignore[no-untyped-call]  # workers that stay up see it change

    def __iter__(self) -> Iterator[Share]:
        worker = get_worker_info()
        epoch = int(self.epoch)
        set_epoch(self.stream, epoch)
        seeds = self.seed, epoch, 0 if worker is None else worker.id
        batches = drawn(self._batches(with_own_generators(self.stream, *seeds)), *seeds)
        began = None
        for shares in rounds(batches, self.parts, self.tail, size=self.size):
            if began is None:
                began = _digest([share.items[0] for share in shares])
                yield shares[self.part]._replace(began=began)
            else:
                yield shares[self.part]

    def __len__(self) -> int:
        """Rounds of a whole pass that one process reads. Raises ``TypeError`` where the stream has no length."""
        count = len(self.stream)
        if self.size is None:
            return length(count, 0, self.parts, self.tail, size=None)
        return length(0, count - count % self.size * self.drop_last, self.parts, self.tail, size=self.size)

    def _batches(self, stream: Any) -> Iterator[list[Any]]:
        """Lists of samples; of a stream that yields whole batches each is a list of its own."""
        source = iter(stream)
        while batch := list(islice(source, self.size or 1)):
            if len(batch) < (self.size or 1) and self.drop_last:
                return
            yield batch


@frozen(eq=False, repr=False)
class CollateShare:
    """Collates the samples of a share as the given loader would, and passes on what is known of them."""

    collate: Callable[[Any], Any]
    single: bool
    """True if the stream yields whole batches."""

    def __call__(self, share: Share) -> BatchRead:
        """One batch."""
        if self.single:
            return BatchRead(self.collate(share.items[0]), None, None if share.counted else 0, began=share.began)
        return BatchRead(self.collate(share.items), len(share.items), share.counted, began=share.began)


def _digest(samples: list[Any]) -> int:
    """Of 24 bits, never 0 but where there is nothing in the samples that can be compared over processes."""
    told = list(filter(None, map(_told, samples)))
    return zlib.crc32(repr(told).encode()) & 0xFFFFFF or 1 if told else 0


def _told(value: Any, depth: int = 4) -> Any:
    """What is the same in every process that reads the same; None of what nobody can tell."""
    if isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if type(value) is torch.Tensor:
        plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
        return (tuple(value.shape), _sum(value.detach().reshape(-1).view(torch.uint8).numpy())) if plain else None
    if isinstance(value, Mapping) and depth:
        value = list(value.values())
    if isinstance(value, list | tuple) and depth:
        return list(filter(None, (_told(one, depth - 1) for one in value))) or None
    if getattr(getattr(value, "dtype", None), "hasobject", True):
        return None
    return _sum(value.tobytes())  # numpy's arrays


def _sum(data: Any) -> int:
    return zlib.crc32(data[:LOOKED_AT])


LOOKED_AT = 2**16
"""Bytes of each tensor that tell streams apart."""
