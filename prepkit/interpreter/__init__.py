"""Interprets steps: every check first, then every step in order, and on failure every undo in reverse.

Nothing here knows what a step means. A table of handlers says that, and the target is handed to them unread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from attrs import field, frozen

from prepkit.findings import Finding, Severity

__all__ = ["Call", "Done", "Event", "HalfDone", "Halted", "Handler", "Phase", "Problem", "interpret", "recording"]

S = TypeVar("S")
"""A step kind."""
T = TypeVar("T")
"""What the steps act on."""
M = TypeVar("M")
"""What ``do`` returns for ``undo``."""


@frozen(kw_only=True)
class Handler(Generic[S, T, M]):
    """How one step kind is checked, done and undone. ``do`` is all or nothing: when it raises, nothing has changed."""

    ready: Callable[[S, T], tuple[Finding, ...]]
    """Findings that can be made before any step has acted; empty when there are none. Reads only."""
    do: Callable[[S, T], M]
    """Acts, and returns what ``undo`` needs."""
    undo: Callable[[S, T, M], str | None] | None = None
    """Takes the deed back, and says what it could not take back, if anything; None: there is no way back, and a ``do``
    that raises may have stopped half way."""


class HalfDone(Exception):
    """Raised by a ``do`` that could not take back all that it had begun; the text says what remains."""


Phase = Literal["ready", "do", "done", "failed", "undone", "undo failed"]
"""Where a step is: asked, begun, done, or failed; afterwards undone, or its undo raised."""


@frozen(kw_only=True)
class Event:
    """One step has come into a phase; for a progress line or a log."""

    phase: Phase
    index: int
    step: Any


@frozen(kw_only=True)
class Done:
    """Every step was done."""

    steps: tuple[Any, ...]


def interpret(
    steps: Sequence[Any],
    handlers: Mapping[type, Handler[Any, T, Any]],
    target: T,
    on_event: Callable[[Event], None] | None = None,
    *,
    judge: Callable[[tuple[Finding, ...]], tuple[Finding, ...]] = lambda findings: findings,
    finish: Callable[[], None] | None = None,
    on_failure: Callable[[BaseException], BaseException] | None = None,
) -> Done | Halted:
    """Asks every step whether it is ready, then does them all, or undoes what was done and says what stands.

    ``judge`` is given what the steps have found, and returns the findings for which none is to act.

    ``finish`` is called after the last step; what it raises undoes the steps as a failing step does. ``on_failure``
    hears what was raised before anything is undone, and returns what to report in its place: the same, or its cause.

    An interrupt or exit (``BaseException``) unwinds likewise and is then raised again, with the story as its note.
    What ``on_event`` raises is dropped: a broken log must not leave a model half way.
    """
    steps = tuple(steps)
    notify = on_event or _ignore
    problems = _problems(steps, handlers, target, notify, judge)
    if problems:
        return Halted(steps=steps, index=problems[0].index, problems=problems)
    memos: list[Any] = []
    index = 0
    try:
        for index, step in enumerate(steps):  # the handler below reads where the loop stopped
            _notify(notify, "do", index, step)
            memos.append(handlers[type(step)].do(step, target))
            _notify(notify, "done", index, step)
        index = len(steps)
        if finish is not None:
            finish()
    except BaseException as error:
        cause = _reported(on_failure, error)
        halted = _unwind(steps, index, handlers, target, memos, cause, notify, _half(error))
        for raised in (error, *(raised for _, raised in halted.undo_errors)):
            if not isinstance(raised, Exception):
                raised.add_note(str(halted))
                raise raised from (None if raised is error else error)
        return halted
    return Done(steps=steps)


def _problems(
    steps: tuple[Any, ...],
    handlers: Mapping[type, Handler[Any, T, Any]],
    target: T,
    notify: Callable[[Event], None],
    judge: Callable[[tuple[Finding, ...]], tuple[Finding, ...]],
) -> tuple[Problem, ...]:
    problems: dict[Finding, Problem] = {}  # two steps that need the same thing say so once
    for index, step in enumerate(steps):
        _notify(notify, "ready", index, step)
        for finding in _ask(step, handlers, target):
            problems.setdefault(finding, Problem(index=index, step=step, finding=finding))
    return tuple(map(problems.__getitem__, judge(tuple(problems))))


def _ask(step: Any, handlers: Mapping[type, Handler[Any, T, Any]], target: T) -> tuple[Finding, ...]:
    handler, name = handlers.get(type(step)), type(step).__name__
    if handler is None:
        return (_unasked(name, "has no handler", "Add its row to the table of handlers."),)
    try:
        return handler.ready(step, target)
    except Exception as error:  # a check that cannot look is a problem among the others, not the end of asking
        return (_unasked(name, f"its check raised {type(error).__name__}: {error}", "Mend what the error names."),)


def _unasked(step: str, what: str, fix: str) -> Finding:
    return Finding(rule="apply.not-asked", severity=Severity.ERROR, where=step, what=what, fix=fix)


def _half(error: BaseException) -> tuple[str, ...]:
    return (str(error),) if isinstance(error, HalfDone) else ()


def _reported(on_failure: Callable[[BaseException], BaseException] | None, error: BaseException) -> BaseException:
    if on_failure is None:
        return error
    try:
        return on_failure(error)
    except Exception:  # the listener must not keep the steps from being undone
        return error


def _unwind(
    steps: tuple[Any, ...],
    failed: int,
    handlers: Mapping[type, Handler[Any, T, Any]],
    target: T,
    memos: list[Any],
    error: BaseException,
    notify: Callable[[Event], None],
    half: tuple[str, ...],
) -> Halted:
    done = tuple(range(len(memos)))
    undone: list[int] = []
    errors: list[tuple[int, BaseException]] = []
    remains = list(half)
    if failed < len(steps):
        _attempt(errors, failed, partial(_notify, notify, "failed", failed, steps[failed]))
    for index in reversed(done):
        step, memo = steps[index], memos.pop()
        undo = handlers[type(step)].undo
        if undo is None:
            continue
        phase: Phase = "undo failed"
        if _attempt(errors, index, partial(_undo, undo, step, target, memo, remains)):
            undone.append(index)
            phase = "undone"
        _attempt(errors, index, partial(_notify, notify, phase, index, step))
    return Halted(
        steps=steps,
        index=failed,
        error=error,
        done=done,
        undone=tuple(undone),
        not_undone=tuple(index for index in done if index not in undone),
        undo_errors=tuple(errors),
        torn=failed < len(steps) and failed not in done and handlers[type(steps[failed])].undo is None,
        remains=tuple(remains),
    )


def _undo(undo: Callable[[Any, T, Any], str | None], step: Any, target: T, memo: Any, remains: list[str]) -> None:
    if left := undo(step, target, memo):
        remains.append(f"{type(step).__name__}: {left}")


def _attempt(errors: list[tuple[int, BaseException]], index: int, act: Callable[[], None]) -> bool:
    try:
        act()
    except BaseException as raised:  # an interrupt, or one way back that fails, must not close the others
        errors.append((index, raised))
        return False
    return True


def _notify(notify: Callable[[Event], None], phase: Phase, index: int, step: Any) -> None:
    with suppress(Exception):
        notify(Event(phase=phase, index=index, step=step))


def _ignore(event: Event) -> None:
    del event


@frozen(kw_only=True)
class Call:
    """One call that a recording handler received."""

    verb: Literal["ready", "do", "undo"]
    step: Any


def recording(
    handlers: Mapping[type, Handler[Any, Any, Any]] | Iterable[type],
    *,
    problems: Callable[[Any], tuple[Finding, ...]] = lambda step: (),  # noqa: ARG005  # the parameter is the interface
    on_do: Callable[[Any], Any] = lambda step: step,
    on_undo: Callable[[Any], None] = lambda step: None,  # noqa: ARG005  # likewise
) -> tuple[dict[type, Handler[Any, Any, Any]], list[Call]]:
    """Doubles that touch nothing, and the log of their calls.

    Given a table of handlers, a double has a way back exactly where the handler has one; given step kinds, all have.
    ``problems``, ``on_do`` and ``on_undo`` get the step, after it is logged; the last two may raise.
    """
    log: list[Call] = []

    def ready(step: Any, target: Any) -> tuple[Finding, ...]:
        del target
        log.append(Call(verb="ready", step=step))
        return problems(step)

    def do(step: Any, target: Any) -> Any:
        del target
        log.append(Call(verb="do", step=step))
        return on_do(step)

    def undo(step: Any, target: Any, memo: Any) -> None:
        del target, memo
        log.append(Call(verb="undo", step=step))
        on_undo(step)

    one_way = {kind for kind, real in handlers.items() if real.undo is None} if isinstance(handlers, Mapping) else set()
    doubles = {kind: Handler(ready=ready, do=do, undo=None if kind in one_way else undo) for kind in handlers}
    return doubles, log


@frozen(kw_only=True)
class Problem:
    """Why a step cannot be done."""

    index: int
    step: Any
    finding: Finding


@frozen(kw_only=True)
class Halted:
    """A step could not be done. Steps are given by their index; ``undone`` and ``not_undone`` make up ``done``."""

    steps: tuple[Any, ...]
    """The whole plan."""
    index: int
    """The step that failed; the first one with a problem when checks refused; the number of steps when all were done
    and what comes after the last one failed."""
    problems: tuple[Problem, ...] = ()
    """What the checks found; when there are any, no step has acted."""
    error: BaseException | None = field(default=None, eq=False)
    """What the failing step raised; None when checks refused."""
    done: tuple[int, ...] = ()
    """Steps that had been done, in order."""
    undone: tuple[int, ...] = ()
    """Steps that were taken back, in the order in which they were."""
    not_undone: tuple[int, ...] = ()
    """Steps that stand: without a way back, or whose way back raised."""
    undo_errors: tuple[tuple[int, BaseException], ...] = field(default=(), eq=False)
    """What ways back raised."""
    torn: bool = False
    """The failing step has no way back, so it may have stopped half way."""
    remains: tuple[str, ...] = ()
    """What the ways back could not take back, in words."""

    @property
    def step(self) -> Any:
        """The step that failed; None when it was what comes after the last one."""
        return self.steps[self.index] if self.index < len(self.steps) else None

    @property
    def clean(self) -> bool:
        """Whether everything is as it was before the first step."""
        return not self.not_undone and not self.torn and not self.remains

    def __str__(self) -> str:
        return "\n".join(_story(self))


def _story(halted: Halted) -> Iterator[str]:
    """Yield what happened, line by line, ending with what to do."""

    def named(index: int) -> str:
        return f"  {index + 1}. {type(halted.steps[index]).__name__}"

    if halted.problems:
        count = len(halted.problems)
        yield f"not started: {count} problem{'s' if count > 1 else ''}; nothing was changed"
        yield from (f"{named(problem.index)}: {problem.finding}" for problem in halted.problems)
        return
    error = halted.error
    if halted.step is None:
        yield f"all {len(halted.steps)} steps were done, but what follows them failed"
    else:
        yield f"step {halted.index + 1} of {len(halted.steps)} failed: {type(halted.step).__name__}"
    yield f"  {type(error).__name__}: {error}"
    if halted.undone:
        yield "undone:"
        yield from map(named, halted.undone)
    if halted.not_undone:
        errors = dict(halted.undo_errors)
        yield "still standing:"
        for index in halted.not_undone:
            raised = errors.get(index)
            why = f"its undo raised {type(raised).__name__}: {raised}" if raised is not None else "no way back"
            yield f"{named(index)} ({why})"
    if halted.torn:
        yield f"{type(halted.step).__name__} has no way back and may have stopped half way"
    yield from (f"remains: {left}" for left in halted.remains)
    if halted.clean:
        yield "everything is as it was; mend the cause and apply the plan again"
    else:
        yield "build model and optimizer again before the next apply; these cannot be brought back"
