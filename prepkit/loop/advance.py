"""One event after the other: where the loop is then, and what is to be done; or why the event is refused.

The table ``_AFTER`` has for each event the function that says what follows; ``docs/training-loop.md`` has the diagram,
which is drawn from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from prepkit.facts import loop as events
from prepkit.facts.loop import Batches, Event, LoopPlan, LoopState, Turn, ends_window
from prepkit.findings import Finding, Severity
from prepkit.loop import orders
from prepkit.loop.orders import Order
from prepkit.rules.run.loop import ASKED


class Advanced(NamedTuple):
    """An event that counts."""

    state: LoopState
    orders: tuple[Order, ...]
    findings: tuple[Finding, ...] = ()
    """Warnings, and errors that the config accepts; each rule's once in a run."""


class Junction(NamedTuple):
    """Where a loop is, and what it has learnt there: the same event, at the same place, leads to the same one again.

    Whoever goes on from place to place asks ``advance`` once for each, and hashes an event alone, not the whole state.
    """

    state: LoopState
    ends: bool
    """The micro-batch in use is the last of its window."""
    turns: dict[tuple[type, Event], tuple[Junction, tuple[Order, ...]]]
    """An event with its type, as those of other types may be equal, to the next place and the orders."""

    @classmethod
    def of(cls, plan: LoopPlan, state: LoopState) -> Junction:
        """Return where nothing is known yet."""
        return cls(state, ends_window(plan, state), {})


class Refused(NamedTuple):
    """An event that does not: the loop stays where it was."""

    findings: tuple[Finding, ...]


def advance(plan: LoopPlan, state: LoopState, event: Event) -> Advanced | Refused:
    """Return where the loop is after the event, and the orders that follow; or every error that refuses it.

    Pure. Warnings and accepted errors are reported once: the state remembers their rules.
    """
    asked = ASKED.get(type(event))
    found = _findings(plan, state, event, asked) if asked else ()
    if found and (refusing := tuple(one for one in found if _refuses(plan, one))):
        return Refused(refusing)
    after, todo = _AFTER[type(event)](plan, state, event)
    if found:
        after = after._replace(told=after.told | {finding.rule for finding in found})
    return Advanced(after, todo, found)


def _refuses(plan: LoopPlan, finding: Finding) -> bool:
    return finding.severity is Severity.ERROR and finding.rule not in plan.accepted


def _findings(plan: LoopPlan, state: LoopState, event: Event, asked: tuple[Any, ...]) -> tuple[Finding, ...]:
    turn = Turn(state, event, plan)
    found: tuple[Finding, ...] = ()
    for rule in asked:
        if hits := rule.check(turn):
            known = rule.id in state.told
            found += tuple(one for one in map(rule.found, hits) if not known or _refuses(plan, one))
    return found


ENOUGH = 16
"""Batches after which a number of micro-batches is taken for the usual one."""

Outcome = tuple[LoopState, tuple[Order, ...]]

_AVERAGE = {on: (orders.Average(on),) for on in (False, True)}
_LOOK: tuple[Any, ...] = (orders.Settle(), orders.AverageWhole(), orders.Look())


def averages(plan: LoopPlan, state: LoopState) -> bool:
    """The next backward averages gradients over the ranks."""
    if state.forced is not None:
        return state.forced
    return plan.average_each or ends_window(plan, state)


def _told(plan: LoopPlan, state: LoopState) -> Outcome:
    """The engine hears of averaging after each micro-batch: it may have another idea, as DDP's static graphs have."""
    on = averages(plan, state)
    return (state if on == state.averaging else state._replace(averaging=on)), _AVERAGE[on]


def _retold(plan: LoopPlan, state: LoopState) -> Outcome:
    """The engine hears of averaging where that has changed."""
    return (state, ()) if averages(plan, state) == state.averaging else _told(plan, state)


def _batch_read(plan: LoopPlan, state: LoopState, event: events.BatchRead) -> Outcome:
    if plan.accumulation == 1:  # every micro-batch ends its window
        return state, ()
    before = state.batches
    seen = _learned(before)
    late = before.late and not event.ends_windows
    expected = _expected(seen, event.loader)
    batches = Batches(event.loader, event.last, event.at_end, 0, expected, late, seen)
    return _retold(plan, state._replace(batches=batches))


