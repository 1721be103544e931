"""A live data loader as facts. Nothing is drawn from it."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Literal

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from prepkit.facts import LoaderFacts

Kind = Literal["sequential", "random", "distributed", "custom"]


def loader_facts(loader: object) -> LoaderFacts:
    """Facts of a torch ``DataLoader``. Of any other iterable nothing is known but that its batches are its own."""
    name, stateful = type(loader).__name__, hasattr(loader, "state_dict")
    if not isinstance(loader, DataLoader):
        return LoaderFacts(
            batch_size=None,
            length=None,
            sampler="custom",
            custom_batches=True,
            name=name,
            foreign=True,
            stateful=stateful,
        )
    iterable = isinstance(loader.dataset, IterableDataset)
    batches: Any = loader.batch_sampler
    size, drop_last, indices = loader.batch_size, bool(loader.drop_last), loader.sampler
    if batches is not None and is_plain(batches, BatchSampler):  # whoever has made it: the user, or the loader itself
        size, drop_last, indices = batches.batch_size, batches.drop_last, batches.sampler
    sampler = "sequential" if iterable else _sampler(indices)
    custom = not iterable and batches is not None and size is None
    return LoaderFacts(
        batch_size=size,
        length=_length(indices if sampler == "custom" and not custom else loader.dataset),
        sampler=sampler,
        iterable=iterable,
        custom_batches=custom,
        drop_last=drop_last,
        batches=_length(batches) if custom else None,
        name=name,
        own_iteration=not stateful and type(loader).__iter__ is not DataLoader.__iter__,
        shards=_shards(loader.dataset) if iterable else None,
        divided=iterable and getattr(loader.dataset, "_distributed", None) is not None,
        stateful=stateful,
        pin_memory=bool(loader.pin_memory),
        workers=loader.num_workers,
        in_order=bool(getattr(loader, "in_order", True)),
    )


def is_plain(sampler: object, kind: type) -> bool:
    """True if a sampler draws as this class does: a subclass of the user's own may not, torchdata's do."""
    own = type(sampler)
    return own is kind or (own.__module__.startswith("torchdata.") and isinstance(sampler, kind))


def _sampler(sampler: Any) -> Kind:
    """Drawing with replacement, or a part, is no plain shuffle."""
    if isinstance(sampler, DistributedSampler):
        return "distributed"
    if is_plain(sampler, SequentialSampler):
        return "sequential"
    if is_plain(sampler, RandomSampler):
        draws: Any = sampler
        return "random" if not draws.replacement and draws._num_samples is None else "custom"
    return "custom"


def _shards(dataset: Any) -> int | None:
    """Shards of a stream that can be asked for some of them, as those of ``datasets``."""
    shards = getattr(dataset, "num_shards", None)
    return shards if isinstance(shards, int) and callable(getattr(dataset, "shard", None)) else None


def _length(sized: object) -> int | None:
    """Number of items; None where there is no ``__len__`` or it raises."""
    try:
        return len(sized) if isinstance(sized, Sized) else None
    except Exception:  # user code answers here; torch's own datasets raise TypeError and NotImplementedError
        return None
