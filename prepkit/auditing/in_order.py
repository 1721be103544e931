"""Whether samples lie class by class in a data set that a loader reads in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from prepkit.objects.alive import alive

MOST = 1 << 20
"""Samples of a data set whose classes are read."""
OF_EACH = 8
"""Samples that classes have at least, on average; else they are numbers of samples, or of what these are parts of."""


def read_in_order() -> Iterator[Any]:
    """Yield the data sets that are read now, and in order."""
    for one in alive(_BaseDataLoaderIter):
        sampler = getattr(one._index_sampler, "sampler", None)
        if isinstance(sampler, SequentialSampler):
            yield sampler.data_source


def is_sorted(dataset: Any) -> bool:
    """Return whether some numbers that it holds, one for each sample, lie together where they are the same."""
    held = dataset.tensors if isinstance(dataset, TensorDataset) else [*getattr(dataset, "__dict__", {}).values()]
    try:
        count = len(dataset)
    except TypeError:
        return False
    readable = held if 0 < count <= MOST else []
    return any(_lies_together(classes, count // OF_EACH) for each in readable for classes in _classes(each, count))


def _classes(held: Any, count: int) -> Iterator[Sequence[int]]:
    """Yield what may be the classes of samples: numbers, or those of pairs of which each sample is one."""
    if isinstance(held, Tensor) and held.dim() == 1 and len(held) == count and not held.is_floating_point():
        yield torch.unique_consecutive(held.detach()).tolist()
    elif isinstance(held, list | tuple) and len(held) == count:
        first = held[0]
        if type(first) is int:
            yield [one for one in held if isinstance(one, int)]
        elif isinstance(first, tuple):
            for at in (at for at, one in enumerate(first) if type(one) is int):
                yield [one[at] for one in held if isinstance(one, tuple) and len(one) == len(first)]


def _lies_together(classes: Sequence[int], most: int) -> bool:
    """Return whether there are several, but not as many as samples, and each stands in one run."""
    runs = 1 + sum(one != other for one, other in pairwise(classes))
    return 1 < runs == len(set(classes)) <= most