def _pass_ended(plan: LoopPlan, state: LoopState, event: events.PassEnded) -> Outcome:
    if plan.accumulation == 1:
        return state, ()
    before = state.batches
    batches = Batches(
        at_end=event.at_end,
        late=event.exhausted if event.ends_windows else before.late,
        seen=_learned(before),
    )
    ended = event.ends_windows and event.exhausted and state.over_pass is not None
    return _retold(plan, state._replace(batches=batches, over_pass=ended or state.over_pass))


def _learned(batches: Batches) -> tuple[tuple[int, int, int], ...]:
    """Return what is known of other batches when another one comes: the last of a pass says nothing of others.

    A number of micro-batches that was seen often enough takes away from the others where it is seen again, so that a
    loop that goes on as before comes to a state that stays.
    """
    if batches.loader is None or not batches.trained or batches.last:
        return batches.seen
    counts = {(loader, made): times for loader, made, times in batches.seen}
    key = (batches.loader, batches.trained)
    if (times := counts.get(key, 0)) < ENOUGH:
        counts[key] = times + 1
    else:
        counts = {one: times - (one[0] == key[0] and one != key) for one, times in counts.items()}
    return tuple((*one, times) for one, times in counts.items() if times)


def learned(state: LoopState) -> tuple[tuple[int, int, int], ...]:
    """Return what a checkpoint holds of a loop between windows: how many micro-batches its batches usually make.

    A batch of which micro-batches are still to come counts nothing.
    """
    batches = state.batches
    return batches.seen if batches.trained < batches.expected else _learned(batches)


def _expected(seen: tuple[tuple[int, int, int], ...], loader: int) -> int:
    """Micro-batches that most batches of the loader made, the larger of two that are as frequent; 1 where none was."""
    return max(((times, made) for of, made, times in seen if of == loader), default=(0, 1))[1]


def _forward(plan: LoopPlan, state: LoopState, event: events.ForwardRan) -> Outcome:
    arms = plan.wrapper_averages and event.grad and event.averages and not state.armed
    return (state._replace(armed=True) if arms else state), ()


def _backward(plan: LoopPlan, state: LoopState, event: events.Backward) -> Outcome:
    after = state._replace(
        backwards=state.backwards + 1,
        more=event.more,
        cleared=False,
        used=True,
        weighed=event.weighed,
        armed=state.armed and not event.averages,
        averaged=event.averages,
    )
    divide_by = 1 if plan.engine_steps else plan.accumulation
    return after, (orders.RunBackward(plan.engine_steps, event.weighed, divide_by, plan.loss_scaled),)


def _step(plan: LoopPlan, state: LoopState, event: events.Step) -> Outcome:
    if ends_window(plan, state):
        return state._replace(stepping=True), _orders_of_step(plan, state, event)
    batches = state.batches
    after = state._replace(
        micro_batches=state.micro_batches + 1,
        backwards=0,
        more=False,
        cleared=False,
        batches=_trained(batches),
        over_pass=bool(state.over_pass),
    )
    after, told = _told(plan, after)
    return after, ((orders.StepEngine(last=False), *told) if plan.engine_steps else told)


def _trained(batches: Batches) -> Batches:
    """The batch in use has made one more micro-batch; outside of all passes nobody counts."""
    return batches if batches.loader is None else batches._replace(trained=batches.trained + 1)


def _orders_of_step(plan: LoopPlan, state: LoopState, event: events.Step) -> tuple[Order, ...]:
    divide = (orders.DivideByTokens(plan.accumulation),) if state.weighed else ()
    if plan.engine_steps:
        return (*_LOOK, *divide, orders.StepEngine(last=True))  # it divides its own gradients, inside its step
    if event.closure:
        return (orders.StepOptimizer(each=(*_LOOK, orders.Clip())),)
    return (*divide, *_LOOK, orders.Clip(), orders.StepOptimizer())


def _stepped(plan: LoopPlan, state: LoopState, event: events.Stepped) -> Outcome:
    """The scheduler comes last: it may raise, as after its last step, and the window is over all the same."""
    tick = (orders.Tick(plan.ticks),) if plan.ticks and event.applied else ()
    clear = (orders.Clear(),) if plan.clears and not plan.engine_steps else ()
    after, told = _told(plan, _with_window_over(state))
    return after, (*clear, *told, *tick)


def _step_failed(plan: LoopPlan, state: LoopState, event: events.StepFailed) -> Outcome:
    """Gradients that the optimizer has had are not stepped a second time."""
    if not event.acted:
        return state._replace(stepping=False), ()
    after, told = _told(plan, _with_window_over(state))
    return after, (*_recovery(state), orders.Clear(), *told)


