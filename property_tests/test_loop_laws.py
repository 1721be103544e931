"""Laws of the loop: whatever is called in whatever order, each micro-batch counts once, averaged and divided once.

Gradients are numbers here: for each rank's loss of each micro-batch the weight with which it is in the gradient. The
engine does what orders say, and what torch does unasked: DDP's reducer averages one backward per forward of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from prepkit.facts import loop as events
from prepkit.facts.loop import Gradients, LoopPlan, LoopState, ends_window
from prepkit.findings import Severity
from prepkit.loop import Advanced, Refused, advance, orders

RANKS = 2
Loss = tuple[Any, ...]
"""Rank, micro-batch and number of the loss within it."""
Gradient = dict[Loss, Fraction]
SCALE = 1024
"""That of float16, which is taken out before the optimizer acts."""
ACCEPTED = ("loop.scheduler-stepped", "loop.saved-evaluating", "loop.own-loop-unaveraged")
"""Errors that leave gradients as they are, and that a config may accept."""
MODEST = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
BRIEF = settings(MODEST, max_examples=500, database=None, phases=(Phase.generate,), derandomize=True)


class Engine:
    """Two ranks that do what they are told; ``averaged`` is in the gradient that is stepped, ``own`` not yet."""

    def __init__(self, plan: LoopPlan) -> None:
        self.plan = plan
        self.own: list[Gradient] = [{} for _ in range(RANKS)]
        self.averaged: Gradient = {}
        self.averages = False
        self.awake = False
        """DDP's reducer waits for a backward."""
        self.tokens = 0

    @property
    def empty(self) -> bool:
        return not self.averaged and not any(self.own)

    def forward(self) -> None:
        self.awake = self.awake or self.averages

    def backward(self, order: orders.RunBackward, micro_batch: int, number: int, tokens: tuple[int, ...]) -> None:
        by = self.plan.accumulation if order.by_engine else order.divide_by
        for rank, grads in enumerate(self.own):
            weight = Fraction(tokens[rank] if order.weigh else 1, by) * (SCALE if order.scale else 1)
            key = (rank, micro_batch, number)
            grads[key] = grads.get(key, Fraction(0)) + weight
        self.tokens += sum(tokens) if order.weigh else 0
        if self.averages and (self.awake or not self.plan.wrapper_averages):
            self.awake = False
            for grads in self.own:
                for key, weight in grads.items():
                    self.averaged[key] = self.averaged.get(key, Fraction(0)) + weight / RANKS
                grads.clear()

    def clear(self) -> None:
        self.averaged, self.own, self.tokens = {}, [{} for _ in range(RANKS)], 0


