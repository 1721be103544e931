"""What is said of a value that its type does not allow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prepkit.codec import field_types, samples
from prepkit.codec.languages import TAG, Language, assigned, typed
from prepkit.codec.text import shown
from prepkit.findings.keywords import OTHER_NAMES

Fix = Callable[[Language], str]
"""What to type, in the language of the file."""

MOST = 100
"""Misfits of one list, or of one object's keys, that are told: a hostile file has no say over memory."""


class MisfitError(ValueError):
    """A value that its type does not allow. ``at`` is a key below the place where it was met, or None."""

    def __init__(self, rule: str, what: str, fix: str | Fix, at: object = None) -> None:
        super().__init__(what)
        self.rule, self.what, self.at = rule, what, at
        self.fix: Fix = fix if callable(fix) else lambda _: fix


def wrong_type(value: object, cls: Any) -> MisfitError:
    """The value is of another JSON type."""
    what = f"{shown(value)} stands where {field_types.describe(cls)} is expected"
    near = samples.samples(value, cls)

    def fix(language: Language) -> str:
        if near:
            return _one_of(near, language)
        listed = field_types.listed(value, cls)
        return f"put it into a list: {typed(listed, language)}" if listed else field_types.retyped(value, cls)

    return MisfitError("wrong-type", what, fix)


def _one_of(near: Iterable[Any], language: Language) -> str:
    return f"write {' or '.join(typed(one, language) for one in near)}"


def wrong_choice(value: str, known: tuple[str, ...]) -> MisfitError:
    """The text is none of those that are allowed."""
    near = field_types.nearest(value, known)
    what = f"{shown(value)} is not one of {', '.join(map(repr, known))}"
    return MisfitError("wrong-value", what, lambda to: f"write {typed(near, to)}" if near else "write one of them")


def wrong_length(value: list[Any], cls: Any, length: int) -> MisfitError:
    """The list has too few or too many items."""
    what = f"{shown(value)} has {len(value)} items, not {length}"
    return MisfitError("wrong-value", what, f"write {field_types.describe(cls)}")


def no_kind(data: dict[Any, Any], cls: Any, kinds: Iterable[str]) -> MisfitError:
    """The object does not say which member of the union it is."""
    what = f"no key {TAG!r} says which of {', '.join(kinds)} this is"
    near = samples.samples(data, cls)
    near = tuple(one for one in near if isinstance(one, dict) and len(one) > 1)
    usual = f"add the key {TAG!r} with one of these names"
    return MisfitError("missing-key", what, lambda to: _one_of(near, to) if near else usual, at=TAG)


def wrong_kind(name: object, cls: Any, kinds: dict[str, type], at: str | None) -> MisfitError:
    """The name is that of no member. ``at``: the key that holds it; None: it stands bare."""
    what = f"{shown(name)} is not one of {', '.join(kinds)}"
    near = field_types.nearest(name, kinds) if isinstance(name, str) else ""
    given = samples.samples(name, cls) if at is None else ()
    held = tuple(one for one in given if isinstance(one, dict) and len(one) > 1)

    def fix(language: Language) -> str:
        if near:
            return f"write {typed({TAG: near} if at is None else near, language)}"
        return f"{_one_of(held, language)}, or one of these names" if held else "write one of these names"

    return MisfitError("unknown-kind", what, fix, at)


def unknown_keys(cls: type, data: dict[Any, Any], names: Iterable[str]) -> list[Exception]:
    """One misfit for each key that the class does not have, as far as they are told."""
    names = tuple(names)
    unknown = [key for key in data if key not in names]
    misfits: list[Exception] = []
    if len(unknown) > MOST:
        what = f"{len(unknown)} keys of {cls.__name__} are unknown; {MOST} of them are told"
        misfits.append(MisfitError("too-many", what, "write the file anew"))
    for key in unknown[:MOST]:
        what = f"{cls.__name__} has no key {shown(key)}, only {', '.join(names) or 'none at all'}"
        misfits.append(MisfitError("unknown-key", what, _instead(cls, key, data), at=key))
    return misfits


def _instead(cls: type, key: object, data: dict[Any, Any]) -> str:
    word = str(key)[: samples.LONGEST]
    if near := samples.meant(word, data[key], cls, data):
        return f"write {near!r} instead"
    if (known := OTHER_NAMES.get(word.lower())) in data:
        return f"remove it: {known!r} says it"
    if word in samples.OF_GROUPS:
        return "remove it: give an optimizer of your own with these groups, as in build_plan(cfg, model, optimizer=...)"
    return "remove it"


def missing_key(cls: type, name: str, kind: Any) -> MisfitError:
    """A key without a default is not there."""
    described = field_types.describe(kind)
    return MisfitError(
        "missing-key",
        f"{cls.__name__} needs the key {name!r}",
        lambda to: f"add {assigned(name, to)}<{described}>",
        at=name,
    )


def too_many(items: int, looked: int) -> MisfitError:
    """So many items do not fit that the others were not looked at."""
    what = f"{MOST} items of {items} do not fit, and {items - looked} were not looked at"
    return MisfitError("too-many", what, "mend these first, or write the file anew")
