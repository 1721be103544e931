"""The blocks of a Markdown page, and what the HTML comment in front of each says about running it.

A comment stands on the lines just before the block that it is about, and a plain viewer does not show it:

``<!-- setup`` … ``-->``           Python that the page needs and a reader does not; runs in its place.
``<!-- file: NAME -->``            the block is a file: it is written into the page's folder before what follows.
``<!-- raises: NAME -->``          the Python block, or reading the config, ends in that exception.
``<!-- exit: N -->``               the last command of the console block ends with that status; without it, with 0.
``<!-- output -->``                the text block is what the Python block before it has printed, or its error's text.
``<!-- needs: MODULE -->``         skipped where the module is not installed.
``<!-- policy -->``                the TOML block is a policy, and is read as one.
``<!-- not run: REASON -->``       compiled or parsed only.
"""

from __future__ import annotations

import re
from pathlib import Path

from attrs import field, frozen

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^( *)```(\S*)\s*$")
_NOTE = re.compile(r"^<!-- (setup|file|raises|exit|output|needs|policy|not run)(?:: (.*?))?(?: -->)?$")
LANGUAGES = ("python", "mermaid", "console", "text", "toml", "yaml", "json", "sh", "makefile")
"""What a fence may say. Python, console, sh and config blocks are run, compiled or read; text is only compared."""


@frozen(kw_only=True)
class Block:
    """One fenced block, or the Python of a setup comment."""

    page: str
    """Path of its page, below the repository."""
    line: int
    """Line of its fence, counted from 1."""
    language: str
    text: str
    notes: dict[str, str] = field(factory=dict)
    """What the comments in front of it say."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> tuple[Path, ...]:
    """README and every page of ``docs/``."""
    return (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))


def blocks(page: Path) -> tuple[Block, ...]:
    """The blocks of a page, in order. Raises ``ValueError`` for a fence or comment that does not end."""
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    lines = page.read_text().splitlines()
    out: list[Block] = []
    notes: dict[str, str] = {}
    at = 0
    while at < len(lines):
        line = lines[at]
        fence, note = _FENCE.match(line), _NOTE.match(line)
        if fence:
            end = _end(lines, at, f"{fence[1]}```", f"{name}:{at + 1}")
            text = "\n".join(row.removeprefix(fence[1]) for row in lines[at + 1 : end])
            out.append(Block(page=name, line=at + 1, language=fence[2], text=f"{text}\n", notes=notes))
            at, notes = end, {}
        elif note and note[1] == "setup":
            end = _end(lines, at, "-->", f"{name}:{at + 1}")
            text = "\n".join(lines[at + 1 : end])
            out.append(Block(page=name, line=at + 1, language="python", text=f"{text}\n", notes={"setup": ""}))
            at = end
        elif note:
            notes = {**notes, note[1]: note[2] or ""}
        elif line.strip() and notes:
            raise ValueError(f"{name}:{at + 1}: {next(iter(notes))!r} stands before a line that is no block")
        at += 1
    return tuple(out)


def _end(lines: list[str], start: int, closing: str, where: str) -> int:
    for at in range(start + 1, len(lines)):
        if lines[at].rstrip() == closing:
            return at
    raise ValueError(f"{where}: nothing closes it; write {closing!r} on a line of its own")