class LoopMachine(RuleBasedStateMachine):
    """A user who calls everything in any order, and takes no refusal for an answer."""

    advance: Callable[..., Any] = staticmethod(advance)

    @initialize(
        accumulation=st.integers(1, 3),
        kind=st.sampled_from(["plain", "wrapper", "engine", "hidden"]),
        each=st.booleans(),
        ticks=st.integers(0, 2),
        swaps=st.booleans(),
        scaled=st.booleans(),
        clears=st.sampled_from([True, True, False]),
        closure=st.sampled_from(["", "", "LBFGS"]),
        accepted=st.sets(st.sampled_from(ACCEPTED)),
    )
    def begin(
        self,
        accumulation: int,
        kind: str,
        each: bool,
        ticks: int,
        swaps: bool,
        scaled: bool,
        clears: bool,
        closure: str,
        accepted: set[str],
    ) -> None:
        self.plan = LoopPlan(
            accumulation=accumulation,
            loss_scaled=scaled and kind != "engine",
            clears=clears,
            wants_closure=closure if accumulation == 1 and not scaled and kind != "engine" else "",
            accepted=frozenset(accepted),
            swaps_weights=swaps,
            wrapper_averages=kind == "wrapper",
            engine_steps=kind == "engine",
            shows_gradients=kind in ("plain", "wrapper"),
            loses_gradients=kind == "hidden",
            average_each=each and kind != "engine",
            ticks=ticks,
        )
        self.state, self.engine = LoopState(), Engine(self.plan)
        self.micro_batch, self.losses, self.window = 0, 0, []  # type: ignore[var-annotated]
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.stepped: set[int] = set()
        self.ticked = self.ends = 0
        self.foreign = False
        self.heard: set[str] = set()
        self.say(events.Averaging(None))

    # --- the driver ---

    def say(self, event: Any, tokens: tuple[int, ...] = (1, 1)) -> bool:
        """The event counts, and what follows is done; or it is refused, and is refused again."""
        before = self.state
        done = type(self).advance(self.plan, before, event)
        if isinstance(done, Refused):
            assert any(one.severity is Severity.ERROR for one in done.findings)
            assert type(self).advance(self.plan, before, event) == done
            return False
        assert isinstance(done, Advanced)
        for one in done.findings:
            assert one.severity is Severity.WARNING or one.rule in self.plan.accepted
            assert one.rule not in self.heard, "it is reported once"
        self.heard |= {one.rule for one in done.findings}
        self.state = done.state
        for order in done.orders:
            self.carry_out(order, tokens)
        return True

    def carry_out(self, order: orders.Order, tokens: tuple[int, ...]) -> None:
        match order:
            case orders.Average(on=on):
                self.engine.averages = on
            case orders.RunBackward():
                self.engine.backward(order, self.micro_batch, self.losses, tokens)
                self.losses += 1
            case orders.DivideByTokens(micro_batches=whole):
                factor = Fraction(whole * RANKS, self.engine.tokens)
                self.engine.averaged = {key: weight * factor for key, weight in self.engine.averaged.items()}
            case orders.StepOptimizer() | orders.StepEngine(last=True):
                self.look_at_what_is_stepped()
                if self.plan.engine_steps:
                    self.engine.clear()
            case orders.Tick(times=times):
                self.ticked += times
            case orders.Recover(drop=drop, failed=failed):
                self.engine.awake = self.engine.awake and not failed
                if drop:
                    self.engine.clear()
            case orders.Clear():
                self.engine.clear()

    def look_at_what_is_stepped(self) -> None:
        """The law: each loss of each micro-batch of the window, once, averaged and divided as planned."""
        wanted: Gradient = {}
        scale = SCALE if self.plan.loss_scaled else 1
        total = sum(sum(self.tokens[at]) for at, _ in self.window if at in self.tokens)
        for micro_batch, losses in self.window:
            for rank in range(RANKS):
                for number in range(losses):
                    weighed = micro_batch in self.tokens
                    share = Fraction(self.tokens[micro_batch][rank], total) if weighed else None
                    whole = Fraction(1, self.plan.accumulation * RANKS)
                    wanted[rank, micro_batch, number] = scale * (whole if share is None else share)
        assert self.engine.averaged == wanted
        assert not any(self.engine.own), "gradients of one rank alone wait for no step"
        assert not self.stepped & {at for at, _ in self.window}
        self.stepped |= {at for at, _ in self.window}

    def seen_before_backward(self) -> Gradients:
        """As the live driver looks."""
        state, there = self.state, not self.engine.empty
        seen = Gradients.THERE if there else Gradients.NONE
        if state.backwards and not state.more:
            return Gradients.UNKNOWN if self.plan.engine_steps else seen
        return seen if self.plan.shows_gradients else Gradients.UNKNOWN

    def seen_before_step(self) -> Gradients:
        """As the live driver looks."""
        if not (ends_window(self.plan, self.state) and self.plan.shows_gradients):
            return Gradients.UNKNOWN
        return Gradients.NONE if self.engine.empty else Gradients.THERE

    def drop_micro_batch(self) -> None:
        self.micro_batch, self.losses = self.micro_batch + 1, 0

    # --- what a user calls ---

    @rule(loader=st.integers(0, 1), last=st.booleans())
    def read_batch(self, loader: int, last: bool) -> None:
        self.say(events.BatchRead(loader, last=last, ends_windows=loader == 0, at_end=last and loader == 0))

    @rule(exhausted=st.booleans())
    def end_pass(self, exhausted: bool) -> None:
        self.say(events.PassEnded(0, exhausted=exhausted, ends_windows=True))

    @rule(more=st.booleans(), past=st.booleans(), weighed=st.booleans(), tokens=st.tuples(*[st.integers(1, 9)] * RANKS))
    def backward(self, more: bool, past: bool, weighed: bool, tokens: tuple[int, ...]) -> None:
        weighed = weighed and not more
        if not self.plan.clears and self.state.backwards:
            return  # such a script says by its steps where a micro-batch ends
        if not past and self.say(events.ForwardRan(averages=self.engine.averages)):
            self.engine.forward()
        again = self.state.backwards and not self.state.more
        event = events.Backward(
            more=more, weighed=weighed, averages=self.engine.averages, gradients=self.seen_before_backward()
        )
        fresh = self.micro_batch + 1 if again else self.micro_batch
        before, self.micro_batch = (self.micro_batch, self.losses), fresh
        self.losses = 0 if again else self.losses
        if not self.say(event, tokens):
            self.micro_batch, self.losses = before
        elif weighed:
            self.tokens[self.micro_batch] = tokens

    @rule(
        times=st.integers(1, 3),
        weighed=st.booleans(),
        past=st.sampled_from([False, False, True]),
        overflows=st.booleans(),
    )
    def train(self, times: int, weighed: bool, past: bool, overflows: bool) -> None:
        """As it should be, but that some call the module inside the wrapper."""
        for at in range(times):
            self.backward(more=False, past=past, weighed=weighed, tokens=(2 + at, 1))
            self.step(overflows=overflows)

    @precondition(lambda self: self.plan.wrapper_averages and self.plan.clears)
    @rule()
    def train_in_no_sync(self) -> None:
        """DDP's own ``no_sync``, of which nobody hears."""
        before, self.engine.averages = self.engine.averages, False
        self.backward(more=False, past=False, weighed=False, tokens=(1, 1))
        self.engine.averages = before
        self.step(overflows=False)

    @precondition(lambda self: self.plan.shows_gradients and not self.state.pending)
    @rule()
    def backward_by_hand(self) -> None:
        self.engine.averaged["by hand",] = Fraction(1)

    @precondition(lambda self: self.plan.shows_gradients)
    @rule()
    def set_gradients_to_none(self) -> None:
        self.engine.clear()

    @rule(overflows=st.booleans(), moved=st.sampled_from([None, None, (3, 4)]))
    def step(self, overflows: bool, moved: tuple[int, int] | None = None) -> None:
        ends, seen = ends_window(self.plan, self.state), self.seen_before_step()
        window = list(self.window)
        if self.state.backwards:
            self.window.append((self.micro_batch, self.losses))
        ticked = self.ticked
        moved = moved if ends and self.plan.ticks else None
        if not self.say(events.Step(gradients=seen, moved=moved)):
            self.window = window
            return
        assert not self.plan.wants_closure
        assert moved is None or "loop.scheduler-stepped" in self.plan.accepted
        self.drop_micro_batch()
        if not ends:
            return
        assert self.say(events.Stepped(applied=not overflows))
        assert self.ticked - ticked == (0 if overflows else self.plan.ticks)
        if not (self.plan.clears or self.plan.engine_steps):
            assert not self.engine.empty, "the script clears it"
            assert self.say(events.Cleared())
            self.engine.clear()
        assert self.engine.empty, "what was stepped is cleared"
        self.window = []

    @rule(acted=st.booleans())
    def step_fails(self, acted: bool) -> None:
        """Something raises: once the optimizer has begun, its gradients are never stepped a second time."""
        if not ends_window(self.plan, self.state):
            return
        before = self.state
        done = type(self).advance(self.plan, before, events.Step(gradients=self.seen_before_step()))
        if isinstance(done, Refused):
            return
        self.state = done.state
        assert self.say(events.StepFailed(acted))
        if not acted:
            assert self.state == before._replace(told=self.state.told), "it may be asked for again"
            return
        assert self.engine.empty
        assert not self.state.pending
        self.window = []
        self.drop_micro_batch()
        assert not self.say(events.Step()), "there is nothing to step"

    @precondition(lambda self: self.plan.accumulation == 1 and not self.plan.engine_steps)
    @rule(times=st.integers(1, 3))
    def step_with_closure(self, times: int) -> None:
        if not self.engine.empty or self.state.pending:
            return
        before = self.state
        done = type(self).advance(self.plan, before, events.Step(closure=True))
        if isinstance(done, Refused):
            return
        self.state = done.state
        for _ in range(times):
            assert self.say(events.Cleared())
            self.engine.clear()
            self.drop_micro_batch()
            self.say(events.ForwardRan(averages=self.engine.averages))
            self.engine.forward()
            assert self.say(events.Backward(averages=self.engine.averages, gradients=self.seen_before_backward()))
            self.window = [(self.micro_batch, 1)]
        self.carry_out(done.orders[-1], (1, 1))
        assert self.say(events.Stepped())
        self.engine.clear()
        self.window = []
        self.drop_micro_batch()

    @rule()
    def zero_grad(self) -> None:
        if self.say(events.Cleared()):
            self.engine.clear()

    @rule()
    def skip(self) -> None:
        if self.say(events.LeftOut()):
            self.drop_micro_batch()

    @rule(cleared=st.booleans())
    def backward_fails(self, cleared: bool) -> None:
        """It has added what it has added: nothing goes on before that is left out, and with it the window so far."""
        before = self.state
        self.backward(more=False, past=False, weighed=False, tokens=(1, 1))
        if self.state == before:
            return
        assert self.say(events.BackwardFailed())
        self.engine.awake = self.plan.wrapper_averages
        for event in (events.Backward(), events.Step(), events.Saved(), events.Resuming(), events.EvaluationEntered()):
            assert not self.say(event)
        assert self.say(events.Cleared() if cleared else events.LeftOut())
        assert not self.state.pending
        assert self.engine.empty
        assert not self.engine.awake, "it waits for nothing"
        self.window = []
        self.drop_micro_batch()

    @rule(last=st.booleans())
    def accumulate(self, last: bool) -> None:
        self.say(events.AccumulateEntered(last))

    @rule(last=st.booleans())
    def accumulate_left(self, last: bool) -> None:
        self.say(events.AccumulateLeft(last))

    @rule()
    def evaluate(self) -> None:
        if self.say(events.EvaluationEntered()):
            assert not (self.state.backwards and (self.plan.loses_gradients or self.plan.engine_steps))
            assert not self.say(events.Backward())
            assert not self.say(events.Step())
            swaps = self.plan.swaps_weights and "loop.saved-evaluating" not in self.plan.accepted
            assert swaps or self.state.pending or self.say(events.Saved())
            assert not swaps or not self.say(events.Saved())
            assert self.say(events.EvaluationLeft())

    @rule(averaged=st.booleans())
    def save_or_resume(self, averaged: bool) -> None:
        """They commute with all else: what they find is whole, and they leave it so."""
        if averaged:
            self.say(events.AveragesApplied())
            assert not self.say(events.Saved())
            self.say(events.AveragesLeft())
        before = self.state
        if self.say(events.Saved()):
            assert not self.window
            assert self.say(events.Resuming())
            assert self.say(events.Resumed(steps=3))
            assert self.state == before._replace(told=self.state.told)

    @rule()
    def step_by_hand(self) -> None:
        before, plan = self.state, self.plan
        window = [*self.window, (self.micro_batch, self.losses)] if before.backwards else list(self.window)
        if not self.say(events.SteppedByHand()):
            assert self.state == before
        elif before.used:
            assert plan.accumulation == 1
            assert not any((plan.engine_steps, plan.ticks, plan.loss_scaled, before.weighed))
            assert not self.state.pending, "its window is over"
            if before.averaged and not before.cleared and not before.more:
                self.window = window
                self.look_at_what_is_stepped()
            self.engine.clear()  # as the user's zero_grad does, of which the loop may hear nothing
            self.window = []
            self.drop_micro_batch()

    @rule(averaged=st.booleans(), scaled=st.booleans(), inner=st.sampled_from(["", "Adam"]))
    def step_by_hand_of_another_kind(self, averaged: bool, scaled: bool, inner: str) -> None:
        """A loop of the user's own, of which the loop of the plan keeps out; an inner optimizer reaches no weight."""
        before, accepts = self.state, "loop.own-loop-unaveraged" in self.plan.accepted
        if before.used and not inner:
            return  # ``step_by_hand``
        counts = self.say(events.SteppedByHand(averaged=averaged, scaled=scaled, inner=inner))
        assert counts is (not inner and (averaged or accepts))
        assert self.state._replace(told=before.told, by_hand=before.by_hand) == before
        assert self.state.by_hand is (counts or before.by_hand)

    @precondition(lambda self: self.plan.clears and not self.state.pending)
    @rule(forced=st.sampled_from([True, False, None]))
    def average(self, forced: bool | None) -> None:
        """As inside accelerate's ``no_sync``, which is left again."""
        assert self.say(events.Averaging(forced))
        assert forced is None or self.engine.averages is forced
        self.train(times=1, weighed=False, past=False, overflows=False)
        assert forced is not False or self.state.pending or not self.plan.averages or self.plan.accumulation > 1
        assert self.say(events.Averaging(None))

    @rule(counts=st.booleans())
    def call(self, counts: bool) -> None:
        before = self.state
        assert self.say(events.Called("ready.log()", counts))
        assert self.state == before._replace(told=self.state.told)

    @rule()
    def close_a_copy(self) -> None:
        """Nothing goes on in a closed loop; this one does."""
        done = type(self).advance(self.plan, self.state, events.Closed())
        assert isinstance(done, Advanced)
        called = events.Called("ready.log()")
        for event in (events.Backward(), events.Step(), events.Saved(), events.Resuming(), events.LeftOut(), called):
            refused = type(self).advance(self.plan, done.state, event)
            assert isinstance(refused, Refused)
            assert "loop.closed" in {one.rule for one in refused.findings}


