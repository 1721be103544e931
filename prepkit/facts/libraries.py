"""What a program asks of its libraries, and what comes of it."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class LibraryFacts:
    """What a program asks of its libraries, and what comes of it."""
