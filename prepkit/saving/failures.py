"""The failure of saving and resuming: on every rank alike, as findings that say what to type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from attrs import evolve

from prepkit.findings import Finding, RunRefused
from prepkit.ranks.world import ranks_of
from prepkit.rules import found

T = TypeVar("T")


class CheckpointFailed(RunRefused):
    """A checkpoint or an export that could not be written or read. ``findings`` says why, and on which ranks.

    Files may have been begun, and after a failed read some of the model may have changed: the findings say so.
    """


def failed(rule: str, where: Path | str, what: str, fix: str = "") -> CheckpointFailed:
    """The error with one finding, with an id of the law book; ``fix`` replaces the usual one."""
    return CheckpointFailed((found(rule, str(where), what, fix),))


def on_every_rank(act: Callable[[], T], rule: str, where: Path | str, group: dist.ProcessGroup | None = None) -> T:
    """Runs ``act`` on every rank, and returns what it gave on this one. Collective; one exchange.

    Where it fails on some rank all ranks raise the same: ``RunRefused`` itself if rules have refused it and nothing
    else went wrong, else ``CheckpointFailed``. An error without findings gets one of ``rule`` at ``where``. ``act``
    holds no collective of its own.
    """
    done: list[T] = []
    error: Exception | None = None
    try:
        done.append(act())
    except Exception as raised:  # the others have to hear of any
        error = raised
    mine = () if error is None else _findings(error, rule, where)
    refused = isinstance(error, RunRefused) and not isinstance(error, CheckpointFailed)
    everyone = ranks_of(group).gather((mine, refused))
    if all(not findings for findings, _ in everyone):
        return done[0]
    at: dict[Finding, list[int]] = {}
    for rank, (findings, _) in enumerate(everyone):
        for finding in findings:
            at.setdefault(finding, []).append(rank)
    told = tuple(_with_ranks(finding, ranks, len(everyone)) for finding, ranks in at.items())
    if all(refused for findings, refused in everyone if findings):
        raise RunRefused(told) from error
    raise CheckpointFailed(told) from error


@contextmanager
def torch_failure(rule: str, where: Path | str) -> Iterator[None]:
    """Turns torch's own error, which is no ``Exception`` and shows a stack of every rank, into ``CheckpointFailed``."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        texts: dict[str, list[int]] = {}
        for rank, (raised, _) in error.failures.items():
            texts.setdefault(_text(raised), []).append(rank)
        size = ranks_of(None).size
        raise CheckpointFailed(
            tuple(_with_ranks(found(rule, str(where), text), at, size) for text, at in texts.items())
        ) from None


def _findings(error: Exception, rule: str, where: Path | str) -> tuple[Finding, ...]:
    if isinstance(error, RunRefused):
        return error.findings
    return (found(rule, str(where), _text(error)),)


def _with_ranks(finding: Finding, ranks: list[int], size: int) -> Finding:
    """The finding with the ranks that it is of, unless all of them have it."""
    if len(ranks) == size:
        return finding
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return evolve(finding, what=f"{finding.what} ({named})")


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