TestLoop = LoopMachine.TestCase
TestLoop.settings = MODEST


def _without_division(done: Any, *_: Any) -> Any:
    todo = tuple(one._replace(divide_by=1) if isinstance(one, orders.RunBackward) else one for one in done.orders)
    return done._replace(orders=todo)


def _without_tokens(done: Any, *_: Any) -> Any:
    return done._replace(orders=tuple(one for one in done.orders if not isinstance(one, orders.DivideByTokens)))


def _clears_inside(done: Any, _: LoopState, event: Any) -> Any:
    inside = isinstance(event, events.Step) and not done.state.stepping
    return done._replace(orders=(*done.orders, orders.Clear())) if inside else done


def _may_step_again(done: Any, before: LoopState, event: Any) -> Any:
    """Whatever the optimizer had begun to do."""
    if not isinstance(event, events.StepFailed):
        return done
    return done._replace(state=before._replace(stepping=False), orders=())


def _clears_nothing(done: Any, *_: Any) -> Any:
    return done._replace(orders=tuple(one for one in done.orders if not isinstance(one, orders.Clear)))


def _never_averages(done: Any, *_: Any) -> Any:
    return done._replace(orders=tuple(one for one in done.orders if not isinstance(one, orders.Average)))


def _forgets_to_count(done: Any, before: LoopState, _: Any) -> Any:
    return done._replace(state=done.state._replace(micro_batches=before.micro_batches))


