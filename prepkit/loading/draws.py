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


def with_own_generators(sampler: Any, *seeds: int) -> Any:
    """A copy of a sampler and of those it draws from, whose ``generator``, where it has one, follows from the seeds.

    Shared data stays shared. The sampler that is given is untouched (accelerate seeds the user's: behaviour DL-15).
    """
    if not hasattr(sampler, "__dict__"):
        return sampler  # a list or an iterator
    mine = copy.copy(sampler)
    for name, held in list(vars(mine).items()):
        if isinstance(held, torch.Generator):
            setattr(mine, name, torch.Generator(held.device).manual_seed(hash(seeds) % 2**32))
        elif name in ("sampler", "batch_sampler"):
            setattr(mine, name, with_own_generators(held, *seeds))
    return mine


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
