"""A check of one of accelerate's scripts (``accelerate.test_utils.scripts``): a function that its ``main`` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class Deviation:
    """What a check asserts, and prepkit does otherwise."""

    worlds: tuple[int, ...] = (1, 2)
    raises: str
    """A part of what the check fails with, so that it fails for this reason and no other."""
    why: str
    """The reason, for who wants to know whether his script needs it."""


@frozen(kw_only=True)
class Check:
    """One call of a check, on one and on two processes."""

    script: str
    name: str
    options: tuple[tuple[str, Any], ...] = ()
    """Arguments that the table shows."""
    arguments: Callable[[Any], tuple[Any, ...]] = lambda _: ()
    """The others, as ``main`` makes them, from the script's module."""
    worlds: tuple[int, ...] = (1, 2)
    """Numbers of processes that the check is written for."""
    before: Callable[[Any], None] | None = None
    """What is changed in the script beforehand; ``note`` says what."""
    note: str = ""
    deviations: tuple[Deviation, ...] = ()

    @property
    def title(self) -> str:
        """The call, as it is written; with what was changed."""
        said = ", ".join(f"{name}={value!r}" for name, value in self.options)
        return f"{self.name}({said}){', ' * bool(self.note)}{self.note}"

    def deviation(self, world: int) -> Deviation | None:
        """On so many processes; None: it passes."""
        return next((one for one in self.deviations if world in one.worlds), None)
