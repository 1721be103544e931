"""A log of what was applied: a line of JSON for each plan, sealed after the line before it. Lines are only appended.

The chain finds lines that were changed, left out, moved or cut in half. Lines that were cut off at the end are found by
who has kept the digest of the last one: ``prepkit log FILE --has DIGEST``.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from itertools import count
from typing import Any

from attrs import evolve, frozen

from prepkit.codec import digest, plan_digest, to_data
from prepkit.codec.text import canonical, digest_text, parse, shown
from prepkit.findings import PlanRejected
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.rules import found

FORMAT = 1
"""Format number of a line."""
LONGEST = 1 << 22
"""Bytes of a line at most; one of a plan has some thousands."""
LARGEST = 1 << 30
"""Bytes of a log at most, so that reading one ends."""
_TYPES: dict[str, type] = {
    **dict.fromkeys(("before", "at", "plan", "facts", "attestation", "digest"), str),
    **dict.fromkeys(("config", "env"), dict),
    "format": int,
    "holds": bool,
}


@frozen(kw_only=True)
class Entry:
    """One plan that was applied."""

    line: int
    at: str
    """When, in UTC."""
    plan: str
    """Digest of the plan; beside it those of the facts that it was made from and of the attestation are in the file."""
    holds: bool
    """Whether the attestation has no error that nobody has accepted."""
    said: dict[str, Any]
    """The config as data, and the environment under ``env``."""
    digest: str
    """Seal of the line, which the next one names."""


def append(path: str | os.PathLike[str], plan: Plan, attestation: Attestation, at: str) -> str:
    """Write a line behind the last one, and return its digest. Raises ``PlanRejected`` where the file's end is torn.

    Two processes that append at once wait for each other. ``at`` is the time, in UTC. A line that cannot be written
    whole is taken back.
    """
    config = to_data(evolve(plan.config, origins=()))
    data = {
        "format": FORMAT,
        "at": at,
        "plan": plan_digest(plan),
        "facts": plan.provenance.facts,
        "attestation": digest(attestation),
        "holds": not attestation.failed,
        "config": config,
        "env": to_data(attestation.env or plan.facts.env),
    }
    with _opened(path) as descriptor:
        end = os.fstat(descriptor).st_size
        data["before"] = _last(descriptor, end, path)
        seal = digest_text(canonical(data))
        line = _line(data | {"digest": seal})
        if end + len(line) > LARGEST or len(line) > LONGEST:
            raise _unreadable(path, OSError(0, "it would be longer than a log is read; begin another"))
        try:
            written = os.write(descriptor, line)
            os.fsync(descriptor)
        except OSError as error:
            os.ftruncate(descriptor, end)
            raise _unreadable(path, error) from None
        if written < len(line):
            os.ftruncate(descriptor, end)
            raise _unreadable(path, OSError(0, "the disk is full"))
    return seal


def _line(data: dict[str, Any]) -> bytes:
    """An entry as it is written: of a sealed line no byte may be another."""
    return (canonical(data) + "\n").encode(errors="backslashreplace")


def check_end(path: str | os.PathLike[str]) -> None:
    """Raise ``PlanRejected`` where nothing could be appended, and leave the file as it is, or empty."""
    with _opened(path) as descriptor:
        _last(descriptor, os.fstat(descriptor).st_size, path)


def read(path: str | os.PathLike[str]) -> Iterator[Entry]:
    """Every entry in order, as far as the chain holds. Raises ``PlanRejected`` with the line at which it is torn.

    Of the file one line at a time is held, and nothing in it is imported or evaluated.
    """
    try:
        descriptor = _regular(path, os.O_RDONLY)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    before = ""
    with os.fdopen(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > LARGEST:
            raise _unreadable(path, OSError(0, f"it has more than {LARGEST:,} bytes"))
        for number in count(1):
            if not (raw := file.readline(LONGEST + 1)):
                return
            entry, named = _entry(raw, path, number)
            if named != before:
                behind, after = (shown(one) if one else "no line" for one in (named, before))
                raise _torn(path, number, f"it was written behind {behind}, and stands behind {after}")
            before = entry.digest
            yield entry


def _regular(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file, and nothing that would make a reader wait: no pipe, no device."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o644)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(0, "it is no regular file")


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """The file, made where it is not there, to be read and appended to by nobody else meanwhile."""
    try:
        descriptor = _regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    try:
        with contextlib.suppress(ImportError):  # Windows has no such lock
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)  # which ends the lock


def _last(descriptor: int, end: int, path: str | os.PathLike[str]) -> str:
    """Digest of the last line; empty for an empty file. Only the end of the file is read."""
    if end == 0:
        return ""
    os.lseek(descriptor, max(0, end - LONGEST - 1), os.SEEK_SET)
    raw = b""
    while part := os.read(descriptor, LONGEST + 1 - len(raw)):
        raw += part
    *_, last = raw.removesuffix(b"\n").rsplit(b"\n", 1)
    return _entry(last + raw[len(raw.removesuffix(b"\n")) :], path, 0)[0].digest


def _entry(raw: bytes, path: str | os.PathLike[str], number: int) -> tuple[Entry, str]:
    """A line, and the digest that it names as the one before; ``number`` 0: the last one."""
    if len(raw) > LONGEST:
        raise _torn(path, number, f"it has more than {LONGEST:,} bytes")
    if not raw.endswith(b"\n"):
        raise _torn(path, number, "it ends in the middle: writing it was interrupted, or what follows was cut off")
    try:
        data: Any = parse(raw.decode().rstrip("\n"), f"{path}:{number}:$")
    except UnicodeDecodeError as error:
        raise _torn(path, number, f"byte {error.start} is not UTF-8 text") from None
    except PlanRejected as refused:
        raise _torn(path, number, refused.findings[0].what.replace(" at line 1, column", " at column")) from None
    if not isinstance(data, dict) or data.keys() != _TYPES.keys():
        raise _torn(path, number, f"it is no entry of a log: {shown(data)}")
    if wrong := [key for key, kind in _TYPES.items() if type(data[key]) is not kind]:
        raise _torn(path, number, f"{wrong[0]} is {shown(data[wrong[0]])}")
    if data["format"] != FORMAT:
        raise _torn(path, number, f"it has format {shown(data['format'])}, and this prepkit reads format {FORMAT}")
    rest = {key: value for key, value in data.items() if key != "digest"}
    if (seal := digest_text(canonical(rest))) != data["digest"]:
        raise _torn(path, number, f"it was changed: its digest is {seal}, and it says {shown(data['digest'])}")
    if raw != _line(data):
        raise _torn(path, number, "it was changed: its values are whole, and it is not written as prepkit wrote it")
    said = {**data["config"], "env": data["env"]}
    one = Entry(line=number, at=data["at"], plan=data["plan"], holds=data["holds"], said=said, digest=seal)
    return one, data["before"]


def _torn(path: str | os.PathLike[str], number: int, what: str) -> PlanRejected:
    where = f"{path}:{number}" if number else f"{path}: the last line"
    return PlanRejected((found("log.torn", where, what),))


def _unreadable(path: str | os.PathLike[str], error: Exception) -> PlanRejected:
    what = f"it cannot be read and written: {getattr(error, 'strerror', None) or error}"
    return PlanRejected((found("log.unreadable", str(path), what),))
