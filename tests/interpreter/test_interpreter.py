"""Ready, do, undo: what the interpreter promises."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import frozen

from prepkit.findings import Finding, Severity
from prepkit.interpreter import Call, Done, Event, Halted, Handler, interpret, recording


@frozen
class Wash:
    name: str


@frozen
class Cut:
    name: str


PLAN = (Wash("pan"), Cut("leek"), Wash("knife"))


def found(where: str, what: str) -> Finding:
    return Finding(rule="apply.not-asked", severity=Severity.ERROR, where=where, what=what, fix="Buy one.")


def verbs(log: list[Call]) -> list[tuple[str, str]]:
    return [(call.verb, call.step.name) for call in log]


def fails_at(name: str, error: BaseException) -> Any:
    def act(step: Any) -> Any:
        if step.name == name:
            raise error
        return step

    return act


def test_all_checks_come_before_the_first_deed() -> None:
    handlers, log = recording((Wash, Cut))
    assert interpret(PLAN, handlers, None) == Done(steps=PLAN)
    ready = [("ready", "pan"), ("ready", "leek"), ("ready", "knife")]
    assert verbs(log) == [*ready, ("do", "pan"), ("do", "leek"), ("do", "knife")]


def test_every_problem_is_collected_and_nothing_is_done() -> None:
    handlers, log = recording((Wash, Cut), problems=lambda step: (found(step.name, "none"), found(step.name, "late")))
    halted = interpret(PLAN, handlers, None)
    assert isinstance(halted, Halted)
    assert [(one.finding.where, one.finding.what) for one in halted.problems][:3] == [
        ("pan", "none"),
        ("pan", "late"),
        ("leek", "none"),
    ]
    assert len(halted.problems) == 6
    assert {call.verb for call in log} == {"ready"}
    assert halted.done == ()
    assert halted.clean


def test_a_problem_that_two_steps_share_is_said_once() -> None:
    handlers, _ = recording((Wash, Cut), problems=lambda step: (found("water", "none"),))
    halted = interpret(PLAN, handlers, None)
    assert isinstance(halted, Halted)
    assert [(p.index, p.finding.where) for p in halted.problems] == [(0, "water")]


def test_a_check_that_raises_is_a_problem_among_the_others() -> None:
    def ready(step: Wash, target: None) -> tuple[Finding, ...]:
        raise KeyError(step.name)

    handlers, log = recording((Wash, Cut), problems=lambda step: (found("knife", "blunt"),))
    handlers[Wash] = Handler(ready=ready, do=handlers[Wash].do)
    halted = interpret(PLAN, handlers, None)
    assert isinstance(halted, Halted)
    assert [problem.finding.what for problem in halted.problems] == [
        "its check raised KeyError: 'pan'",
        "blunt",
        "its check raised KeyError: 'knife'",
    ]
    assert verbs(log) == [("ready", "leek")]


def test_what_the_judge_accepts_keeps_no_step_from_acting() -> None:
    handlers, log = recording((Wash, Cut), problems=lambda step: (found(step.name, "late"),))
    assert interpret(PLAN, handlers, None, judge=lambda findings: findings[:0]) == Done(steps=PLAN)
    halted = interpret(PLAN, handlers, None, judge=lambda findings: findings[1:2])
    assert isinstance(halted, Halted)
    assert [(one.index, one.finding.where) for one in halted.problems] == [(1, "leek")]
    assert [verb for verb, _ in verbs(log)].count("do") == 3


def test_a_step_without_a_handler_is_a_problem() -> None:
    handlers, _ = recording((Wash,))
    halted = interpret(PLAN, handlers, None)
    assert isinstance(halted, Halted)
    assert [(p.finding.rule, p.finding.where, p.finding.what) for p in halted.problems] == [
        ("apply.not-asked", "Cut", "has no handler")
    ]


def test_a_failure_takes_back_in_reverse_and_leaves_the_failing_step_alone() -> None:
    handlers, log = recording((Wash, Cut), on_do=fails_at("knife", ValueError("rust")))
    halted = interpret(PLAN, handlers, None)
    assert isinstance(halted, Halted)
    assert verbs(log)[3:] == [("do", "pan"), ("do", "leek"), ("do", "knife"), ("undo", "leek"), ("undo", "pan")]
    assert (halted.index, halted.step, halted.done, halted.undone) == (2, PLAN[2], (0, 1), (1, 0))
    assert halted.clean


def test_undo_gets_the_memo_of_its_own_deed() -> None:
    seen = []
    handlers = {
        Wash: Handler(
            ready=lambda step, target: (),
            do=lambda step, target: target.append(step.name) or len(target),
            undo=lambda step, target, memo: seen.append((step.name, memo)),
        ),
        Cut: Handler(ready=lambda step, target: (), do=lambda step, target: 1 / 0),
    }
    interpret((Wash("a"), Wash("b"), Cut("c")), handlers, [])
    assert seen == [("b", 2), ("a", 1)]


def one_way() -> dict[type, Handler[Any, Any, Any]]:
    doubles, _ = recording((Wash, Cut))
    return {Wash: doubles[Wash], Cut: Handler(ready=doubles[Cut].ready, do=doubles[Cut].do)}


def test_a_step_without_a_way_back_is_named_as_standing() -> None:
    handlers, log = recording(one_way(), on_do=fails_at("knife", ValueError("rust")))
    halted = interpret(PLAN, handlers, None)
    assert isinstance(halted, Halted)
    assert ("undo", "leek") not in verbs(log)
    assert (halted.undone, halted.not_undone, halted.torn) == ((0,), (1,), False)
    assert str(halted) == (
        "step 3 of 3 failed: Wash\n"
        "  ValueError: rust\n"
        "undone:\n"
        "  1. Wash\n"
        "still standing:\n"
        "  2. Cut (no way back)\n"
        "build model and optimizer again before the next apply; these cannot be brought back"
    )


def test_a_failing_step_without_a_way_back_may_have_stopped_half_way() -> None:
    handlers, _ = recording(one_way(), on_do=fails_at("leek", ValueError("blunt")))
    halted = interpret(PLAN, handlers, None)
    assert isinstance(halted, Halted)
    assert (halted.torn, halted.clean, halted.not_undone) == (True, False, ())
    assert "Cut has no way back and may have stopped half way\nbuild model and optimizer again" in str(halted)


def test_an_undo_that_raises_does_not_close_the_others() -> None:
    undo = fails_at("leek", OSError("stuck"))
    handlers, log = recording((Wash, Cut), on_do=fails_at("knife", ValueError("rust")), on_undo=undo)
    halted = interpret(PLAN, handlers, None)
    assert isinstance(halted, Halted)
    assert verbs(log)[-2:] == [("undo", "leek"), ("undo", "pan")]
    assert (halted.undone, halted.not_undone) == ((0,), (1,))
    assert [(index, str(error)) for index, error in halted.undo_errors] == [(1, "stuck")]
    assert "  2. Cut (its undo raised OSError: stuck)" in str(halted)


def test_problems_read_as_a_list_that_begins_with_nothing_was_changed() -> None:
    handlers, _ = recording((Wash, Cut), problems=lambda step: (found(step.name, "none"),))
    assert str(interpret(PLAN, handlers, None)) == (
        "not started: 3 problems; nothing was changed\n"
        "  1. Wash: error apply.not-asked at pan: none\n  fix: Buy one.\n"
        "  2. Cut: error apply.not-asked at leek: none\n  fix: Buy one.\n"
        "  3. Wash: error apply.not-asked at knife: none\n  fix: Buy one."
    )


def test_a_clean_halt_says_that_everything_is_as_it_was() -> None:
    handlers, _ = recording((Wash, Cut), on_do=fails_at("pan", ValueError("hot")))
    assert str(interpret(PLAN, handlers, None)).endswith(
        "everything is as it was; mend the cause and apply the plan again"
    )


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), SystemExit(3)])
def test_an_interrupt_unwinds_and_is_raised_again_with_the_story(interrupt: BaseException) -> None:
    handlers, log = recording((Wash, Cut), on_do=fails_at("knife", interrupt))
    with pytest.raises(type(interrupt)) as caught:
        interpret(PLAN, handlers, None)
    assert verbs(log)[-2:] == [("undo", "leek"), ("undo", "pan")]
    assert caught.value is interrupt
    assert "step 3 of 3 failed: Wash" in caught.value.__notes__[0]


def test_an_interrupt_during_an_undo_waits_until_the_others_are_undone() -> None:
    undo = fails_at("leek", KeyboardInterrupt())
    handlers, log = recording((Wash, Cut), on_do=fails_at("knife", ValueError("rust")), on_undo=undo)
    with pytest.raises(KeyboardInterrupt) as caught:
        interpret(PLAN, handlers, None)
    assert verbs(log)[-1] == ("undo", "pan")
    assert isinstance(caught.value.__cause__, ValueError)


def test_events_tell_every_moment() -> None:
    told: list[Event] = []
    handlers, _ = recording((Wash, Cut), on_do=fails_at("knife", ValueError("rust")))
    interpret(PLAN, handlers, None, told.append)
    assert [(event.phase, event.index) for event in told] == [
        *(("ready", index) for index in range(3)),
        *((moment, index) for index in range(2) for moment in ("do", "done")),
        ("do", 2),
        ("failed", 2),
        ("undone", 1),
        ("undone", 0),
    ]


def test_a_listener_that_raises_changes_nothing() -> None:
    def broken(event: Event) -> None:
        raise BrokenPipeError

    handlers, log = recording((Wash, Cut))
    assert interpret(PLAN, handlers, None, broken) == Done(steps=PLAN)
    assert len(log) == 6


def test_an_interrupt_after_the_last_deed_takes_that_deed_back_too() -> None:
    def listener(event: Event) -> None:
        if event.phase == "done" and event.index == 2:
            raise KeyboardInterrupt

    handlers, log = recording((Wash, Cut))
    with pytest.raises(KeyboardInterrupt):
        interpret(PLAN, handlers, None, listener)
    assert [name for verb, name in verbs(log) if verb == "undo"] == ["knife", "leek", "pan"]


def test_an_interrupt_after_a_step_without_a_way_back_leaves_it_standing_but_not_torn() -> None:
    def listener(event: Event) -> None:
        if event.phase == "done":
            raise KeyboardInterrupt

    handlers, _ = recording(one_way())
    with pytest.raises(KeyboardInterrupt) as caught:
        interpret((Cut("leek"),), handlers, None, listener)
    story = caught.value.__notes__[0]
    assert "still standing:\n  1. Cut (no way back)" in story
    assert "half way" not in story


def test_doubles_of_a_table_have_a_way_back_where_the_table_has_one() -> None:
    doubles, _ = recording(one_way())
    assert (doubles[Wash].undo is None, doubles[Cut].undo is None) == (False, True)


def test_two_stories_are_equal_when_the_same_steps_stand_whatever_the_error_objects() -> None:
    def halted() -> Any:
        handlers, _ = recording((Wash, Cut), on_do=fails_at("knife", ValueError()), on_undo=fails_at("pan", OSError()))
        return interpret(PLAN, handlers, None)

    assert halted() == halted()
    assert halted().error is not halted().error
