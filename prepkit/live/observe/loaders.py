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
    if not isinstance(loader, DataLoader):
        return LoaderFacts(batch_size=None, length=None, sampler="custom", custom_batches=True)
    iterable = isinstance(loader.dataset, IterableDataset)
    return LoaderFacts(
        batch_size=loader.batch_size,
        length=_length(loader.dataset),
        sampler="sequential" if iterable else _sampler(loader.sampler),
        iterable=iterable,
        custom_batches=loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler,
        drop_last=bool(loader.drop_last),
    )


def _sampler(sampler: Any) -> Kind:
    """Exact classes: a subclass draws in a way of its own. Drawing with replacement, or a part, is no plain shuffle."""
    if isinstance(sampler, DistributedSampler):
        return "distributed"
    if type(sampler) is SequentialSampler:
        return "sequential"
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return "random"
    return "custom"


def _length(dataset: object) -> int | None:
    """Number of samples; None where there is no ``__len__`` or it raises."""
    try:
        return len(dataset) if isinstance(dataset, Sized) else None
    except Exception:  # user code answers here; torch's own datasets raise TypeError and NotImplementedError
        return None
