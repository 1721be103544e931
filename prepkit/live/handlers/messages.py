"""Texts about named modules and parameters that the checks of several backends share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.nn import Parameter

from prepkit.live.interpreter import HalfDone


def absent(kind: str, wanted: Iterable[str], there: Collection[str] | Mapping[str, object]) -> tuple[str, ...]:
    """One text for all the wanted names that the model does not have."""
    missing = [name for name in wanted if name not in there]
    return (f"the model has no {kind} {listed(missing)}; build the plan again from this model",) if missing else ()


def listed(found: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    shown = ", ".join(name or "'' (the root)" for name in found[:5])
    return shown + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def with_gradient(wanted: Iterable[str], held: Mapping[str, Parameter]) -> tuple[str, ...]:
    """One text for all wanted parameters whose gradient a step would lose."""
    found = [name for name in wanted if name in held and held[name].grad is not None]
    lost = "a gradient that would be lost; call optimizer.zero_grad() first"
    return (f"{listed(found)}: {'holds' if len(found) == 1 else 'hold'} {lost}",) if found else ()


def overwritten(found: Sequence[str]) -> str | None:
    """What remains after values were written over others; None when there were none."""
    return f"{listed(found)}: the values from before are overwritten" if found else None


@contextmanager
def half_done(found: Sequence[str]) -> Iterator[None]:
    """While tensors that had values are written: an error then says that these are lost."""
    try:
        yield
    except Exception as error:
        if (said := overwritten(found)) is None:
            raise
        raise HalfDone(f"{error}; {said}") from error
