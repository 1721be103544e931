"""Laws of the interpreter, for any plan and any failure."""

from __future__ import annotations

from typing import Any

from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from prepkit.interpreter import Done, Halted, Handler, interpret, recording


@frozen
class Return:
    """A step with a way back."""

    number: int
    undo_fails: bool


@frozen
class OneWay:
    """A step without."""

    number: int


@frozen
class World:
    """What is drawn: a plan, and where it fails, if it does."""

    plan: tuple[Return | OneWay, ...]
    fails: int | None
    refused: frozenset[int]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    size = draw(st.integers(0, 8))
    kinds = [draw(st.sampled_from((0, 1, 2))) for _ in range(size)]
    plan = tuple(OneWay(i) if kind == 2 else Return(i, kind == 1) for i, kind in enumerate(kinds))
    fails = draw(st.none() | st.integers(0, size - 1)) if size else None
    refused = draw(st.frozensets(st.integers(0, size - 1), max_size=2)) if size and draw(st.booleans()) else frozenset()
    return World(plan, fails, refused)


def run(world: World) -> tuple[Done | Halted, list[tuple[str, int]]]:
    def do(step: Any) -> Any:
        if step.number == world.fails:
            raise ValueError(step.number)
        return step

    def undo(step: Any) -> None:
        if step.undo_fails:
            raise OSError(step.number)

    def problems(step: Any) -> tuple[str, ...]:
        return (f"refused {step.number}",) if step.number in world.refused else ()

    table, _ = recording((Return, OneWay))
    table[OneWay] = Handler(ready=table[OneWay].ready, do=table[OneWay].do)
    doubles, log = recording(table, problems=problems, on_do=do, on_undo=undo)
    outcome = interpret(world.plan, doubles, None)
    return outcome, [(call.verb, call.step.number) for call in log]


@given(worlds())
def test_the_log_is_every_check_then_deeds_up_to_the_failure_then_ways_back_in_reverse(world: World) -> None:
    _, log = run(world)
    size = len(world.plan)
    checks = [("ready", index) for index in range(size)]
    if world.refused:
        assert log == checks
        return
    last = size - 1 if world.fails is None else world.fails
    deeds = [("do", index) for index in range(last + 1)]
    backs = (
        []
        if world.fails is None
        else [("undo", i) for i in range(last - 1, -1, -1) if isinstance(world.plan[i], Return)]
    )
    assert log == checks + deeds + backs


@given(worlds())
def test_undone_and_not_undone_cover_exactly_what_was_done(world: World) -> None:
    outcome, _ = run(world)
    if isinstance(outcome, Done):
        assert (world.fails, world.refused) == (None, frozenset())
        return
    assert sorted(outcome.undone + outcome.not_undone) == list(outcome.done)
    assert not set(outcome.undone) & set(outcome.not_undone)
    assert outcome.done == (() if world.refused else tuple(range(outcome.index)))
    stands = [i for i in outcome.done if isinstance(world.plan[i], OneWay) or world.plan[i].undo_fails]
    assert list(outcome.not_undone) == stands


@given(worlds())
def test_a_halt_is_clean_exactly_when_nothing_stands_and_nothing_is_torn(world: World) -> None:
    outcome, _ = run(world)
    if isinstance(outcome, Halted):
        torn = not world.refused and isinstance(outcome.step, OneWay)
        assert outcome.torn == torn
        assert outcome.clean == (not outcome.not_undone and not torn)
        assert ("build model and optimizer again" in str(outcome)) == (not outcome.clean)


@given(worlds())
def test_every_problem_is_reported(world: World) -> None:
    outcome, _ = run(world)
    found = {problem.index for problem in outcome.problems} if isinstance(outcome, Halted) else frozenset()
    assert found == world.refused
