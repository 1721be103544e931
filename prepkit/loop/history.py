"""What has happened to a loop lately: kept short, and shown with counts where it repeats itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from attrs import define, field

from prepkit.facts import loop as events

KEPT = 96
"""Events that are kept."""
_LONGEST = 12
"""Events of the longest turn that is recognised as one that repeats itself."""


@define(eq=False, repr=False)
class History:
    """The last events of a loop, the newest last. ``str`` is a line for each turn, with how often it came in a row."""

    events: deque[Any] = field(factory=lambda: deque(maxlen=KEPT))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def lines(self) -> tuple[str, ...]:
        """Text such as ``3 x batch, backward, step``."""
        turns = folded([word for event in self.events if (word := said(event))])
        return tuple(f"{times} x {', '.join(turn)}" if times > 1 else ", ".join(turn) for times, turn in turns)

    def __str__(self) -> str:
        return "\n".join(self.lines())


def said(event: Any) -> str:
    """An event in a word or two, with what is unusual about it; empty for what follows from another."""
    match event:
        case events.BatchRead():
            return "last batch" if event.last else "batch"
        case events.PassEnded():
            return "pass ended" if event.exhausted else "pass left"
        case events.ForwardRan():
            return "forward" if event.grad else "forward without gradients"
        case events.Backward():
            options = [name for name, given in (("more", event.more), ("mean_over", event.weighed)) if given]
            return f"backward({', '.join(options)})" if options else "backward"
        case events.Step():
            return "step(closure)" if event.closure else "step"
        case events.Stepped():
            return "stepped" if event.applied else "overflowed"
        case events.SteppedByHand():
            return f"{event.inner}.step() by hand" if event.inner else f"{event.call} by hand"
        case events.AccumulateEntered(last=True):
            return "accumulate(last=True)"
        case events.Resumed():
            return f"resumed at step {event.steps}"
        case events.Called():
            return "" if event.call == "ready.accumulate()" else event.call
        case _:
            return _WORDS.get(type(event), "")


_WORDS: dict[type, str] = {
    events.BackwardFailed: "backward failed",
    events.StepFailed: "step failed",
    events.Cleared: "zero_grad",
    events.LeftOut: "skip",
    events.EvaluationEntered: "evaluating",
    events.EvaluationLeft: "evaluated",
    events.AveragesApplied: "averages applied",
    events.AveragesLeft: "averages left",
    events.Saved: "save",
    events.Closed: "close",
}


def folded(words: list[str]) -> list[tuple[int, list[str]]]:
    """The words as turns, each with how often it came in a row.

    >>> folded(["a", "b", "a", "b", "a", "b", "c"])
    [(3, ['a', 'b']), (1, ['c'])]
    """
    turns: list[tuple[int, list[str]]] = []
    at = 0
    while at < len(words):
        sizes = range(1, min(_LONGEST, len(words) - at) + 1)
        times, size = max(((_repeats(words, at, size), size) for size in sizes), key=_saved)
        turn = words[at : at + size] if times > 1 else [words[at]]
        if times == 1 and turns and turns[-1][0] == 1:
            turns[-1][1].extend(turn)
        else:
            turns.append((times, turn))
        at += times * len(turn)
    return turns


def _saved(found: tuple[int, int]) -> tuple[int, int]:
    times, size = found
    return (times - 1) * size, -size


def _repeats(words: list[str], at: int, size: int) -> int:
    times, turn = 1, words[at : at + size]
    while words[at + times * size : at + (times + 1) * size] == turn:
        times += 1
    return times
