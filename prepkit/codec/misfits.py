"""Messages about values that their type does not allow, with whole values that could take their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

import attrs

from prepkit.codec import field_types
from prepkit.codec.languages import TAG, Language, Untagged, assigned, typed
from prepkit.codec.text import shown
from prepkit.findings.keywords import ELSEWHERE, OTHER_NAMES
from prepkit.findings.text import near as spelt_like

Fix = Callable[[Language], str]
"""What to type, in the language of the file."""

MOST = 100
"""Most misfits reported of one list or object: a hostile file does not decide how much memory is used."""


class MisfitError(ValueError):
    """A value that its type does not allow.

    ``at`` is a key below the place where it was met, or None. ``meant`` is what probably belongs there; for a key that
    is not known, the name that it should have, or the section that it belongs to with what to write there.
    """

    def __init__(self, rule: str, what: str, fix: str | Fix, at: object = None, meant: Any = None) -> None:
        super().__init__(what)
        self.rule, self.what, self.at, self.meant = rule, what, at, meant
        self.given: Any = None
        """The value, where a list was expected."""
        self.fix: Fix = fix if callable(fix) else lambda _: fix


def wrong_type(value: object, cls: Any) -> MisfitError:
    """Refuse a value of another JSON type."""
    what = f"{shown(value)} is given where {field_types.describe(cls)} is expected"
    near = samples(value, cls)
    alone = value[0] if isinstance(value, list) and len(value) == 1 and _means_one(cls, value[0]) else None
    if isinstance(value, bool):  # a switch: on is the kinds, off is None
        near = tuple(one for one in near if (one is None) is not value) or near

    def fix(language: Language) -> str:
        if alone is not None:
            return f"take it out of the list: {typed(alone, language)}"
        if near:
            return _one_of(near, language)
        listed = field_types.listed(value, cls)
        return f"put it into a list: {typed(listed, language)}" if listed else field_types.retyped(value, cls)

    return MisfitError("wrong-type", what, fix, meant=near[0] if near and isinstance(near[0], dict) else None)


def completed(value: object, cls: Any, default: object) -> MisfitError | None:
    """Refuse a value, or a list with too few items, where a list of a fixed length has a default that completes it."""
    items = value if isinstance(value, list) else [value]
    if not field_types.is_tuple(cls) or not isinstance(default, tuple) or not 0 < len(items) < len(default):
        return None
    if not all(field_types.fits(type(usual), item) for usual, item in zip(default, items, strict=False)):
        return None
    whole = [*items, *default[len(items) :]]
    error = wrong_length(value, cls, len(default)) if isinstance(value, list) else wrong_type(value, cls)
    return MisfitError(error.rule, error.what, lambda to: f"write {typed(whole, to)}", meant=whole)


def _one_of(near: tuple[Any, ...], language: Language) -> str:
    ways = [typed(one, language) for one in near if one is not None or language != "toml"]
    left_out = ["leave the key out"] if len(ways) < len(near) else []
    return ", or ".join(([f"write {' or '.join(ways)}"] if ways else []) + left_out)


def wrong_choice(value: str, known: tuple[str, ...]) -> MisfitError:
    """Refuse a text that is not among the allowed ones."""
    close = "".join(spelt_like(value, known, 1))
    what = f"{shown(value)} is not one of {', '.join(map(repr, known))}"
    fix = (lambda to: f"write {typed(close, to)}") if close else "write one of them"
    return MisfitError("wrong-value", what, fix, meant=close or None)


def wrong_length(value: list[Any], cls: Any, length: int) -> MisfitError:
    """Refuse a list with too few or too many items."""
    what = f"{shown(value)} has {len(value)} items, not {length}"
    return MisfitError("wrong-value", what, f"write {field_types.describe(cls)}")


def no_kind(data: dict[Any, Any], cls: Any, kinds: Iterable[str]) -> MisfitError:
    """Refuse an object that does not say which member of the union it is."""
    what = f"no key {TAG!r} says which of {', '.join(kinds)} this is"
    near = samples(data, cls)
    near = tuple(one for one in near if isinstance(one, dict) and len(one) > 1)
    usual = f"add the key {TAG!r} with one of these names"
    return MisfitError("missing-key", what, lambda to: _one_of(near, to) if near else usual, at=TAG)


FORMER_NONE = (
    *("NoClip", "NoCompile", "NoCheckpointing", "NoHook", "KeepWeights", "KeepOnDevice", "AsStored"),
    *("none", "null", "no", "off"),
)
"""Former names of None, and those that it has elsewhere."""


FORMER = {"SendWeights": "BroadcastWeights"}
"""Former names of kinds, to those that they have now."""


def wrong_kind(name: object, cls: Any, kinds: dict[str, type], at: str | None) -> MisfitError:
    """Refuse a name that no member has. ``at``: the key that holds it; None: the name is the whole value."""
    if field_types.takes_none(cls) and isinstance(name, str) and name in FORMER_NONE:
        what = f"{shown(name)} is not one of {', '.join(kinds)}; what asks for none of them is None"
        return MisfitError("unknown-kind", what, lambda to: _one_of((None,), to))
    what = f"{shown(name)} is not one of {', '.join(kinds)}"
    near = FORMER.get(name, "") or "".join(spelt_like(name, kinds, 1)) if isinstance(name, str) else ""
    if at is None and (plain := _unquoted(name)) is not name:
        told = wrong_type(plain, cls)
        return MisfitError("unknown-kind", what, told.fix, meant=told.meant)
    given = samples(name, cls) if at is None else ()
    held = tuple(one for one in given if isinstance(one, dict) and len(one) > 1)

    def fix(language: Language) -> str:
        if near:
            return f"write {typed({TAG: near} if at is None else near, language)}"
        return f"{_one_of(held, language)}, or one of these names" if held else "write one of these names"

    return MisfitError("unknown-kind", what, fix, at, meant=near or None)


def _unquoted(value: object) -> object:
    """A switch or a number that is written as text, as what it says."""
    if not isinstance(value, str):
        return value
    try:
        return float(value) if value.lower() not in ("true", "false") else value.lower() == "true"
    except ValueError:
        return value


def unknown_keys(cls: type, data: dict[Any, Any], names: Iterable[str]) -> list[Exception]:
    """Refuse each key that the class does not have, at most ``MOST`` of them."""
    names = tuple(names)
    unknown = [key for key in data if key not in names]
    misfits: list[Exception] = []
    if len(unknown) > MOST:
        what = f"{len(unknown)} keys of {cls.__name__} are unknown; {MOST} of them are reported"
        misfits.append(MisfitError("too-many", what, "write the file again"))
    for key in unknown[:MOST]:
        what = f"{cls.__name__} has no key {shown(key)}, only {', '.join(names) or 'none at all'}"
        near = meant(str(key)[:LONGEST], data[key], cls, data)
        deeper = None if near else _deeper(cls, str(key)[:LONGEST], data[key], data)
        fix = _moved(*deeper) if deeper else _instead(key, data, near)
        misfits.append(MisfitError("unknown-key", what, fix, at=key, meant=near or deeper))
    return misfits


def _instead(key: object, data: dict[Any, Any], near: str) -> str:
    word = str(key)[:LONGEST]
    if near:
        return f"write {near!r} instead"
    if (known := OTHER_NAMES.get(word.lower())) in data:
        return f"remove it: {known!r} says it"
    if word in OF_GROUPS:
        return "remove it: give an optimizer of your own with these groups, as in build_plan(cfg, model, optimizer=...)"
    return "remove it"


def _deeper(cls: type, key: str, value: object, given: dict[Any, Any]) -> tuple[str, dict[str, object]] | None:
    """Find the section that a key belongs to, and what to write there: ``lr`` is an option of the optimizer."""
    if key.lower() in OF_GROUPS:
        return None
    for field in field_types.fields(cls):
        kinds = field_types.kinds(field.type) or _plain(field.type)
        held = given.get(field.name)
        named = held.get(TAG) if isinstance(held, dict) else held
        written = named if isinstance(named, str) else None
        for name, kind in sorted(kinds.items(), key=lambda one: one[0] != written):
            known = {inner.name: inner for inner in field_types.fields(kind)}
            alike = (key,) if key in known else spelt_like(key, known, 1, ELSEWHERE)
            option = alike[0] if alike else OTHER_NAMES.get(key.lower(), "")
            if option in known and takes(known[option].type, value):
                rest = {inner: item for inner, item in held.items() if inner != TAG} if isinstance(held, dict) else {}
                if written in kinds and name != written:
                    continue  # another kind has it, and not the one that was chosen
                tag = {TAG: name} if field_types.kinds(field.type) else {}
                return field.name, tag | rest | {option: _wider(known[option].type, value)}
    return None


def _moved(section: str, data: dict[str, object]) -> Fix:
    return lambda to: f"move it into {section!r}: {assigned(section, to)}{typed(data, to)}"


def _plain(cls: Any) -> dict[str, type]:
    """The one class of a type that needs no tag."""
    options = get_args(cls) if field_types.is_union(cls) else (cls,)
    return {option.__name__: option for option in options if attrs.has(option)}


def missing_key(cls: type, name: str, kind: Any) -> MisfitError:
    """Refuse an object that lacks a key without a default."""
    described = field_types.describe(kind)
    return MisfitError(
        "missing-key",
        f"{cls.__name__} needs the key {name!r}",
        lambda to: f"add {assigned(name, to)}<{described}>",
        at=name,
    )


def too_many(items: int, looked: int) -> MisfitError:
    """Report that so many items do not fit that the others were not read."""
    what = f"{MOST} items of {items} do not fit, and {items - looked} were not read"
    return MisfitError("too-many", what, "correct these first, or write the file again")


# --- what could stand there ---

LONGEST = 200
"""Characters of a given value that a sample repeats at most; a longer one is no typing error."""

_SAMPLES = 8
"""Samples of one message."""

OF_GROUPS = ("no_decay", "no_weight_decay", "param_groups", "groups", "params")
"""Keys by which other configs sort parameters into groups; here that is the optimizer's own."""


