"""Texts that are kept in files, as they were when somebody last read them: plans, messages, what a change makes."""

from __future__ import annotations

import os
from pathlib import Path


def assert_golden(path: Path, text: str) -> None:
    """The text is the one in the file. ``make golden`` writes every file anew: read the change before it is kept."""
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text)
    assert path.is_file(), f"{path.name} is missing: make golden"
    assert text == path.read_text(), "make golden writes it anew, if this was meant: then read its change"
