"""Data loaders that read one rank's part, and what is handed out around them."""

from __future__ import annotations

from math import prod
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from prepkit.applying.handlers import problems
from prepkit.court import found
from prepkit.interpreter import Handler
from prepkit.loading.batch_sampler import RankBatches, SeededOrder
from prepkit.loading.joint_sources import BatchSource, DispatchedSource, ShardsSource
from prepkit.loading.loader import Loader
from prepkit.loading.rounds import Tail
from prepkit.loading.sources import IndexedSource, StreamSource, rebuilt
from prepkit.objects.target import Target
from prepkit.ranks import launcher
from prepkit.ranks.world import new_group, world
from prepkit.steps import ShardLoader, WrapLoader


def _missing(step: ShardLoader | WrapLoader, target: Target) -> problems.Problems:
    fewer = [f"loaders[{step.index}]"] if step.index >= len(target.loaders) else []
    what = f"the plan has it, and {len(target.loaders)} were given"
    return problems.told("plan.model-changed", fewer, what, "Pass the loaders of the plan.")


def shard_ready(step: ShardLoader, target: Target) -> problems.Problems:
    """The loader must be one that can be divided in the planned way."""
    if met := _missing(step, target):
        return met
    where, loader = f"loaders[{step.index}]", target.loaders[step.index]
    if not isinstance(loader, DataLoader):
        return (found("loaders.foreign", where, f"is a {type(loader).__name__}, and not a torch DataLoader"),)
    streams = isinstance(loader.dataset, IterableDataset)
    if streams != (step.split in ("stream", "shards")):
        what = "reads an IterableDataset" if streams else "has a data set with indices"
        return (found("plan.model-changed", where, f"{what}, and the plan divides it by {step.split}"),)
    if isinstance(loader.sampler, DistributedSampler):
        return (found("loaders.already-distributed", where, "has a DistributedSampler already"),)
    return ()


def shard_do(step: ShardLoader, target: Target) -> Any:
    """A new loader over the same data set; returns the given one, which is untouched."""
    given = target.loaders[step.index]
    parts, part = data_part(step, target)
    group = _host_group(target) if step.split == "shards" or step.dispatch else None
    try:
        target.loaders[step.index] = Loader(source=_source(step, given, parts, part, group), part=part)
        return given, group
    except BaseException:
        shard_undo(step, target, (given, group))
        raise


def shard_undo(step: ShardLoader, target: Target, memo: Any) -> None:
    """Puts the given loader back."""
    target.loaders[step.index], group = memo
    if group is not None and group is not dist.group.WORLD:
        dist.destroy_process_group(group)


def _host_group(target: Target) -> Any:
    """A group of all ranks that talks in host memory; collective where there is none yet."""
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    target.together()
    return new_group("gloo")


def _source(step: ShardLoader, loader: DataLoader[Any], parts: int, part: int, group: Any) -> BatchSource:
    tail = tail_of(step, loader)
    if step.dispatch:
        return DispatchedSource(_read_here(step, loader, 1, 0), group, parts, part, tail)
    if step.split == "shards":
        own = loader.dataset.shard(num_shards=parts, index=part)  # type: ignore[attr-defined]  # a fact
        stream = StreamSource(rebuilt(loader, dataset=own), size=loader.batch_size or 1)
        return ShardsSource(stream, group, parts, all_read=tail in ("repeat", "fill", "spread"))
    return _read_here(step, loader, parts, part)