def _backward_twice(done: Any, *_: Any) -> Any:
    again = tuple(one for one in done.orders if isinstance(one, orders.RunBackward))
    return done._replace(orders=(*done.orders, *again))


def _ticks_always(done: Any, _: LoopState, event: Any) -> Any:
    overflowed = isinstance(event, events.Stepped) and not event.applied
    return done._replace(orders=(*done.orders, orders.Tick(1))) if overflowed else done


def _arms_always(done: Any, *_: Any) -> Any:
    return done._replace(state=done.state._replace(armed=True))


def _recovers_nothing(done: Any, *_: Any) -> Any:
    return done._replace(orders=tuple(one for one in done.orders if not isinstance(one, orders.Recover)))


def _scales_nothing(done: Any, *_: Any) -> Any:
    todo = tuple(one._replace(scale=False) if isinstance(one, orders.RunBackward) else one for one in done.orders)
    return done._replace(orders=todo)


def _clears_what_the_script_keeps(done: Any, _: LoopState, event: Any) -> Any:
    stepped = isinstance(event, events.Stepped)
    return done._replace(orders=(*done.orders, orders.Clear())) if stepped else done


def _tells_again(done: Any, before: LoopState, _: Any) -> Any:
    return done._replace(state=done.state._replace(told=before.told))


