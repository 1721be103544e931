"""What loaders read, compared with their steps; imported once a plan has loaders."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from prepkit.facts.run import Departure, each, same
from prepkit.loading.batch_sampler import SeededOrder
from prepkit.loading.joint_sources import DispatchedSource, ShardsSource
from prepkit.loading.loader import Loader
from prepkit.loading.sources import IndexedSource, StreamSource
from prepkit.objects.state import LiveModel
from prepkit.ranks.world import world
from prepkit.steps import ShardLoader, WrapLoader


def divided(step: ShardLoader, live: LiveModel) -> Iterator[Departure]:
    """The loader reads this rank's part of the data, in the planned way."""
    loader = live.target.loaders[step.index]
    name = f"loader {step.index}"
    yield from same("ShardLoader", name, "Loader", type(loader).__name__)
    if not isinstance(loader, Loader):
        return
    source: Any = loader.source
    kind = "DispatchedSource" if step.dispatch else _KINDS[step.split]
    yield from same("ShardLoader", f"source of {name}", kind, type(source).__name__)
    if isinstance(source, IndexedSource):
        batches = source.batches
        wanted = (*_reader(step, live), *_order(step))
        found = (batches.parts, batches.part, *_order_of(batches.order, batches.seed))
        yield from same("ShardLoader", f"parts, part, order and seed of {name}", wanted, found)
        here = source.loader.sampler if source.loader.batch_sampler is None else source.loader.batch_sampler
        yield from each("ShardLoader", f"{name} reads by it", [] if here is batches else [type(here).__name__])
    elif isinstance(source, StreamSource) and source.divided is not None:
        stream = source.divided
        found = (stream.parts, stream.part, stream.seed, source.loader.dataset is stream)
        yield from same(
            "ShardLoader", f"parts, part and seed of {name}", (*_reader(step, live), step.seed, True), found
        )
    elif isinstance(source, DispatchedSource):
        found = (source.parts, source.part)
        yield from same("ShardLoader", f"parts and part of {name}", _reader(step, live), found)
    elif isinstance(source, ShardsSource):
        yield from same("ShardLoader", f"parts of {name}", _reader(step, live)[0], source.parts)


_KINDS = {
    "samples": "IndexedSource",
    "sampler": "IndexedSource",
    "batches": "IndexedSource",
    "stream": "StreamSource",
    "shards": "ShardsSource",
}


def _order(step: ShardLoader) -> tuple[Any, ...]:
    given = step.split != "samples" or step.seed is None
    return ("own", None, step.seed) if given else ("prepkit", step.shuffle, step.seed)


def _order_of(order: Any, seed: int | None) -> tuple[Any, ...]:
    if isinstance(order, SeededOrder):
        return "prepkit", order.shuffle, order.seed
    return "own", None, seed


def wrapped(step: WrapLoader, live: LiveModel) -> Iterator[Departure]:
    """Yield what is handed out moves batches to the planned device, and may end windows as planned."""
    loader = live.target.loaders[step.index]
    name = f"loader {step.index}"
    yield from same("WrapLoader", name, "Loader", type(loader).__name__)
    if isinstance(loader, Loader):
        kind = None if loader.device is None else loader.device.type
        yield from same("WrapLoader", f"device of {name}", None if step.device is None else step.device.type, kind)
        found = (loader.ends_window, loader.evaluation, loader.part)
        wanted = (step.ends_window, step.evaluation, _reader(step, live)[1])
        yield from same("WrapLoader", f"ends windows, evaluation and part of {name}", wanted, found)


def _reader(step: ShardLoader | WrapLoader, live: LiveModel) -> tuple[int, int]:
    """Number of parts of the data, and this rank's: ranks that differ only in other axes than the step's share one."""
    mesh = live.target.mesh
    if step.axes is None or mesh is None:
        return world().size // step.same_data, world().rank // step.same_data
    sizes = [mesh[axis].size() for axis in step.axes]
    places = [mesh.get_local_rank(axis) for axis in step.axes]
    return prod(sizes), sum(place * prod(sizes[at + 1 :]) for at, place in enumerate(places))
