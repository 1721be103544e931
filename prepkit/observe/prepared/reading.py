"""What a loader is about to read, learnt from a copy: indices of its first batches, and the samples that they give."""

from __future__ import annotations

import copy
import hashlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader, IterableDataset

from prepkit.observe.fingerprints.tensor import fingerprint
from prepkit.observe.loaders import loader_facts
from prepkit.ranks.world import world

BATCHES = 4
"""Batches of which the indices are compared; of a stream as many samples."""
SAMPLES = 2
"""Samples that are read where indices alone do not tell ranks apart."""


def first_reads(loader: Any) -> tuple[str, str]:
    """Digests of the first indices and of the first samples that a loader of torch gives; empty where none can be told.

    Where torch's own sampler goes through all indices, the samples are those of the lowest ones.
    A copy of the sampler or the stream is asked, under generators that are put back. What cannot be copied, such as an
    open file, is not asked, and streams of ``datasets`` neither, which would fill their buffers.
    """
    if not isinstance(loader, DataLoader):
        return "", ""
    data = loader.dataset
    try:
        with generators_kept():
            if isinstance(data, IterableDataset):
                if type(data).__module__.startswith("datasets."):
                    return "", ""
                return "", digest_of(list(islice(iter(copy.deepcopy(data)), BATCHES)))
            own = _copied(loader._index_sampler, data)
            batches = list(islice(iter(own), BATCHES))
        each = [at for batch in batches for at in (batch if isinstance(batch, list | tuple) else (batch,))]
        first = range(min(SAMPLES, len(each))) if loader_facts(loader).sampler in ("sequential", "random") else each
        with generators_kept(seed=0):
            samples = digest_of([data[at] for at in first[:SAMPLES]])
    except Exception:  # code of the user runs here, which may not stand being asked twice
        return "", ""
    return (digest_of(batches), samples) if batches else ("", "")


PART = 16
"""Samples of a stream that are looked for in what it gives a process alone."""
LEAST = 8
"""Of them, where it is shorter; as many are hardly in one order by chance."""
READ = 256
"""Samples that are read there at most."""
RANK = ("rank", "process_index", "global_rank", "local_rank", "shard_id")
WORLD = ("world_size", "num_replicas", "num_processes", "num_shards", "world")
"""Attributes by which a stream knows its rank, and how many there are."""


def divides_itself(data: Any) -> bool:
    """Return whether a stream gives this rank, in its order, a part of what it gives a process that is alone.

    Copies are asked, under generators that are put back; False where nothing can be told.
    """
    ranks = world()
    if ranks.size == 1 or not isinstance(data, IterableDataset) or type(data).__module__.startswith("datasets."):
        return False
    try:
        with generators_kept():
            mine = [*map(digest_of, islice(iter(copy.deepcopy(data)), PART))]
        with generators_kept(), as_if_alone():
            whole = copy.deepcopy(data)
            for names, value, other in ((RANK, ranks.rank, 0), (WORLD, ranks.size, 1)):
                known = {name for name in names if type(vars(whole).get(name)) is int and vars(whole)[name] == value}
                vars(whole).update(dict.fromkeys(known, other))
            every = [*map(digest_of, islice(iter(whole), min(READ, PART * (ranks.size + 1))))]
    except Exception:  # code of the user runs here, which may not stand being asked twice
        return False
    rest = iter(every)
    return len(mine) >= LEAST and mine != every[: len(mine)] and all(one in rest for one in mine)


@contextmanager
def as_if_alone() -> Iterator[None]:
    """Inside, what a program asks for its rank answers as in a process that is alone."""
    alone: dict[str, Any] = {"get_rank": lambda *_, **__: 0, "get_world_size": lambda *_, **__: 1}
    state: Any = sys.modules.get("accelerate.state")
    shared = () if state is None else (state.PartialState._shared_state, state.AcceleratorState._shared_state)
    numbers = {"process_index": 0, "local_process_index": 0, "num_processes": 1}
    places: list[tuple[Any, dict[str, Any]]] = [(vars(home), alone) for home in (torch.distributed, distributed_c10d)]
    places += [(one, numbers) for one in shared]
    places.append((os.environ, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}))
    kept = [(place, {name: place[name] for name in told if name in place}) for place, told in places]
    try:
        for (place, before), (_, told) in zip(kept, places, strict=True):
            place.update({name: told[name] for name in before})
        yield
    finally:
        for place, before in kept:
            place.update(before)


def _copied(sampler: Any, data: Any) -> Any:
    """A sampler of its own with the same data set; long lists of numbers are copied as they are."""
    shared: dict[int, Any] = {id(data): data}
    waiting = [sampler]
    for _ in range(8):
        for one in waiting[:]:
            waiting.remove(one)
            for name, value in getattr(one, "__dict__", {}).items():
                if name in ("dataset", "data_source", "data"):
                    shared[id(value)] = value
                elif isinstance(value, list) and value and isinstance(value[0], int):
                    shared[id(value)] = value.copy()
                elif name in ("sampler", "batch_sampler"):
                    waiting.append(value)
    return copy.deepcopy(sampler, shared)


@contextmanager
def generators_kept(seed: int | None = None) -> Iterator[None]:
    """The process's generators are afterwards as before; ``seed``: begun anew inside."""
    numpy: Any = sys.modules.get("numpy")
    kept = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            if numpy:
                numpy.random.seed(seed)
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        if numpy:
            numpy.random.set_state(kept[2])


def generator_states() -> dict[str, str]:
    """A digest of where each generator of the process is, by the function that would seed it."""
    numpy: Any = sys.modules.get("numpy")
    states: dict[str, Any] = {"torch.manual_seed": torch.get_rng_state().tolist(), "random.seed": random.getstate()}
    states |= (
        {"numpy.random.seed": [one.tobytes() if hasattr(one, "tobytes") else one for one in numpy.random.get_state()]}
        if numpy
        else {}
    )
    return {name: hashlib.sha256(repr(state).encode()).hexdigest() for name, state in states.items()}


def digest_of(value: Any) -> str:
    """The same for equal samples, batches and lists of them."""
    return hashlib.sha256(repr(_told(value)).encode()).hexdigest()


def _told(value: Any, depth: int = 4) -> Any:
    match value:
        case torch.Tensor():
            return tuple(value.shape), fingerprint(value)
        case bool() | int() | float() | str() | bytes() | None:
            return value
        case list() | tuple() if depth:
            return [_told(one, depth - 1) for one in value]
        case dict() if depth:
            return [(str(key), _told(one, depth - 1)) for key, one in value.items()]
        case _ if hasattr(value, "tobytes"):  # numpy's arrays, and pictures
            return hashlib.sha256(value.tobytes()).hexdigest()
        case _:
            return type(value).__name__
