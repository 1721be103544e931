"""Generators beside torch's own that a forward may draw from: those that modules hold, and those of the process."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from prepkit.objects.names import sites

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
DEEPEST = 3
"""Containers and objects, one inside the other, in which a generator is looked for."""
MOST = 64
"""Entries of a container that are looked at."""


def _kinds() -> tuple[type, ...]:
    numpy: Any = sys.modules.get("numpy")
    return (torch.Generator, random.Random, *(() if numpy is None else (numpy.random.Generator, _legacy(numpy))))


def _legacy(numpy: Any) -> type:
    made: type = numpy.random.RandomState
    return made


def generators(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each generator of the host that a module holds, in an attribute or in what stands there, by its path."""
    kinds, seen = _kinds(), {id(torch.default_generator), *(id(one) for _, one in of_the_process())}
    for site in sites(root):
        for key, value in vars(site.module).items() if site.first else ():
            if key not in INTERNAL:
                for at, one in _in(value, kinds, DEEPEST):
                    if id(one) not in seen and _is_of_the_host(one):
                        seen.add(id(one))
                        yield f"{site.path}.{key}{at}", one


def _is_of_the_host(one: Any) -> bool:
    return one.device.type == "cpu" if isinstance(one, torch.Generator) else type(one) is not random.SystemRandom


def _in(value: Any, kinds: tuple[type, ...], depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(value, kinds):
        yield "", value
    elif depth:
        for key, one in _entries(value):
            yield from ((f".{key}{at}", found) for at, found in _in(one, kinds, depth - 1))


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a small container has, or an object of a class of the program's own."""
    match value:
        case dict() if len(value) <= MOST:
            yield from ((str(key), one) for key, one in value.items())
        case list() | tuple() if len(value) <= MOST:
            yield from ((str(at), one) for at, one in enumerate(value))
        case dict() | list() | tuple() | nn.Module() | Tensor() | type():
            return
        case _ if _is_own(value):
            yield from vars(value).items()


def _is_own(value: Any) -> bool:
    """Return whether it is of a class that the program's files define, and no library's, as a Trainer."""
    name = type(value).__module__
    home = getattr(sys.modules.get(name), "__file__", None) or ""
    return hasattr(value, "__dict__") and (name == "__main__" or "-packages" not in home)


def of_the_process() -> Iterator[tuple[str, Any]]:
    """Yield those that functions of ``random`` and of ``numpy.random`` draw from."""
    yield "random", random._inst  # which has no public name
    if (numpy := sys.modules.get("numpy")) is not None:
        yield "numpy.random", numpy.random.mtrand._rand


def copies(root: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield the identity of each, and another that stands where it stands; those of the process have no other."""
    yield from ((id(one), one) for one in (torch.default_generator, *(one for _, one in of_the_process())))
    for _, one in generators(root):
        yield id(one), one.clone_state() if isinstance(one, torch.Generator) else copy.deepcopy(one)


def states(root: nn.Module) -> dict[str, Tensor]:
    """Where each stands now, as bytes, by its path."""
    return {path: state_of(one) for path, one in (*generators(root), *of_the_process())}


def put_back(root: nn.Module, kept: Mapping[str, Tensor]) -> None:
    """Puts each where it stood. Raises what a generator raises for a state that is none of its own."""
    for path, one in (*generators(root), *of_the_process()):
        if path in kept:
            _put(one, kept[path])


@contextmanager
def as_before() -> Iterator[None]:
    """Behind it the generators of the process, torch's among them, stand where they stood."""
    mine, others = torch.get_rng_state(), [(one, state_of(one)) for _, one in of_the_process()]
    try:
        yield
    finally:
        torch.set_rng_state(mine)
        for one, state in others:
            _put(one, state)


def state_of(one: Any) -> Tensor:
    """The state of one, as bytes."""
    match one:
        case torch.Generator():
            return one.get_state()
        case random.Random():
            state: Any = one.getstate()
        case _ if hasattr(one, "bit_generator"):
            state = one.bit_generator.state
        case _:
            state = one.get_state(legacy=False)
    text = json.dumps(state, default=lambda array: array.tolist())  # numpy's arrays and numbers
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _put(one: Any, state: Tensor) -> None:
    if isinstance(one, torch.Generator):
        one.set_state(state)
        return
    said = json.loads(bytes(state.tolist()))
    if isinstance(one, random.Random):
        version, words, normal = said
        one.setstate((version, tuple(words), normal))
    elif hasattr(one, "bit_generator"):
        one.bit_generator.state = said
    else:
        one.set_state(said)
