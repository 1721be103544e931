"""A file of another library while it is read: every key of it is read, or becomes a finding."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

from prepkit.codec.misfits import MOST
from prepkit.codec.text import shown
from prepkit.config import Config, Origin
from prepkit.facts.env import MOST_RANKS
from prepkit.findings import Finding, PlanRejected, Severity
from prepkit.findings.keywords import meant_key, unknown_key_fix
from prepkit.findings.text import near
from prepkit.formats.importers.positions import LineColumn, plain_json, positions, texts_of_yaml_1_1
from prepkit.formats.importers.source import JSON, Imported, Source, read
from prepkit.rules import found

TRUE, FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")
"""What launchers take for switches, in small letters (accelerate ``str_to_bool``)."""
_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@define(kw_only=True)
class Foreign:
    """The values of one file, and the account of its keys. ``None`` values count as not given."""

    kind: str
    source: str
    """The file as it was named, or ``environment``."""
    data: dict[str, Any]
    places: dict[str, LineColumn] = field(factory=dict, repr=False)
    shown_as: dict[str, str] = field(factory=dict, repr=False)
    """Key to the name that people know it by, such as a variable's."""
    sources: dict[str, str] = field(factory=dict, repr=False)
    """Key to the file in which it stands, where that is another one, which this names."""
    origins: list[Origin] = field(factory=list)
    not_preparation: list[Origin] = field(factory=list)
    findings: list[Finding] = field(factory=list)
    meant: dict[str, tuple[str, ...]] = field(factory=dict, repr=False)
    """Setting to the keys that it would be read from, be they there or not."""
    named: list[str] = field(factory=list)
    """Files that were read because this one names them."""
    declared: set[str] = field(factory=set)
    """Keys that say something of the cluster."""
    asked: dict[str, tuple[str, ...]] = field(factory=dict, repr=False)
    """Key to the way in which it was asked for, be it there or not: the name of a method, and the words of ``word``."""
    free: set[str] = field(factory=set, repr=False)
    """Keys below which everything is taken."""
    texts: dict[str, str] = field(factory=dict, repr=False)
    """Keys at the top to numbers, as they are typed, that a reader of YAML 1.1 has for text."""
    typed: bool = False
    """Whether its library takes a value as it is typed alone: no number or switch as text, no word in other case."""
    _read: set[str] = field(factory=set)
    _misread: set[str] = field(factory=set)
    """Keys with an error, without whose value the config is another one than the file means."""

    # --- reading ---------------------------------------------------------------------------------------------------

    def raw(self, name: str, *settings: str) -> Any:
        """The value at a dotted path, or the whole; None where there is none. Notes where ``settings`` come from."""
        value = self._value(name)
        self._read.add(name)
        self.asked.setdefault(name, ("raw",))
        self.means(name, *settings)
        if value is not None:
            self.origins += [self._origin(name, f"config.{setting}") for setting in settings]
        return value

    def means(self, name: str, *settings: str) -> None:
        """Notes that these settings can be said by this key."""
        for setting in settings:
            keys = (*self.meant.get(f"config.{setting}", ()), self.shown_as.get(name, name))
            self.meant[f"config.{setting}"] = tuple(dict.fromkeys(keys))

    def taken(self, other: Imported, path: Path) -> None:
        """Notes what the keys of a file mean that this one names."""
        self.named.append(str(path))
        for setting, keys in other.meant.items():
            self.meant.setdefault(setting, keys)

    def part(self, name: str, read: Callable[[], Imported]) -> Imported | None:
        """Read a file that a key names; None, with its findings, where what it means is not known."""
        try:
            return read()
        except PlanRejected as refused:
            if isinstance(refused.rest, Imported):
                return refused.rest  # with the findings as its notes
            self.findings += refused.findings
            self._misread.add(name)
            return None

    def json(self, path: Path) -> Source:
        """The JSON that a key names. Says where its library, which reads it with Python's json, cannot go on.

        Raises ``PlanRejected`` for a file that nobody can read.
        """
        source = read(str(path), JSON)
        try:
            json.loads(source.text)
        except ValueError as error:
            if isinstance(error, json.JSONDecodeError) and plain_json(source.text) != source.text:
                where, reader = f"{path}:{error.lineno}:{error.colno}", "accelerate and transformers read it"
                what = f"{reader} with Python's json, which knows no comments and no trailing commas: {error.msg}"
                self.findings.append(found("config.damaged", where, what, "Remove what JSON does not have there."))
        return source

    def missing(self, key: str, name: str, path: Path) -> None:
        """Says that a file which a key names is not there, or lies where nobody can look from here."""
        if away := _elsewhere(name):
            fix = "Check it where it runs, or give the path of a copy that is here."
            self.error("elsewhere", key, f"{name:.120} {away}", fix)
            return
        what = f"there is no file {name:.120}, neither from here nor beside {path.name}, nor in a folder above it"
        self.error("missing-file", key, what, "Give the path of the JSON file.")

    def _value(self, name: str) -> Any:
        value: Any = self.data
        for part in name.split(".") if name else ():
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def flag(self, name: str, *settings: str) -> bool | None:
        """A switch, also as the texts ``yes`` and ``false``."""
        value = self.raw(name, *settings)
        self.asked[name] = ("flag",)
        if isinstance(value, bool | None):
            return value
        text = str(value).strip().lower()
        if text in TRUE + FALSE and not self.typed:
            return text in TRUE
        self._wrong_type(name, value, bool)
        return None

    def whole(self, name: str, *settings: str) -> int | None:
        """A whole number, also as ``8.0``, ``5e8`` and ``"8"``."""
        number = self.number(name, *settings)
        self.asked[name] = ("whole",)
        if number is None or float(number).is_integer():
            given = self._value(name)
            return None if number is None else given if type(given) is int else int(number)
        self._wrong_type(name, number, int)
        return None

    def whole_or_auto(self, name: str, *settings: str) -> int | None:
        """A whole number; None also where ``"auto"`` leaves it to the library, or to who calls it."""
        number = None if self._value(name) == "auto" else self.whole(name, *settings)
        self._read.add(name)
        self.means(name, *settings)
        self.asked[name] = ("whole", "auto")
        return number

    def count(self, name: str, *settings: str, misread: bool = True) -> int | None:
        """A whole number of processes or machines; None also where no job has so many. ``misread`` as for ``error``."""
        number = self.whole(name, *settings)
        if number is None or number <= MOST_RANKS:
            return number
        what, fix = f"{shown(number)} is more than any job has", f"Write a number below {MOST_RANKS + 1}."
        self.error("wrong-value", name, what, fix, misread=misread)
        return None

    def number_or_auto(self, name: str, *settings: str) -> float | None:
        """A finite number; None also where ``"auto"`` leaves it to the library."""
        if self._value(name) != "auto":
            number = self.number(name, *settings)
        else:
            self._read.add(name)
            self.means(name, *settings)
            number = None
        self.asked[name] = ("number", "auto")
        return number

    def number(self, name: str, *settings: str) -> float | None:
        """A finite number, also as text."""
        value = self.raw(name, *settings)
        self.asked[name] = ("number",)
        if value is None:
            return None
        taken = not isinstance(value, bool) and not (self.typed and isinstance(value, str))
        try:
            number = float(value) if taken else float("nan")
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if abs(number) < float("inf"):
            return number
        self._wrong_type(name, value, float)
        return None

    def text(self, name: str, *settings: str) -> str | None:
        """A text."""
        value = self.raw(name, *settings)
        self.asked[name] = ("text",)
        if isinstance(value, str | None):
            return value
        self._wrong_type(name, value, str)
        return None

    def word(self, name: str, words: Sequence[str], *settings: str) -> str | None:
        """One of some words, whatever the case; a digit is the place among them, from 1."""
        value = self.raw(name, *settings)
        self.asked[name] = ("word", *words)
        if value is None:
            return None
        if isinstance(value, bool):  # YAML 1.1 reads NO as false
            value = "yes" if value else "no"
        given = "" if isinstance(value, float) else str(value).strip().rpartition(".")[2].lower()  # 0.5 is no 5
        if given.isdecimal() and 1 <= int(given) <= len(words) and not self.typed:
            return words[int(given) - 1]
        for word in words:
            if value == word or (given == word.lower() and not self.typed):
                return word
        meant = near(given, words, 1)
        fix = f"Write {meant[0]!r}." if meant else f"Write one of {', '.join(words)}."
        self.error("wrong-value", name, f"{shown(value)} is none of {', '.join(words)}", fix)
        return None

    def names(self, name: str, *settings: str) -> tuple[str, ...] | None:
        """A list of texts, also as one text with commas."""
        value = self.raw(name, *settings)
        self.asked[name] = ("names",)
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            return None if value is None else tuple(value)
        self._wrong_type(name, value, str)
        return None

    def section(self, name: str) -> dict[str, Any]:
        """The keys below a path; none where it is missing or empty."""
        value = self.raw(name)
        self.asked[name] = ("section",)
        if isinstance(value, dict):
            return value
        if value:
            self.error("wrong-type", name, f"{shown(value)} is no section", "Write keys below it, or remove it.")
        return {}

    # --- what a key is, if no setting -----------------------------------------------------------------------------

    def launching(self, *names: str) -> None:
        """Keys, with all that is below them, that are of no concern to preparation."""
        for name in names:
            self.free.add(name)
            if self.raw(name) is not None or self.has(name):
                self.not_preparation.append(self._origin(name, ""))
                self.covered(name)

    def covered(self, name: str) -> None:
        """Counts a section and all that is below it as read: a finding about the whole says what becomes of it."""
        self.asked.setdefault(name, ("raw",))
        self.free.add(name)
        self._read.update(key for key in self.keys() if key == name or key.startswith(f"{name}."))

    def without_effect(self, name: str, why: str, fix: str = "Remove it.") -> None:
        """Says that a key does nothing where it stands, if it stands there."""
        self.asked.setdefault(name, ("raw",))
        if self.has(name):
            self.covered(name)
            self.error("no-effect", name, why, fix)

    def error(self, rule: str, name: str, what: str, fix: str, *, misread: bool = True) -> None:
        """Says what is wrong with a key, in the severity of its row.

        Not ``misread``: the config is what the file means all the same, so that every rule can be asked of it.
        """
        finding = self._say(rule, name, what, fix)
        self._misread |= {name} if misread and finding.severity is Severity.ERROR else set()

    def warn(self, rule: str, name: str, what: str, fix: str) -> None:
        """Says what should be known of a key."""
        self._say(rule, name, what, fix, milder=True)

    # --- the account ----------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Return whether the file has the key, be it null or an empty section."""
        value: Any = self.data
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                return False
            value = value[part]
        return True

    def keys(self) -> Iterator[str]:
        """Dotted paths of all keys, sections included."""
        yield from (path for path, _ in self._walk())

    def _walk(self) -> Iterator[tuple[str, str]]:
        """Each of them with the path of its section, which a key with dots in it does not tell; empty at the top."""
        rest: list[tuple[str, str, Any]] = [("", "", self.data)]
        while rest:
            path, section, value = rest.pop()
            if path:
                yield path, section
            if isinstance(value, dict):
                below = [(f"{path}.{key}" if path else str(key), path, inner) for key, inner in value.items()]
                rest += reversed(below)

    def imported(self, config: Config, known: Sequence[str] = (), **declared: Any) -> Imported:
        """The outcome. Raises ``PlanRejected`` with every finding where one is an error, unknown keys among them."""
        self.say_unknown(known)
        read = Imported(
            config=evolve(config, origins=tuple(dict.fromkeys(self.origins))),
            kind=self.kind,
            not_preparation=tuple(self.not_preparation),
            unchanged=tuple(self._origin(key, "") for key in self.unchanged()),
            meant=dict(self.meant),
            named=tuple(self.named),
            notes=tuple(self.findings),
            **declared,
        )
        if any(finding.severity is Severity.ERROR for finding in self.findings):
            raise PlanRejected(tuple(self.findings), rest=None if self._misread - self.free else read)
        return read

    def unchanged(self) -> Iterator[str]:
        """Keys with a value of their own that were read and became nothing: no setting, no finding, not listed."""
        listed = {origin.key for origin in (*self.origins, *self.not_preparation)}
        listed |= self.declared
        said = {finding.where for finding in self.findings}
        for key in sorted(self.keys(), key=lambda key: self.places.get(key, (0, 0))):
            names = {key, *(key[:place] for place, letter in enumerate(key) if letter == ".")}
            above = names | {self.shown_as[name] for name in names if name in self.shown_as}
            holds_others = isinstance(value := self._value(key), dict) and value
            if not holds_others and not above & listed and not said & {self.where(name) for name in names}:
                yield key

    def unread(self) -> tuple[str, ...]:
        """Keys at the top that nobody has asked for."""
        return tuple(str(key) for key in self.data if str(key) not in self._read)

    def unlike(self) -> tuple[str, ...]:
        """Keys and sections that nobody has asked for, and that are near to none that somebody has."""
        known, read = self.known(), self._read
        unasked = (key for key, section in self._walk() if key not in read and (not section or section in read))
        return tuple(key for key in unasked if not meant_key(key, known))

    def known(self) -> tuple[str, ...]:
        """Keys that were asked for, be they there or not."""
        return tuple(sorted(self._read))

    def say_unknown(self, known: Sequence[str] = ()) -> None:
        """Says which keys nobody has asked for, with the nearest of those that somebody has."""
        known = sorted({*known, *self._read})
        read = frozenset(self._read)  # as it is now: what is said below counts as read
        said, given = 0, tuple(self.places or self.keys())  # what a reader has filled in is nowhere
        for key, section in self._walk():
            if key in read or (section and section not in read):
                continue  # below an unknown one, which is said once
            if (said := said + 1) > MOST:
                self.error(
                    "unknown-key",
                    key,
                    f"{MOST} unknown keys are reported, and there are more",
                    "Remove them.",
                    misread=False,
                )
                return
            what = f"{self.kind} knows no such key, and nothing would read it"
            fitting = [one for one in known if self._fits(one, self._value(key))]
            self.error("unknown-key", key, what, unknown_key_fix(key, fitting, given), misread=False)

    def _fits(self, name: str, value: object) -> bool:
        """Whether a value can be that of a key, by the way in which it is asked for: a switch is no path."""
        way = self.asked.get(name, ("raw",))[0]
        if isinstance(value, bool):
            return way not in ("text", "names", "whole", "number")
        return way != "flag" or value is None or str(value).strip().lower() in TRUE + FALSE

    def where(self, name: str) -> str:
        """A place as findings give it."""
        source = self.sources.get(name, self.source)
        return " ".join(filter(None, (f"{source}{_colons(self.places.get(name))}", self.shown_as.get(name, name))))

    def _origin(self, name: str, setting: str) -> Origin:
        line, column = self.places.get(name, (None, None))
        key, source = self.shown_as.get(name, name), self.sources.get(name, self.source)
        return Origin(setting=setting, key=key, source=source, line=line, column=column)

    def _say(self, rule: str, name: str, what: str, fix: str, *, milder: bool = False) -> Finding:
        self._read.add(name)
        finding = found(f"import.{rule}", self.where(name), what, fix, milder=milder)
        self.findings += [finding] if finding not in self.findings else []
        return finding

    def say_no_number(self, name: str, value: object) -> None:
        """Says so of a key that is no setting."""
        self._wrong_type(name, value, float, misread=False)

    def _wrong_type(self, name: str, value: object, kind: type, *, misread: bool = True) -> None:
        what = f"{shown(value)} is not {_NAMES[kind]}"
        self.error("wrong-type", name, what, _retyped(value, kind), misread=misread)


