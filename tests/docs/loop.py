"""The loop on a page: its states, and for each event what follows and which rules are asked before it counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prepkit.facts import loop as events
from prepkit.facts.loop import LoopPlan, LoopState
from prepkit.findings import Severity
from prepkit.loop import Advanced, advance, orders
from prepkit.rules.run.loop import ASKED
from tests.docs.findings import link

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


_CALLS: dict[str, events.Event] = {
    "backward": events.Backward(),
    "step": events.Step(),
    "step after accumulate(last=True)": events.Step(),
    "skip": events.LeftOut(),
    "zero_grad": events.Cleared(),
    "close": events.Closed(),
}
"""What a script calls, in the words of the diagram."""
_ENDS: dict[str, events.Event] = {
    "stepped": events.Stepped(),
    "overflowed": events.Stepped(applied=False),
    "refused, nothing stepped": events.StepFailed(),
    "failed after the optimizer acted": events.StepFailed(acted=True),
}
"""How the end of a window goes."""
_PLACES = {
    "window": "between windows",
    "between": "between micro-batches of a window",
    "inside": "in a micro-batch, whose gradients wait for step",
    "ending": "the end of a window",
    "failed": "a backward has raised",
    "[*]": "",
}


def _place(state: LoopState) -> str:
    if state.closed:
        return "[*]"
    if state.stepping:
        return "ending"
    if state.failed:
        return "failed"
    return "inside" if state.backwards else "between" if state.micro_batches else "window"


def moves(accumulation: int = 2) -> dict[tuple[str, str], list[str]]:
    """From place to place, and the events that lead there: ``advance`` asked about every state that can be reached."""
    plan = LoopPlan(accumulation=accumulation)
    reached, todo = {LoopState()}, [LoopState()]
    found: dict[tuple[str, str], list[str]] = {}
    while todo:
        state = todo.pop(0)
        for word, event in (_ENDS if state.stepping else _CALLS).items():
            begun = state._replace(cut_short=True) if "last=True" in word else state
            for said, after in _leads(plan, begun, event):
                edge = found.setdefault((_place(state), _place(after)), [])
                if (label := said or word) not in edge:
                    edge.append(label)
                if after not in reached and not after.closed:
                    reached.add(after)
                    todo.append(after)
    return {edge: words for edge, words in found.items() if edge[0] != edge[1]}


def _leads(plan: LoopPlan, state: LoopState, event: events.Event) -> Iterator[tuple[str, LoopState]]:
    done = advance(plan, state, event)
    if isinstance(done, Advanced):
        after = done.state._replace(told=frozenset())
        yield "", after
        if isinstance(event, events.Backward):
            failed = advance(plan, done.state, events.BackwardFailed())
            assert isinstance(failed, Advanced), "a backward may raise"
            yield "backward raises", failed.state._replace(told=frozenset())


def diagram() -> str:
    """The places of a loop with windows of two micro-batches, and what leads from one to another."""
    found = moves()
    places = [f"    {name}: {text}" for name, text in _PLACES.items() if text]
    edges = [f"    {start} --> {end}: {', '.join(words)}" for (start, end), words in found.items()]
    return "\n".join(("```mermaid", "stateDiagram-v2", *places, "    [*] --> window: apply", *edges, "```"))


def table() -> str:
    """Each event, the orders that follow with an accumulation of 2, and the rules that are asked first."""
    lines = ["| event | what follows | refused or warned of by |", "|---|---|---|"]
    for kind in get_args(events.Event):
        rules = ASKED.get(kind, ())
        asked = ", ".join(
            f"[{rule.id.removeprefix('loop.')}](reference/{link(rule.id)})"
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
