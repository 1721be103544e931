"""One small change of one source file, and the text of the file with it."""

from __future__ import annotations

import hashlib

from attrs import frozen


@frozen(kw_only=True, order=True)
class Mutant:
    """The bytes ``start`` to ``end`` of a file, replaced. Lines count from 1."""

    path: str
    """Relative to the root of the repository, with slashes."""
    scope: str
    """Qualified name of the outermost function or method around it; empty for what runs at import."""
    operator: str
    start: int
    end: int
    old: str
    new: str
    line: int
    lines: tuple[int, ...]
    """The lines of which one at least runs whenever the mutated code does."""
    ordinal: int = 0
    """Counts mutants of one scope that read alike."""

    @property
    def id(self) -> str:
        """Stays when code elsewhere in the file changes: no line numbers."""
        count = f" #{self.ordinal}" if self.ordinal else ""
        return f"{self.path} {self.scope or '<module>'}: {_brief(self.old)} => {_brief(self.new)}{count}"

    @property
    def place(self) -> str:
        """``path:line`` for people and editors."""
        return f"{self.path}:{self.line}"


def _brief(text: str) -> str:
    """On one line; a long one is cut, and told from others by a digest."""
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:80]}… {digest(line)[:8]}"


def applied(mutant: Mutant, source: bytes) -> bytes:
    """The file's bytes with the mutant in them. Raises ``ValueError`` if the file has changed since it was read."""
    if source[mutant.start : mutant.end].decode() != mutant.old:
        raise ValueError(f"{mutant.place}: the source is no longer the one that was mutated")
    return source[: mutant.start] + mutant.new.encode() + source[mutant.end :]


def digest(data: str | bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def drawn(mutants: tuple[Mutant, ...], count: int, seed: int) -> tuple[Mutant, ...]:
    """So many of them, drawn by the digest of seed and id: a change of one file leaves the draw of the others alone."""
    ranked = sorted(mutants, key=lambda mutant: digest(f"{seed} {mutant.id}"))
    return tuple(sorted(ranked[:count]))