def samples(value: object, cls: Any) -> tuple[Any, ...]:
    """Suggest data of the type: the given value in its place first, then the kinds that need none, then None."""
    members = tuple(field_types.kinds(cls).values())
    if not members:
        return tuple(_with_defaults(cls))
    given = value if len(repr(value)) <= LONGEST else None
    near = [one for member in members for one in _holding(given, member)]
    bare = [{TAG: member.__name__} for member in members if not _required(member)]
    none = (None,) if field_types.takes_none(cls) else ()
    return (*near, *bare, *none)[:_SAMPLES]


def _with_defaults(cls: Any) -> Iterator[Untagged]:
    """Suggest the one class of the type with its defaults, if it has few fields and needs none."""
    for option in get_args(cls) if field_types.is_union(cls) else (cls,):
        if attrs.has(option) and not _required(option) and len(field_types.fields(option)) <= _FEW:
            held = _fields(option())
            if len(repr(held)) <= _SHORT:
                yield Untagged(option.__name__, held)


def _form(value: object) -> object:
    """A default as data."""
    return {TAG: type(value).__name__, **_fields(value)} if attrs.has(type(value)) else value


def _fields(value: Any) -> dict[str, object]:
    return {field.name: _form(getattr(value, field.name)) for field in field_types.fields(type(value))}


