"""The files of a checkpoint are compared before anything is changed: with what the plan was made from, and over ranks.

Size and header are the plan's. Two checkpoints of one model have the same of both, so each rank also reads a sample of
every tensor, and the ranks compare digests: else shards of two checkpoints would be stitched into one model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from prepkit.applying.handlers import problems
from prepkit.court import found, refused
from prepkit.findings import Finding, RunRefused
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


def check_ready(step: CheckFiles, target: Target) -> problems.Problems:
    """Always: a rank that refused here would leave the others waiting, so files are looked at when all are there."""
    del step, target
    return ()


def check_do(step: CheckFiles, target: Target) -> None:
    """Looks at every file, then waits for the other ranks, and compares samples of the contents with theirs.

    Raises ``RunRefused``, on every rank where contents differ, or what the first to fail has said.
    """
    if differing := tuple(finding for file in step.files for finding in _differences(file)):
        raise RunRefused(differing)
    digests = tuple((file.path, _sampled(file)) for file in step.files)
    target.together()
    try:
        agree(digests)
    except Disagreement as error:
        raise RunRefused(tuple(map(_told, error.differences))) from None


def check_undo(step: CheckFiles, target: Target, memo: None) -> None:
    """Nothing was changed."""
    del step, target, memo


def _differences(file: File) -> Iterator[Finding]:
    """Yield how a file is not the one that was planned with."""
    try:
        size = Path(file.path).stat().st_size
        if size != file.size:
            what = f"has {size:,} bytes, {file.size:,} when the plan was made"
            yield found("weights.file-changed", file.path, what)
            return
        with Path(file.path).open("rb") as opened:
            head = opened.read(file.data)
    except OSError as error:
        yield from unreadable(file.path, error).findings
        return
    if header_digest(head) != file.header:
        yield found("weights.file-changed", file.path, "has another header than when the plan was made")


def _sampled(file: File) -> str:
    """Digest of the first, the middle and the last bytes of each tensor. Raises ``RunRefused``."""
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
        raise unreadable(file.path, error) from None
    return digest.hexdigest()


def unreadable(path: str, error: OSError) -> RunRefused:
    """The refusal of a file that the machine cannot read."""
    return refused("weights.unreadable", path, f"cannot be read: {error.strerror or error}")


def _told(difference: Difference) -> Finding:
    held = " and ".join(f"other values on rank{'s' * (len(at) > 1)} {spans(at)}" for _, at in difference.holders)
    return found("weights.files-differ", difference.name, f"has {held}, with one header")


CHECK: Handler[CheckFiles, Target, None] = Handler(ready=check_ready, do=check_do, undo=check_undo)
