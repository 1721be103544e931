"""How saving and resuming fail: on every rank alike, with findings that say what to type."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from prepkit.findings import Finding, Severity

T = TypeVar("T")


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written or read; says why, and on which ranks. ``findings`` holds what did not fit."""

    def __init__(self, what: str, findings: tuple[Finding, ...] = ()) -> None:
        self.findings = findings
        super().__init__("\n".join((what, *map(str, findings))))


def refused(rule: str, where: str, what: str, fix: str) -> Finding:
    """The finding that a checkpoint does not fit, or is damaged."""
    return Finding(rule=f"checkpoint.{rule}", severity=Severity.ERROR, where=where, what=what, fix=fix)


def on_every_rank(act: Callable[[], T], what: str, group: dist.ProcessGroup | None = None) -> T:
    """Runs ``act`` on every rank. Collective: where it fails on one, ``CheckpointFailed`` is raised on all.

    ``act`` holds no collective of its own. ``what`` is the subject of the text, such as ``runs/7 could not be read``.
    """
    found: list[T] = []
    error: Exception | None = None
    try:
        found.append(act())
    except Exception as raised:  # the others have to hear of any
        error = raised
    texts = {} if error is None else {_text(error): [_rank()]}
    if dist.is_initialized():
        gathered: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, None if error is None else _text(error), group=group)
        texts = {}
        for rank, text in enumerate(gathered):
            if text is not None:
                texts.setdefault(text, []).append(rank)
    if texts:
        findings = error.findings if isinstance(error, CheckpointFailed) else ()
        raise CheckpointFailed(_told(what, texts), findings) from error
    return found[0]


@contextmanager
def torch_told(what: str) -> Iterator[None]:
    """Torch's own error is no ``Exception``, and shows a stack trace of every rank."""
    try:
        yield
    except CheckpointException as error:
        texts: dict[str, list[int]] = {}
        for rank, (raised, _) in error.failures.items():
            texts.setdefault(_text(raised), []).append(rank)
        raise CheckpointFailed(_told(what, texts)) from None


def quiet_alone() -> None:
    """Torch warns a process on its own that it will write, or read, all by itself, also from its own threads.

    Once: whenever a filter is added Python forgets which warnings it has shown, and shows each of them again.
    """
    text = "torch.distributed is disabled, unavailable or uninitialized"
    if not any(pattern is not None and pattern.pattern == text for _, pattern, *_ in warnings.filters):
        warnings.filterwarnings("ignore", message=text)


def _told(what: str, texts: dict[str, list[int]]) -> str:
    ranks = (f"{text} (rank{'s' if len(at) > 1 else ''} {', '.join(map(str, at))})" for text, at in texts.items())
    return f"{what}: {'; '.join(ranks)}"


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointFailed) else f"{type(error).__name__}: {error}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
