"""Draws that are the same on every rank and in every run: a sampler's random numbers follow from seed and epoch."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define
from torch.utils.data import IterableDataset, Sampler


@define
class RandomState:
    """The states of torch's, Python's and numpy's common generators, apart from those of the process."""

    states: tuple[Any, ...]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, the common generators are these; afterwards they are as they were."""
        before = _states()
        _set(self.states)
        try:
            yield
        finally:
            self.states = _states()
            _set(before)


@contextmanager
def as_they_were(*, resumed: bool) -> Iterator[None]:
    """Where a pass is resumed, what is drawn inside leaves no trace in the common generators.

    They were put back to where the pass stood, behind what its beginning had drawn: torch's ``DataLoader`` draws a seed
    for its workers whenever it is iterated anew.
    """
    if not resumed:
        yield
        return
    with RandomState(_states()).inside():
        yield


def drawn(source: Iterable[Any], *seeds: int) -> Iterator[Any]:
    """The items of an iterable whose random numbers follow from the seeds alone, and touch no other generator."""
    own = _seeded(hash(seeds) % 2**32)  # of a tuple of integers the same in every process
    with own.inside():
        items = iter(source)
    while True:
        with own.inside():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def with_own_generators(source: Any, *seeds: int) -> Any:
    """A copy of a sampler or stream, and of the samplers in it, whose own generators follow from the seeds.

    Generators are those of torch, of ``random`` and of numpy, by whatever name it holds them; a stream without any is
    given back itself. Shared data stays shared. What is given is untouched (accelerate seeds the user's: DL-15).
    """
    held = getattr(source, "__dict__", None)
    if held is None or (isinstance(source, IterableDataset) and not any(map(_is_generator, held.values()))):
        return source  # a list or an iterator; or a stream, which may keep state of its own
    mine, seed = copy.copy(source), hash(seeds) % 2**32
    for name, value in list(vars(mine).items()):
        if _is_generator(value):
            setattr(mine, name, _begun(value, seed))
        elif name in ("sampler", "batch_sampler") or isinstance(value, Sampler):
            setattr(mine, name, with_own_generators(value, *seeds))
    return mine


def _is_generator(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    kinds = (torch.Generator, random.Random, *((numpy.random.Generator, numpy.random.RandomState) if numpy else ()))
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def _begun(given: Any, seed: int) -> Any:
    """A generator of the same kind, begun with the seed."""
    if isinstance(given, torch.Generator):
        return torch.Generator(given.device).manual_seed(seed)
    if isinstance(given, random.Random):
        mine = copy.copy(given)
        mine.seed(seed)
        return mine
    numpy: Any = sys.modules["numpy"]
    if isinstance(given, numpy.random.RandomState):
        return numpy.random.RandomState(seed)
    return numpy.random.Generator(type(given.bit_generator)(seed))


def set_epoch(source: Any, epoch: int) -> None:
    """Tells the epoch to what wants to know it: a sampler or data set, and the samplers inside it (DL-28)."""
    seen: list[Any] = []
    while source is not None and all(source is not one for one in seen):
        seen.append(source)
        if callable(getattr(source, "set_epoch", None)):
            source.set_epoch(epoch)
        inside = (getattr(source, name, None) for name in ("batch_sampler", "sampler"))
        source = next((one for one in inside if one is not None), None)  # not by truth: that asks some for their length


def _seeded(seed: int) -> RandomState:
    state = RandomState(_states())
    with state.inside():
        torch.default_generator.manual_seed(seed)  # ``torch.manual_seed`` would seed the accelerators too
        random.seed(seed)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(seed)
    return state


def _states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def _set(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
