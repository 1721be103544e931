"""The files of a checkpoint are compared with what the plan was made from, before anything is changed."""

from __future__ import annotations

from pathlib import Path

from prepkit.live.interpreter import Handler
from prepkit.live.model.target import Target
from prepkit.live.safetensors_header import header_digest
from prepkit.steps import CheckFiles, File


class FileError(RuntimeError):
    """A file is not as planned; names it, and the tensor where there is one."""


def check_ready(step: CheckFiles, target: Target) -> tuple[str, ...]:
    """Always: a rank that refused here would leave the others waiting, so files are looked at when all are there."""
    del step, target
    return ()


def check_do(step: CheckFiles, target: Target) -> None:
    """Looks at every file, then waits for the other ranks. Raises ``FileError``, or what the first to fail has said."""
    differences = [text for file in step.files if (text := _difference(file))]
    if differences:
        raise FileError("; ".join(differences))
    target.together()


def check_undo(step: CheckFiles, target: Target, memo: None) -> None:
    """Nothing was changed."""
    del step, target, memo


def _difference(file: File) -> str:
    """How a file is not the one that was planned with; empty when it is."""
    try:
        size = Path(file.path).stat().st_size
        if size != file.size:
            return f"{file.path} has {size:,} bytes, {file.size:,} when the plan was made; restore it, or plan again"
        with Path(file.path).open("rb") as opened:
            head = opened.read(file.data)
    except OSError as error:
        return f"{file.path} cannot be read: {error.strerror or error}"
    if header_digest(head) != file.header:
        return f"{file.path} has another header than when the plan was made; restore it, or plan again"
    return ""


CHECK: Handler[CheckFiles, Target, None] = Handler(ready=check_ready, do=check_do, undo=check_undo)
