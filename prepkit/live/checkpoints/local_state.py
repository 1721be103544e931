"""What every rank has for itself: random states, and its positions in the loaders."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from prepkit.live.data.loader import Loader


def of_this_rank(loaders: Sequence[Any]) -> dict[str, Any]:
    """Random states of Python, numpy, torch and the accelerator, and the ``state_dict()`` of loaders that have one."""
    return {"random": random_states(), "loaders": [one.state_dict() if positioned(one) else None for one in loaders]}


def on_any_ranks(loaders: Sequence[Any]) -> list[Any]:
    """Where prepared loaders stand, as it holds for every rank of any number; None for loaders of the user's own."""
    return [one.state_dict() | {"loader": None} if isinstance(one, Loader) else None for one in loaders]


def positioned(loader: Any) -> bool:
    """Whether the loader knows where it stands."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def random_states() -> dict[str, Any]:
    """All as plain data; numpy's only where it is loaded."""
    version, words, gauss = random.getstate()
    states: dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = [str(name), torch.from_numpy(keys.astype("int64")), *(float(one) for one in rest)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Puts back what ``random_states`` gave. Changes the generators of the whole process."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        name, keys, position, has_gauss, cached = states["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), int(position), int(has_gauss), cached))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def set_positions(loaders: Sequence[Any], own: Sequence[Any], shared: Sequence[Any], *, same_ranks: bool) -> None:
    """Every loader that knows where it stands goes on from where it was saved.

    On another number of ranks from what holds for any: a rank that was not there has nothing of its own, and what the
    others have of theirs, such as the state of a stream, is of another part of the data.
    """
    for at, loader in enumerate(loaders):
        common = shared[at] if at < len(shared) else None
        state = own[at] if at < len(own) and (same_ranks or common is None) else common
        if state is not None and positioned(loader):
            loader.load_state_dict(state)
