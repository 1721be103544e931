"""The state of a prepared run, whatever the engine: of model and optimizer, of the engine, and of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import Module

from prepkit.loading.draws import RandomState
from prepkit.loading.loader import Loader
from prepkit.objects import zero_masters
from prepkit.objects.names import known_bases
from prepkit.saving import torch_state, zero_state
from prepkit.saving.contents import Contents


def is_deepspeed(model: Module) -> bool:
    """True where DeepSpeed holds the model."""
    return "DeepSpeedEngine" in known_bases(type(model))  # by name, so that DeepSpeed need not be there


def held(model: Module, optimizer: Any) -> Contents:
    """Model and optimizer as they are; nothing of them is changed. Raises ``RunRefused`` for what cannot be read."""
    return zero_state.held(model, optimizer) if is_deepspeed(model) else torch_state.held(model, optimizer)


def filled(
    model: Module, optimizer: Any, stored: Mapping[str, tuple[int, ...] | None], groups: list[dict[str, Any]]
) -> AbstractContextManager[Contents]:
    """Yield what is to be filled from a checkpoint that holds these names; put it in place afterwards."""
    if is_deepspeed(model):
        return zero_state.filled(model, optimizer, stored, groups)
    return torch_state.filled(model, optimizer, stored, groups)


def stepping(model: Module, optimizer: Any) -> Any:
    """The optimizer that does the work: under DeepSpeed the one inside its own."""
    return zero_masters.base(model) if optimizer is not None and is_deepspeed(model) else optimizer


def engine_state(model: Module) -> dict[str, Any]:
    """The engine's own counts as plain data; empty for torch's engines."""
    return zero_state.engine_state(model) if is_deepspeed(model) else {}


def set_engine_state(model: Module, counted: dict[str, Any] | None) -> None:
    """Put back what ``engine_state`` gave; that of another engine is left out."""
    if counted and is_deepspeed(model):
        zero_state.set_engine_state(model, counted)


def of_this_rank(loaders: Sequence[Any]) -> dict[str, Any]:
    """Random states of Python, numpy, torch and the accelerator, and the ``state_dict()`` of loaders that have one."""
    return {"random": random_states(), "loaders": [one.state_dict() if positioned(one) else None for one in loaders]}


def on_any_ranks(loaders: Sequence[Any]) -> list[Any]:
    """Positions of prepared loaders, as they hold for every rank of any number; None for loaders of the user's own."""
    same = {"loader": None}
    return [
        one.state_dict() | same | {"length": one.order_length} if isinstance(one, Loader) else None for one in loaders
    ]


def other_data(loaders: Sequence[Any], shared: Sequence[Any]) -> tuple[str, ...]:
    """Return where a pass that was under way would go on over another number of samples."""
    met = []
    for at, (loader, saved) in enumerate(zip(loaders, shared, strict=False)):
        if isinstance(loader, Loader) and saved and saved["consumed"]:
            before, now = saved.get("length", 0), loader.order_length
            if before and now and before != now:
                met.append(f"loaders[{at}] has {now}, and had {before}")
    return tuple(met)


def positioned(loader: Any) -> bool:
    """True where the loader knows its position."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def random_states() -> dict[str, Any]:
    """The states of all generators as plain data; numpy's only where it is loaded."""
    states = RandomState.now().data()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Put back what ``random_states`` gave. Changes the generators of the whole process."""
    RandomState.of_data(states).put_back()
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def set_positions(loaders: Sequence[Any], own: Sequence[Any], shared: Sequence[Any], *, same_ranks: bool) -> None:
    """Make every loader that knows its position go on from where it was saved.

    On another number of ranks they go on from what holds for any: a rank that was not there has nothing of its own, and
    what the others have of theirs, such as the state of a stream, is of another part of the data.
    """
    for at, loader in enumerate(loaders):
        common = shared[at] if at < len(shared) else None
        state = own[at] if at < len(own) and (same_ranks or common is None) else common
        if state is not None and positioned(loader):
            loader.load_state_dict(state)
