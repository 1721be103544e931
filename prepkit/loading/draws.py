"""Draws that are the same on every rank and in every run: a sampler's random numbers follow from seed and epoch."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, frozen
from torch.utils.data import IterableDataset, Sampler


@define(eq=False, repr=False)
class RandomState:
    """The states of torch's, Python's and numpy's common generators, apart from those of the process."""

    states: tuple[Any, ...]

    @classmethod
    def now(cls) -> RandomState:
        """Those of the process."""
        return cls(_states())

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> RandomState:
        """Return what ``data`` gave."""
        version, words, gauss = data["python"]
        numpy = None
        if "numpy" in data:
            name, keys, position, has_gauss, cached = data["numpy"]
            numpy = (name, keys.numpy().astype("uint32"), int(position), int(has_gauss), cached)
        return cls((data["torch"], (version, tuple(words), gauss), numpy))

    def data(self) -> dict[str, Any]:
        """As plain data; numpy's only where it was loaded."""
        drawn, (version, words, gauss), numpy = self.states
        states: dict[str, Any] = {"python": [version, list(words), gauss], "torch": drawn}
        if numpy is not None:
            name, keys, *rest = numpy
            states["numpy"] = [str(name), torch.from_numpy(keys.astype("int64")), *(float(one) for one in rest)]
        return states

    def same(self, other: RandomState) -> bool:
        """Whether nobody has drawn between the two."""
        (torch_, python, numpy), (its_torch, its_python, its_numpy) = self.states, other.states
        if not torch.equal(torch_, its_torch) or python != its_python or (numpy is None) != (its_numpy is None):
            return False
        return numpy is None or (numpy[2:] == its_numpy[2:] and bool((numpy[1] == its_numpy[1]).all()))

    def put_back(self) -> None:
        """Makes them those of the process again."""
        _set(self.states)

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

    They were put back to where the pass stood, after what its beginning had drawn: torch's ``DataLoader`` draws a seed
    for its workers whenever it is iterated anew.
    """
    if not resumed:
        yield
        return
    with RandomState.now().inside():
        yield


@frozen(eq=False, repr=False)
class Drawing:
    """The states of all generators when a sampler began to draw, so that it can draw the same again."""

    common: dict[str, Any]
    own: list[Any]
    """Of the generators that the sampler holds, and the samplers in it; of a loader's, and of its stream."""

    @classmethod
    def of(cls, sampler: Any) -> Drawing:
        """That which begins now."""
        return cls(RandomState.now().data(), [_state(one) for one in _held(sampler)])

    @contextmanager
    def again(self, sampler: Any, *, kept: bool = False) -> Iterator[None]:
        """Inside, the sampler draws as then. Its own generators go on from there, unless they are to be ``kept``."""
        before = Drawing.of(sampler).own
        self._set(sampler, self.own)
        try:
            with RandomState.of_data(self.common).inside():
                yield
        finally:
            if kept:
                self._set(sampler, before)

    @staticmethod
    def _set(sampler: Any, states: list[Any]) -> None:
        for one, state in zip(_held(sampler), states, strict=False):
            _put_back(one, state)


def _held(sampler: Any) -> Iterator[Any]:
    for name, value in getattr(sampler, "__dict__", {}).items():
        if _is_generator(value):
            yield value
        elif name in ("sampler", "batch_sampler") or isinstance(value, Sampler | IterableDataset):
            yield from _held(value)


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


def _state(generator: Any) -> Any:
    """As plain data."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return [version, list(words), gauss]
    own = getattr(generator, "bit_generator", None)
    if own is None:  # a RandomState of numpy's
        own = generator._bit_generator
    return _mapped(own.state, lambda one: torch.from_numpy(one.astype("int64")) if hasattr(one, "astype") else one)


def _put_back(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    else:
        own = getattr(generator, "bit_generator", None) or generator._bit_generator
        own.state = _mapped(state, lambda one: one.numpy().astype("uint64") if torch.is_tensor(one) else one)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    return change(value)


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
    if states[2] is not None and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(states[2])
