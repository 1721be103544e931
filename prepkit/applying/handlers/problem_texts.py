"""Texts about named modules and parameters that the checks of several backends share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.nn import Parameter

from prepkit.interpreter import HalfDone


def absent(kind: str, wanted: Iterable[str], existing: Collection[str] | Mapping[str, object]) -> tuple[str, ...]:
    """One text for all the wanted names that the model does not have."""
    missing = [name for name in wanted if name not in existing]
    return (f"the model has no {kind} {listed(missing)}; build the plan again from this model",) if missing else ()


def listed(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    shown = ", ".join(name or "'' (the root)" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def with_gradient(wanted: Iterable[str], params: Mapping[str, Parameter]) -> tuple[str, ...]:
    """One text for all wanted parameters whose gradient a step would lose."""
    names = [name for name in wanted if name in params and params[name].grad is not None]
    lost = "a gradient that would be lost; call optimizer.zero_grad() first"
    return (f"{listed(names)}: {'holds' if len(names) == 1 else 'hold'} {lost}",) if names else ()


def overwritten(names: Sequence[str]) -> str | None:
    """What remains after values were written over others; None when there were none."""
    return f"{listed(names)}: the values from before are overwritten" if names else None


@contextmanager
def half_done(names: Sequence[str]) -> Iterator[None]:
    """While tensors that had values are written: an error then says that these are lost."""
    try:
        yield
    except Exception as error:
        if (remains := overwritten(names)) is None:
            raise
        raise HalfDone(f"{error}; {remains}") from error
