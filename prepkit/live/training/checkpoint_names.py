"""What a checkpoint holds against what stands here, by name and both ways, before anything is read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # the names that torch itself looks up

SHOWN = 3
"""Names that an error shows of those that are missing, and of those that nobody here has."""


def stateless(state: Mapping[str, Any], stored: Collection[str]) -> frozenset[str]:
    """Parameters of which the checkpoint holds no optimizer state at all: they never had a gradient."""
    held: dict[str, bool] = {}
    for name, path in _paths(state).items():
        if path[:2] == ("optimizer", "state"):
            held[str(path[2])] = held.get(str(path[2]), False) or name in stored
    return frozenset(param for param, there in held.items() if not there)


def without_state_of(state: Mapping[str, Any], params: Collection[str]) -> dict[str, Any]:
    """The same state, and the same tensors, without the optimizer's of these parameters."""
    if not params:
        return dict(state)
    optimizer = state["optimizer"]
    kept = {name: value for name, value in optimizer["state"].items() if name not in params}
    return {**state, "optimizer": {**optimizer, "state": kept}}


def problems(wanted: Mapping[str, Any], stored: Collection[str]) -> str:
    """What one has and the other lacks, in words; empty where they fit.

    Without an optimizer here, as for inference, what the checkpoint holds beside the model is not looked at.
    """
    names = _paths(wanted)
    missing = [name for name in names if name not in stored]
    extra = list(_unknown(wanted, names, stored))
    lacks = f"it lacks {_listed(missing)}" if missing else ""
    holds = f"it holds {_listed(extra)}, which nothing here has" if extra else ""
    return "; ".join(part for part in (lacks, holds) if part)


def _unknown(wanted: Mapping[str, Any], names: Collection[str], stored: Collection[str]) -> Iterator[str]:
    """Names in the checkpoint that nothing here has.

    Options of groups and schedulers differ between torch's versions: of those only a whole object that is missing here
    counts.
    """
    for name in stored:
        kind, _, rest = name.partition(".")
        if name in names or (kind != "model" and "optimizer" not in wanted):
            continue
        if kind == "model" or rest.startswith("state.") or kind not in wanted:
            yield name


def _paths(state: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Name in a checkpoint to the keys that lead to the value."""
    return dict(flatten_state_dict(dict(state))[1])


def _listed(names: list[str]) -> str:
    text = ", ".join(sorted(names)[:SHOWN])
    return text if len(names) <= SHOWN else f"{text} and {len(names) - SHOWN} more"
