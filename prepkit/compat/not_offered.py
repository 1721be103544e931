"""What is raised for a part of another library's face that is not offered."""

from __future__ import annotations

PAGE = "docs/from-accelerate.md"
"""The page that has accelerate's calls beside prepkit's."""


class NotOffered(RuntimeError):
    """Something that the script asks of accelerate, and that this face does not do; the text says what to type."""

    def __init__(self, name: str, otherwise: str) -> None:
        super().__init__(f"prepkit.compat.accelerate does not offer {name}: {otherwise}. See {PAGE}")
