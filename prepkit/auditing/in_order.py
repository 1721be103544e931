"""How samples lie: class by class in a data set that a loader reads in order, and field by field in a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import SequentialSampler, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from prepkit.objects.alive import alive

MOST = 1 << 20
"""Samples of a data set whose classes are read."""
OF_EACH = 8
"""Samples that classes have at least, on average; else they are numbers of samples, or of what these are parts of."""
FEW = 4
"""Samples of a batch of which nothing is told, and numbers of a field by which no sample is known."""
MOST_SAMPLES, MOST_LEAVES, NUMBERS = 512, 16, 64
"""Samples and tensors of a batch, and numbers of each sample, that are compared."""


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


# --- in a batch ---


def mispaired(samples: Sequence[Any], batch: Any) -> tuple[str, str] | None:
    """Two fields of samples that lie in a batch in two orders: the one that was moved, and the one that was not.

    Known by their numbers, of which a batch may have more behind, as pads. None: there are none, or nobody can tell; or
    the batch has places of all samples, by which the order may be undone.
    """
    fields = _fields(samples)
    leaves = [one for one in tree_leaves(batch) if isinstance(one, Tensor) and one.dim() and not one.is_meta]
    undone = any(sorted(one.tolist()) == [*range(len(samples))] for one in leaves if one.shape == (len(samples),))
    if not FEW <= len(samples) <= MOST_SAMPLES or not fields or len(leaves) > MOST_LEAVES or undone:
        return None
    orders = {name: order for name, rows in fields.items() for leaf in leaves if (order := _order(rows, leaf))}
    for moved, order in orders.items():
        for name, rows in fields.items() if order != sorted(order) else ():
            there = [leaf for leaf in leaves if _lies(rows, leaf, range(len(rows)))]
            if name != moved and there and not any(_lies(rows, leaf, order) for leaf in leaves):
                return moved, name
    return None


def _fields(samples: Sequence[Any]) -> dict[str, list[Tensor]]:
    """What each sample has of one kind, by its place or key, as flat numbers."""
    first: Any = samples[0] if samples else None
    if not isinstance(first, dict | tuple | list) or len(first) > MOST_LEAVES:
        return {}
    keys = [*first] if isinstance(first, dict) else [*range(len(first))]
    if any(type(one) is not type(first) or len(one) != len(keys) for one in samples):
        return {}
    found = {}
    for key in keys:
        rows = [_flat(one[key]) if not isinstance(one, dict) or key in one else None for one in samples]
        if all(row is not None and row.numel() for row in rows):
            found[str(key)] = [row for row in rows if row is not None]
    return found


def _flat(value: Any) -> Tensor | None:
    """Its first numbers; None: it has none."""
    if type(value) in (int, float):
        return torch.tensor([float(value)], dtype=torch.float64)
    if not isinstance(value, Tensor | list) and type(value).__module__ != "numpy":
        return None
    try:
        one = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return None if one.is_meta or one.is_complex() else one.detach().reshape(-1)[:NUMBERS].double()


def _order(rows: list[Tensor], leaf: Tensor) -> list[int]:
    """Which sample each row of a batch is of, where each is of one alone; nothing: they are not known."""
    if any(row.numel() < FEW for row in rows):
        return []
    order: list[int] = []
    for there in _rows(rows, leaf):
        same = [at for at, row in enumerate(rows) if torch.equal(row, there[: row.numel()])]
        if len(same) != 1:
            return []
        order += same
    return order if sorted(order) == [*range(len(rows))] else []


def _lies(rows: list[Tensor], leaf: Tensor, order: Iterable[int]) -> bool:
    """Return whether a batch has these in an order."""
    there = _rows(rows, leaf)
    return bool(there) and all(
        torch.equal(rows[at], one[: rows[at].numel()]) for at, one in zip(order, there, strict=True)
    )


def _rows(rows: list[Tensor], leaf: Tensor) -> list[Tensor]:
    """The rows of a batch, as long as the longest of these; nothing: it has not as many, or shorter ones."""
    if len(leaf) != len(rows) or leaf.numel() < sum(row.numel() for row in rows):
        return []
    most = max(row.numel() for row in rows)
    flat = leaf.detach().reshape(len(leaf), -1)[:, :most].double()
    return [*flat] if flat.shape[1] == most else []


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
