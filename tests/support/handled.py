"""A kind of step in other hands, for tests that plant a fault in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from prepkit.applying.step_kinds import KINDS
from prepkit.interpreter import Handler


@contextmanager
def handled_by(kind: type, handler: Handler[Any, Any, Any]) -> Iterator[None]:
    """Steps of the kind are done by this handler meanwhile."""
    module, _, name = KINDS[kind].handled_by.partition(".")
    held = vars(import_module(f"prepkit.applying.handlers.{module}"))
    real = held[name]
    held[name] = handler
    try:
        yield
    finally:
        held[name] = real