def _with_window_over(state: LoopState) -> LoopState:
    return state._replace(
        micro_batches=0,
        backwards=0,
        more=False,
        cleared=False,
        averaged=False,
        weighed=None,
        cut_short=False,
        stepping=False,
        failed=False,
        batches=_trained(state.batches),
        over_pass=None,
    )


def _cleared(plan: LoopPlan, state: LoopState, event: events.Cleared) -> Outcome:
    if state.failed and not state.stepping:  # what is cleared is all that the window has
        return _left_out(plan, state, event)
    if state.stepping:  # a closure makes the gradients anew
        return state._replace(backwards=0, more=False), ()
    after = state._replace(more=False, cleared=state.backwards > 0, weighed=None)
    return after, ((orders.Recover(drop=True, failed=False),) if plan.engine_steps else ())  # ZeRO's leaves some


def _left_out(plan: LoopPlan, state: LoopState, event: events.LeftOut | events.Cleared) -> Outcome:
    """After a backward that has raised the whole window is left out: nobody can take back what it has added."""
    after = state._replace(backwards=0, more=False, cleared=False, armed=False, failed=False)
    if state.failed or not state.micro_batches:
        after = after._replace(weighed=None, averaged=False, micro_batches=0)
    clear = (orders.Clear(),) if state.backwards and isinstance(event, events.LeftOut) else ()
    after, told = _told(plan, after)
    return after, (orders.Recover(bool(state.backwards), state.failed), *clear, *told)


def _recovery(state: LoopState) -> tuple[Order, ...]:
    return (orders.Recover(drop=True, failed=True),) if state.failed else ()


def _by_hand(plan: LoopPlan, state: LoopState, event: events.SteppedByHand) -> Outcome:
    if state.used and not event.inner:  # its window was stepped, if not by the loop
        after, told = _told(plan, _with_window_over(state))
        return after, (orders.Settle(), *told)
    return (state if state.by_hand else state._replace(by_hand=True)), (orders.Settle(),)


def _accumulate(plan: LoopPlan, state: LoopState, event: events.AccumulateEntered) -> Outcome:
    return _retold(plan, state._replace(cut_short=state.cut_short or event.last))


def _accumulate_left(plan: LoopPlan, state: LoopState, event: events.AccumulateLeft) -> Outcome:
    return _retold(plan, state._replace(cut_short=state.cut_short and event.last))


def _averaging(plan: LoopPlan, state: LoopState, event: events.Averaging) -> Outcome:
    return _told(plan, state._replace(forced=event.forced))


def _resumed(plan: LoopPlan, state: LoopState, event: events.Resumed) -> Outcome:
    del plan  # the batch that was in use is one of before
    return (state._replace(batches=Batches(seen=event.seen)) if event.seen else state), ()


def _as_it_was(plan: LoopPlan, state: LoopState, event: Event) -> Outcome:
    del plan, event
    return state, ()


_AFTER: Mapping[type, Callable[[LoopPlan, LoopState, Any], Outcome]] = {
    events.BatchRead: _batch_read,
    events.PassEnded: _pass_ended,
    events.ForwardRan: _forward,
    events.Backward: _backward,
    events.BackwardFailed: lambda _, state, __: (state._replace(failed=True), ()),
    events.Step: _step,
    events.Stepped: _stepped,
    events.StepFailed: _step_failed,
    events.Cleared: _cleared,
    events.SteppedByHand: _by_hand,
    events.AccumulateEntered: _accumulate,
    events.AccumulateLeft: _accumulate_left,
    events.Averaging: _averaging,
    events.LeftOut: _left_out,
    events.EvaluationEntered: lambda _, state, __: (state._replace(evaluating=state.evaluating + 1), ()),
    events.EvaluationLeft: lambda _, state, __: (state._replace(evaluating=state.evaluating - 1), ()),
    events.AveragesApplied: lambda _, state, __: (state._replace(averages=state.averages + 1), ()),
    events.AveragesLeft: lambda _, state, __: (state._replace(averages=state.averages - 1), ()),
    events.Saved: _as_it_was,
    events.Resuming: _as_it_was,
    events.Resumed: _resumed,
    events.Called: _as_it_was,
    events.Closed: lambda _, state, __: (state._replace(closed=True), ()),
}
"""Type of an event to what it does; every event of ``facts.loop.Event`` is here."""