def beside(name: str, file: Path) -> Path | None:
    """The file of that name: beside the one that names it, from here, or from a folder above it.

    Nobody knows which of them it is run from. None: it is in none of them, as for pages of text.
    """
    try:
        bases = (file.parent, Path(), *file.parent.resolve().parents[:_ABOVE])
        return next((shortest(base / name) for base in bases if (base / name).is_file()), None)
    except (OSError, ValueError):  # longer than a name may be; a NUL in it
        return None


_ABOVE = 6
"""Folders above a file from which a path in it may count."""


def _elsewhere(name: str) -> str:
    """Why a path cannot be followed on this machine; empty: it can, and leads to nothing."""
    if "$" in name:
        return "is known when it runs"
    if not any(letter in name for letter in "./\\"):
        return "is no path, and may be a name that the script knows"
    try:
        known = not Path(name).is_absolute() or Path(name).parent.is_dir()
    except (OSError, ValueError):
        known = True
    return "" if known else "lies in a folder that is not here"


def shortest(file: Path) -> Path:
    """The path of a file without the folders that it leaves again, unless it leaves one through a link."""
    short = Path(os.path.normpath(file))
    return short if short.is_file() and short.samefile(file) else file


def foreign(kind: str, source: Source) -> Foreign:
    """The file by its extension: TOML, YAML, or JSON with comments. Raises ``PlanRejected`` where it is no mapping."""
    places = positions(source.text, source.suffix)
    texts = texts_of_yaml_1_1(source.text) if source.suffix in (".yaml", ".yml") else {}
    return Foreign(kind=kind, source=source.path, data=lenient(source), places=places, texts=texts)


def named_model(file: Foreign, key: str) -> str | None:
    """Folder, or name on the hub, of the model that a file is about."""
    name = file.data.get(key)
    return name if isinstance(name, str) and 0 < len(name) < 200 else None


def lenient(source: Source) -> dict[str, Any]:
    """The data of a file, where JSON may have comments and trailing commas."""
    return source.data(plain_json(source.text) if source.suffix == ".json" else None)


def _retyped(value: object, kind: type) -> str:
    """What to write in the place of a value, without its quotes where it is a text that says one."""
    text = value.strip() if isinstance(value, str) else ""
    plain = text if kind is bool and text.lower() in ("true", "false") else _NUMBER.fullmatch(text) and text
    return f"Write {plain.lower()} without quotes." if plain and kind is not str else f"Write {_NAMES[kind]}."


_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE)


def _colons(place: LineColumn | None) -> str:
    return "" if place is None else f":{place[0]}:{place[1]}"
