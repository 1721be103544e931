"""What a plan that could not be done has left, as a value and as a story."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import field, frozen


@frozen(kw_only=True)
class Problem:
    """Why a step cannot be done."""

    index: int
    step: Any
    text: str


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
    """What happened, line by line, ending with what to do."""

    def named(index: int) -> str:
        return f"  {index + 1}. {type(halted.steps[index]).__name__}"

    if halted.problems:
        count = len(halted.problems)
        yield f"not started: {count} problem{'s' if count > 1 else ''}; nothing was changed"
        yield from (f"{named(problem.index)}: {problem.text}" for problem in halted.problems)
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