_FEW = 4
_SHORT = 100


def _holding(value: object, member: type) -> Iterator[dict[str, Any]]:
    """Suggest the member with the value in its one required field, or with the fields of an object."""
    required = _required(member)
    if isinstance(value, dict):
        names = {field.name for field in field_types.fields(member)}
        if value and value.keys() <= names and {field.name for field in required} <= value.keys():
            yield {TAG: member.__name__, **value}
    elif len(required) == 1:
        kind = required[0].type
        if takes(kind, value):
            yield {TAG: member.__name__, required[0].name: _wider(kind, value)}
        elif field_types.is_tuple(kind) and takes(get_args(kind)[0], value):
            yield {TAG: member.__name__, required[0].name: [value]}


def takes(cls: Any, value: object) -> bool:
    """Check that data of this JSON type may be given for the type; of a list, each item."""
    options = get_args(cls) if field_types.is_union(cls) else (cls,)
    for option in options:
        if field_types.fits(option, value):
            items = value if isinstance(value, list) else []
            return all(takes(get_args(option)[0], item) for item in items[:LONGEST])
        if isinstance(value, str | dict) and field_types.is_union(cls) and attrs.has(option):
            return True
    return False


def _means_one(cls: Any, value: object) -> bool:
    """Check that it may be given, and if it is the name of a kind, that there is one of that name."""
    kinds = field_types.kinds(cls)
    return takes(cls, value) and (not kinds or not isinstance(value, str) or value in kinds)


def _wider(cls: Any, value: Any) -> Any:
    return float(value) if cls is float and type(value) is int else value


def _required(cls: type) -> list[attrs.Attribute[Any]]:
    return [field for field in field_types.fields(cls) if field.default is attrs.NOTHING]


def meant(key: str, value: object, cls: type, given: dict[Any, Any]) -> str:
    """Find the field that was probably meant by a key that the class does not have; empty if none is near.

    In this order: another library's name for it; a similar spelling that takes the value; a very similar spelling;
    the only missing field that takes the value.
    """
    fields = {field.name: field for field in field_types.fields(cls) if field.name not in given}
    if (known := OTHER_NAMES.get(key.lower(), "")) in fields:
        return known
    for close in spelt_like(key, fields, 1):
        if takes(fields[close].type, value) or spelt_like(key, (close,), 1, cutoff=0.8):
            return close
    missing = [field.name for field in _required(cls) if field.name in fields and takes(field.type, value)]
    return missing[0] if len(missing) == 1 else ""