def _opens_again(done: Any, *_: Any) -> Any:
    return done._replace(state=done.state._replace(closed=False))


def _hears_of_no_forced_average(done: Any, before: LoopState, event: Any) -> Any:
    return Advanced(before, ()) if isinstance(event, events.Averaging) and event.forced is not None else done


def _calls_count(done: Any, _: LoopState, event: Any) -> Any:
    called = isinstance(event, events.Called)
    return done._replace(state=done.state._replace(micro_batches=1)) if called else done


def _own_loop_is_used(done: Any, _: LoopState, event: Any) -> Any:
    by_hand = isinstance(event, events.SteppedByHand)
    return done._replace(state=done.state._replace(used=True)) if by_hand else done


FAULTS = (
    _scales_nothing,
    _clears_what_the_script_keeps,
    _tells_again,
    _opens_again,
    _hears_of_no_forced_average,
    _calls_count,
    _own_loop_is_used,
    _recovers_nothing,
    _without_division,
    _without_tokens,
    _clears_inside,
    _clears_nothing,
    _may_step_again,
    _never_averages,
    _forgets_to_count,
    _backward_twice,
    _ticks_always,
    _arms_always,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_the_laws_notice_a_planted_fault(fault: Callable[..., Any]) -> None:
    def wrong(plan: LoopPlan, state: LoopState, event: Any) -> Any:
        done = advance(plan, state, event)
        return done if isinstance(done, Refused) else fault(done, state, event)

    class Faulty(LoopMachine):
        advance = staticmethod(wrong)

    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(Faulty, settings=BRIEF)


@pytest.mark.parametrize(
    "removed",
    [
        *("backward-twice", "backward-failed", "past-the-wrapper", "never-averaged", "gradients-lost"),
        *("closure-wanted", "inner-optimizer-stepped", "own-loop-unaveraged", "scheduler-stepped"),
    ],
)
def test_the_laws_notice_a_rule_that_is_gone(removed: str) -> None:
    def without(plan: LoopPlan, state: LoopState, event: Any) -> Any:
        done = advance(evolve(plan, accepted=plan.accepted | {f"loop.{removed}"}), state, event)
        if isinstance(done, Refused):
            return done
        rest = tuple(one for one in done.findings if one.rule != f"loop.{removed}")
        told = done.state.told - ({f"loop.{removed}"} - state.told)
        return done._replace(state=done.state._replace(told=told), findings=rest)

    class Lawless(LoopMachine):
        advance = staticmethod(without)

    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(Lawless, settings=BRIEF)
