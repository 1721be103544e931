"""A loop that is resumed goes on as it would have, and what the driver has learnt is what ``advance`` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import prepkit as pk
from prepkit.facts import loop as events
from prepkit.facts.loop import Batches, LoopPlan, LoopState, ends_window
from prepkit.findings import RunRefused
from prepkit.loop import Advanced, Refused, advance, learned, orders
from prepkit.loop.advance import Junction
from prepkit.training import loop as driven

Done = list[tuple[Any, ...]]
"""What was done in each micro-batch: the number of its batch, whether its backward averaged, and the orders."""


class Script:
    """One rank of a training script: so many micro-batches of each batch, passes one after the other."""

    def __init__(self, plan: LoopPlan, batches: int, micro_batches: int) -> None:
        self.plan, self.batches, self.micro_batches = plan, batches, micro_batches
        self.state, self.averages = LoopState(), False
        self.say(events.Averaging(None))

    def say(self, event: Any, after: Callable[[Any], Any] = lambda done: done) -> tuple[Any, ...]:
        done = after(advance(self.plan, self.state, event))
        assert isinstance(done, Advanced), done
        self.state = done.state
        for order in done.orders:
            if isinstance(order, orders.Average):
                self.averages = order.on
        return tuple(order for order in done.orders if not isinstance(order, orders.Average))

    def train(self, begin: int, end: int) -> Iterator[tuple[Any, ...]]:
        """The batches from one to another, counted over all passes; a pass that is over is left before the next."""
        for at in range(begin, end):
            if at % self.batches == 0 and at > begin:
                self.say(events.PassEnded(0, exhausted=True, ends_windows=True))
            last = at % self.batches == self.batches - 1
            self.say(events.BatchRead(0, last=last, ends_windows=True, at_end=last))
            for _ in range(self.micro_batches):
                self.say(events.ForwardRan(averages=self.averages))
                averages = self.averages
                run, ended = self.say(events.Backward(averages=averages)), ends_window(self.plan, self.state)
                todo = self.say(events.Step())
                yield at, averages, run, todo, self.say(events.Stepped()) if ended else ()


def resumed(script: Script, steps: int) -> Script:
    """Another process, with what a checkpoint holds of the loop: the number of its steps, and what batches make."""
    assert script.say(events.Saved()) == ()
    again = Script(script.plan, script.batches, script.micro_batches)
    again.say(events.Resuming())
    again.say(events.Resumed(steps, learned(script.state)))
    return again


plans = st.builds(
    LoopPlan,
    accumulation=st.integers(1, 4),
    wrapper_averages=st.booleans(),
    average_each=st.booleans(),
    loss_scaled=st.booleans(),
    ticks=st.integers(0, 2),
)


def goes_on(plan: LoopPlan, batches: int, passes: int, each: int, resume: Callable[[Script, int], Script]) -> None:
    """Resume after every batch that leaves no window open, and compare with the run that went on.

    ``each``: micro-batches of a batch.
    """
    whole = Script(plan, batches, each)
    every = list(whole.train(0, batches * passes))
    for at in range(1, batches * passes):
        first = Script(plan, batches, each)
        before = list(first.train(0, at))
        assert before == every[: at * each]
        if not first.state.pending:
            assert list(resume(first, at).train(at, batches * passes)) == every[at * each :]


@given(plans, st.integers(1, 7), st.integers(1, 3), st.integers(1, 3))
def test_a_run_that_is_resumed_goes_on_as_the_run_that_was_not_stopped(
    plan: LoopPlan, batches: int, passes: int, each: int
) -> None:
    goes_on(plan, batches, passes, each, resumed)


@pytest.mark.parametrize("fault", ["micro_batches", "cut_short", "averaging", "batches"])
def test_the_law_notices_a_resume_that_is_somewhere_else(fault: str) -> None:
    wrong: dict[str, Any] = {"micro_batches": 1, "cut_short": True, "averaging": False, "batches": Batches()}

    def elsewhere(script: Script, steps: int) -> Script:
        again = resumed(script, steps)
        again.state = again.state._replace(**{fault: wrong[fault]})
        again.averages = again.averages or fault == "averaging"
        return again

    with pytest.raises(AssertionError):
        goes_on(LoopPlan(accumulation=3, wrapper_averages=True), 7, 2, 1 + 2 * (fault == "batches"), elsewhere)


# --- what the driver has learnt ---

happening = st.one_of(
    st.builds(events.BatchRead, st.integers(0, 1), st.booleans(), st.booleans(), st.booleans()),
    st.builds(events.PassEnded, st.integers(0, 1), st.booleans(), st.booleans(), st.booleans()),
    st.builds(events.Backward, st.booleans(), st.booleans(), averages=st.booleans()),
    st.builds(events.Step),
    st.builds(events.Stepped, st.booleans()),
    st.builds(events.StepFailed, st.booleans()),
    st.builds(events.AccumulateEntered, st.booleans()),
    st.builds(events.AccumulateLeft, st.booleans()),
    st.builds(events.Averaging, st.sampled_from([None, True, False])),
    st.builds(events.Called, st.just("ready.log()"), st.booleans()),
    *(
        st.just(kind())
        for kind in (
            events.BackwardFailed,
            events.Cleared,
            events.LeftOut,
            events.EvaluationEntered,
            events.EvaluationLeft,
            events.AveragesApplied,
            events.AveragesLeft,
            events.Saved,
            events.Resuming,
        )
    ),
)


def follow(told: list[Any], leaves_gradients: int) -> None:
    """The driver of a prepared model takes events in, and is where ``advance`` says, with its orders."""
    cfg = pk.Config(optimizer=pk.optim.SGD(lr=0.1), accumulation=2)
    loop = pk.apply(pk.build_plan(cfg, nn.Linear(2, 2))).loop
    state = loop.state
    for at, event in enumerate(told):
        if at == leaves_gradients:
            loop.leave_gradients()
        done = advance(loop.plan, state, event)
        if isinstance(done, Refused):
            with pytest.raises(RunRefused) as refused:
                loop.happens(event)
            assert refused.value.findings == done.findings
        else:
            assert loop.happens(event) == done.orders
            state = done.state
        assert loop.state == state
        assert loop.ends_window == ends_window(loop.plan, state)
    loop.release()


REPEATED = st.lists(happening, min_size=1, max_size=6).flatmap(
    lambda some: st.lists(st.sampled_from(some), max_size=40)
)
"""A few events in many orders, so that the loop comes to places where it has been."""


@pytest.mark.filterwarnings("ignore::prepkit.errors.FindingWarning")
@given(REPEATED, st.integers(0, 60), st.sampled_from([2, 5, driven.KNOWN]))
def test_what_the_driver_looks_up_is_what_advance_says(told: list[Any], leaves: int, known: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driven, "KNOWN", known)
        follow(told, leaves)


class WithoutType(dict[Any, Any]):
    """Turns by event alone: events of other types may be equal."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key[1], default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key[1], value)


def _without_type(plan: LoopPlan, state: LoopState) -> Junction:
    return Junction(state, ends_window(plan, state), WithoutType())


def _never_ends(_: LoopPlan, state: LoopState) -> Junction:
    return Junction(state, ends=False, turns={})


@pytest.mark.filterwarnings("ignore::prepkit.errors.FindingWarning")
@pytest.mark.parametrize("fault", [_without_type, _never_ends], ids=lambda fault: fault.__name__.strip("_"))
def test_the_law_notices_a_place_that_is_learnt_wrong(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Junction, "of", staticmethod(fault))
    told = [events.EvaluationEntered(), events.AveragesApplied(), events.AveragesLeft(), events.EvaluationLeft()]
    with pytest.raises(AssertionError):
        follow([*told, events.Backward(), events.Step(), events.Backward(), events.Step()], 99)


def test_the_law_notices_turns_that_outlive_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driven.Loop, "_forget_turns", lambda _: None)
    with pytest.raises((AssertionError, AttributeError)):
        follow([events.Step()], 0)
