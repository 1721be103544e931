"""The loop on a page: its states, and for each event what follows and which rules are asked before it counts."""

from __future__ import annotations

from typing import get_args

from prepkit.facts import loop as events
from prepkit.facts.loop import LoopPlan, LoopState
from prepkit.findings import Severity
from prepkit.loop import Advanced, advance, orders
from prepkit.rules.run.loop import ASKED

_WITH = {
    events.BatchRead: (0,),
    events.PassEnded: (0,),
    events.Averaging: (None,),
    events.Resumed: (0,),
    events.Called: ("ready.ranks.reduce()",),
}
"""Arguments of the events that have no defaults."""
_SHOWN = LoopPlan(accumulation=2, ticks=1)
_BEFORE: dict[type, tuple[tuple[str, LoopState], ...]] = {
    events.Step: (
        ("window not full", LoopState(backwards=1, averaged=True, averaging=True)),
        ("window full", LoopState(micro_batches=1, backwards=1, averaged=True, averaging=True)),
    ),
    events.LeftOut: (("", LoopState(backwards=1)),),
}
"""States in which an event is shown; the others in a new loop."""


def diagram() -> str:
    """The states between two windows."""
    return "\n".join(
        (
            "```text",
            "stateDiagram-v2",
            "    [*] --> between: apply",
            "    between: between micro-batches<br/>save and resume where the window is new, evaluating",
            "    inside: in a micro-batch<br/>its gradients wait for step",
            "    ending: at the end of a window<br/>look, clip, step",
            "    between --> inside: backward",
            "    inside --> inside: backward after more=True",
            "    inside --> between: step, window not full",
            "    inside --> between: skip, first of its window",
            "    inside --> ending: step, window full",
            "    ending --> between: stepped, or overflowed",
            "    ending --> inside: refused, nothing stepped",
            "    between --> [*]: close",
            "```",
        )
    )


def table() -> str:
    """Each event, the orders that follow with an accumulation of 2, and the rules that are asked first."""
    lines = ["| event | what follows | refused or warned of by |", "|---|---|---|"]
    for kind in get_args(events.Event):
        rules = ASKED.get(kind, ())
        asked = ", ".join(
            f"[{rule.id.removeprefix('loop.')}](reference/rules.md#{rule.id.replace('.', '')})"
            + (" (warning)" if rule.severity is Severity.WARNING else "")
            for rule in rules
        )
        for when, state in _BEFORE.get(kind, (("", LoopState()),)):
            text = " ".join((kind.__doc__ or "").split()).replace("``", "`")
            lines.append(f"| {text}{f' *{when}*' if when else ''} | {_follows(kind, state)} | {asked} |")
            asked = "" if when else asked
    return "\n".join(lines)


def _follows(kind: type, state: LoopState) -> str:
    done = advance(_SHOWN, state, kind(*_WITH.get(kind, ())))
    assert isinstance(done, Advanced), f"{kind.__name__} counts where it is shown"
    return ", ".join(map(_said, done.orders)) or "-"


def _said(order: orders.Order) -> str:
    match order:
        case orders.Average(on=on):
            return "average in the next backward" if on else "do not average in the next backward"
        case orders.RunBackward(divide_by=divide_by):
            return f"run backward on the loss, divided by {divide_by}"
        case _:
            text = (type(order).__doc__ or "").strip().split("\n", maxsplit=1)[0].rstrip(".")
            return text[0].lower() + text[1:]


def part() -> str:
    """Diagram and table."""
    return f"{diagram()}\n\n{table()}"