def _read_here(step: ShardLoader, loader: DataLoader[Any], parts: int, part: int) -> IndexedSource | StreamSource:
    """One part of what this process can read by itself."""
    how: dict[str, Any] = {"parts": parts, "part": part, "tail": tail_of(step, loader)}
    if step.split in ("stream", "shards"):
        size = step.batch_size or loader.batch_size
        return StreamSource.of(loader, seed=step.seed or 0, size=size, drop_last=loader.drop_last, **how)
    single = loader.batch_sampler is None
    batches_given = _given_batches(loader)
    if step.split == "batches" or batches_given is not None:
        order = loader.batch_sampler if batches_given is None else batches_given
        return IndexedSource.of(loader, RankBatches(order=order, size=None, drop_last=False, seed=step.seed, **how))
    given = _batching(loader)
    order = given.sampler
    seed = step.seed
    if step.split == "samples" and seed is not None:
        order = SeededOrder(loader.dataset, step.shuffle, seed)
        seed = None  # its draws follow from seed and epoch by themselves
    size, drop_last = (1, False) if single else (step.batch_size or given.batch_size, given.drop_last)
    if not single:
        how |= {"given": loader.batch_sampler, "split": given.batch_size // size}
    batches = RankBatches(order=order, size=size, drop_last=drop_last, seed=seed, single=single, **how)
    return IndexedSource.of(loader, batches)


def _given_batches(loader: Any) -> Any:
    """The sampler of a loader that makes no batches, where that yields those of a whole batch; None elsewhere."""
    return loader.sampler if loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler) else None


def _batching(loader: Any) -> Any:
    """Return what says how samples are batched: the loader, or the batch sampler where that was given."""
    return loader if loader.batch_size is not None or loader.batch_sampler is None else loader.batch_sampler


def tail_of(step: ShardLoader, loader: Any) -> Tail:
    """Return what becomes of a last round that is incomplete."""
    if step.spread:
        return "spread"
    if getattr(_batching(loader), "drop_last", False):
        return "drop"
    if step.drop_last:
        return "trim"
    return "fill" if step.fill else "repeat"


def data_part(step: ShardLoader | WrapLoader, target: Target) -> tuple[int, int]:
    """Number of parts, and which of them is this rank's: ranks that differ in other axes only share one."""
    if step.axes is None:
        return world().size // step.same_data, world().rank // step.same_data
    if target.mesh is None:
        raise problems.no_mesh("divide the data over")
    sizes = [target.mesh[axis].size() for axis in step.axes]
    places = [target.mesh.get_local_rank(axis) for axis in step.axes]
    return prod(sizes), sum(place * prod(sizes[at + 1 :]) for at, place in enumerate(places))


def wrap_ready(step: WrapLoader, target: Target) -> problems.Problems:
    """There must be a loader, and a device."""
    met = _missing(step, target)
    return met if met or step.device is None else launcher.device_problems(step.device.type)


def wrap_do(step: WrapLoader, target: Target) -> Any:
    """The wrapper; returns what stood there, which is untouched."""
    given = target.loaders[step.index]
    source = given.source if isinstance(given, Loader) else _whole(given)
    wrapper = Loader(
        source=source,
        device=None if step.device is None else launcher.bind(step.device),
        part=data_part(step, target)[1],
        ends_window=step.ends_window,
        evaluation=step.evaluation,
    )
    try:
        target.loaders[step.index] = wrapper
        return given
    except BaseException:
        wrap_undo(step, target, given)
        raise


def wrap_undo(step: WrapLoader, target: Target, memo: Any) -> None:
    """Puts what stood there back."""
    target.loaders[step.index] = memo


def _whole(loader: Any) -> BatchSource:
    """A loader that reads what it read when it was given."""
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not plain or isinstance(loader.dataset, IterableDataset):
        return StreamSource(loader, size=getattr(loader, "batch_size", None) or 1)
    if loader.batch_size is not None:  # batches of its own making: counted in samples, as where they are divided
        how: dict[str, Any] = {"size": loader.batch_size, "drop_last": loader.drop_last, "given": loader.batch_sampler}
        tail: Tail = "drop" if loader.drop_last else "repeat"
        return IndexedSource.of(loader, RankBatches(order=loader.sampler, tail=tail, **how))
    single = loader.batch_sampler is None and _given_batches(loader) is None
    order: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return IndexedSource.of(
        loader, RankBatches(order=order, size=1 if single else None, drop_last=False, single=single)
    )


SHARD: Handler[ShardLoader, Target, Any] = Handler(ready=shard_ready, do=shard_do, undo=shard_undo)
WRAP: Handler[WrapLoader, Target, Any] = Handler(ready=wrap_ready, do=wrap_do, undo=wrap_undo)
