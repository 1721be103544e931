"""Data loaders that read one rank's part."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from prepkit.live.interpreter import Handler
from prepkit.live.model.target import Target
from prepkit.steps import ShardLoader

KEPT = (
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "drop_last",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
"""Attributes of a loader that are arguments of a new one (torch ``DataLoader.__init__``; DL-17)."""

KEEP = "split the data yourself and plan with loaders=KeepLoaders()"


def loader_ready(step: ShardLoader, target: Target) -> tuple[str, ...]:
    """The loader must be one that a new sampler can be put into without changing what it does."""
    if step.index >= len(target.loaders):
        return (f"the plan shards loader {step.index}, {len(target.loaders)} were given; pass those of the plan",)
    loader = target.loaders[step.index]
    name = f"loader {step.index}"
    if type(loader) is not DataLoader:
        return (f"{name} is a {type(loader).__name__}, which a DataLoader would not replace; {KEEP}",)
    if isinstance(loader.dataset, IterableDataset):
        return (f"{name} reads an IterableDataset, which has no indices to divide; {KEEP}",)
    if loader.batch_size is None and loader.batch_sampler is not None:
        return (f"{name} has a batch sampler of its own, which would be lost; {KEEP}",)
    if isinstance(loader.sampler, DistributedSampler):
        return (f"{name} has a DistributedSampler already; {KEEP}",)
    return ()


def loader_do(step: ShardLoader, target: Target) -> Any:
    """A new loader over the same dataset; returns the given one, which is untouched."""
    loader: DataLoader[Any] = target.loaders[step.index]
    world, rank = _part(step, target)
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, world, rank, shuffle=step.shuffle, seed=step.seed, drop_last=step.drop_last
    )
    options = {
        name: getattr(loader, name) for name in KEPT if hasattr(loader, name)
    }  # in_order is newer than torch 2.6
    sharded = DataLoader(loader.dataset, sampler=sampler, **options)
    try:
        target.loaders[step.index] = sharded
        return loader
    except BaseException:
        loader_undo(step, target, loader)
        raise


def _part(step: ShardLoader, target: Target) -> tuple[int, int]:
    """Number of parts, and which of them is this rank's. Without axes every rank reads all, in the common order."""
    if step.axes is None:
        return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if target.mesh is None:
        raise RuntimeError("there is no device mesh to divide the data over; BuildMesh has to come before ShardLoader")
    readers, reader = 1, 0
    for axis in step.axes:
        size = target.mesh[axis].size()
        readers, reader = readers * size, reader * size + target.mesh.get_local_rank(axis)
    return readers, reader


def loader_undo(step: ShardLoader, target: Target, memo: Any) -> None:
    """Puts the given loader back."""
    target.loaders[step.index] = memo


LOADER: Handler[ShardLoader, Target, Any] = Handler(ready=loader_ready, do=loader_do, undo=loader_undo)
