"""The files of a checkpoint are compared before anything is changed: with what the plan was made from, and over ranks.

Size and header are the plan's. Two checkpoints of one model have the same of both, so each rank also reads a sample of
every tensor, and the ranks compare digests: else shards of two checkpoints would be stitched into one model.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from prepkit.findings.text import spans
from prepkit.formats.safetensors_header import header_digest, parse_header
from prepkit.interpreter import Handler
from prepkit.objects.target import Target
from prepkit.ranks.agree import Difference, Disagreement, agree
from prepkit.steps import CheckFiles, File

SAMPLE = 64
"""Bytes of each sample: the first of a tensor, the middle, the last."""
SAMPLED_TENSORS = 2048
"""Tensors of one file that are sampled at most, spread evenly: a sample costs a page of the disk."""


class FileError(RuntimeError):
    """A file is not as planned; names it, and the tensor where there is one."""


def check_ready(step: CheckFiles, target: Target) -> tuple[str, ...]:
    """Always: a rank that refused here would leave the others waiting, so files are looked at when all are there."""
    del step, target
    return ()


def check_do(step: CheckFiles, target: Target) -> None:
    """Looks at every file, then waits for the other ranks, and compares samples of the contents with theirs.

    Raises ``FileError``, on every rank where contents differ, or what the first to fail has said.
    """
    differences = [text for file in step.files if (text := _difference(file))]
    if differences:
        raise FileError("; ".join(differences))
    digests = tuple((file.path, _sampled(file)) for file in step.files)
    target.together()
    try:
        agree(digests)
    except Disagreement as error:
        raise FileError("; ".join(map(_told, error.differences))) from None


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


def _sampled(file: File) -> str:
    """Digest of the first, the middle and the last bytes of each tensor. Raises ``FileError``."""
    digest = hashlib.sha256()
    try:
        with Path(file.path).open("rb", buffering=0) as opened:
            tensors = parse_header(opened.read(file.data)).tensors
            for tensor in tensors[:: -(-len(tensors) // SAMPLED_TENSORS) or 1]:
                last = max(tensor.length - SAMPLE, 0)
                for offset in sorted({0, last // 2, last}):
                    length = min(SAMPLE, tensor.length - offset)
                    digest.update(os.pread(opened.fileno(), length, tensor.start + offset))
    except OSError as error:
        raise FileError(f"{file.path} cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()


def _told(difference: Difference) -> str:
    held = " and ".join(f"other values on rank{'s' * (len(at) > 1)} {spans(at)}" for _, at in difference.holders)
    return f"{difference.name} has {held}, with one header; give every rank the same checkpoint, or one folder for all"


CHECK: Handler[CheckFiles, Target, None] = Handler(ready=check_ready, do=check_do, undo=check_undo)
