"""What is said while a DeepSpeed config is worked out: flaws become findings, notes become reasons."""

from __future__ import annotations

from typing import Any

from attrs import define, field, frozen

from prepkit.config import Config, DeepSpeed
from prepkit.facts import Facts
from prepkit.resolve.deepspeed.data import AUTO, Data, look, put
from prepkit.resolve.engines import engine_of

WHERE = "config.engine.config"
"""Where findings about the user's JSON are; the path inside it follows as text."""
MISSING = object()


@frozen
class Flaw:
    """One thing that is wrong, under the id of the rule that says so."""

    rule: str
    where: str
    what: str
    fix: str = ""


@define
class Draft:
    """A config on its way: the data as far as it is worked out, and what was said about it."""

    cfg: Config
    facts: Facts
    data: Data
    flaws: list[Flaw] = field(factory=list)
    notes: list[str] = field(factory=list)

    @property
    def engine(self) -> DeepSpeed:
        """The engine that is asked for."""
        return engine_of(self.cfg, DeepSpeed)

    def flaw(self, rule: str, what: str, fix: str = "", where: str = WHERE) -> None:
        """Says that something is wrong."""
        self.flaws.append(Flaw(f"deepspeed.{rule}", where, what, fix))

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path; the default where there is none and where it is ``auto``."""
        value = look(self.data, path, MISSING)
        return default if value is MISSING or value == AUTO else value

    def is_auto(self, path: str) -> bool:
        """Return whether the value is left to others (DP-22)."""
        return bool(look(self.data, path) == AUTO)

    def says(self, path: str) -> bool:
        """Return whether there is a value of the user's own."""
        return look(self.data, path, MISSING) not in (MISSING, AUTO)

    def fill(self, path: str, value: Any, why: str) -> None:
        """Puts a value where the user left ``auto`` or nothing, and notes the reason."""
        if not self.says(path):
            put(self.data, path, value)
            self.notes.append(f"{path} = {value} ({why})")

    def settle(self, path: str, ours: Any, place: str, why: str = "") -> None:
        """Fills in our value, or says that the user's JSON has another one: nobody wins silently (pain 3, G-36)."""
        theirs = self.get(path)
        if theirs is None:
            self.fill(path, ours, why or place)
        elif theirs != ours:
            what = f"`{path}` is {theirs} in config.engine.config, and {place} is {ours}."
            where = place.partition(" ")[0]
            fix = f'Give it in one place: remove `{path}` or write "auto" there, or change {where}.'
            self.flaw("two-places", what, fix, where)
