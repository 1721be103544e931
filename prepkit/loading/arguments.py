"""Arguments of the loop's calls, refused by name before anything is done with them."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any


def check_count(name: str, value: Any, least: int) -> None:
    """Raises ``TypeError`` for what is no whole number, and ``ValueError`` for one below the least."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r:.60} is no whole number; give {least} or more")
    if value < least:
        raise ValueError(f"{name}={value} is too few; give {least} or more")


def check_folder(call: str, folder: Any) -> None:
    """Raises ``TypeError`` for what is no path, and ``ValueError`` for one that names no folder."""
    if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
        raise TypeError(f'{call}({folder!r:.60}): give the path of a folder, such as "out"')
    if not os.fspath(folder).strip():
        raise ValueError(f'{call}({folder!r}) names no folder; give one, such as "out"')


def check_names(name: str, value: Any) -> None:
    """Raises ``TypeError`` for what is neither a text nor a collection of texts."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Collection) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name}={value!r:.60}: give a text, or a list of texts")
