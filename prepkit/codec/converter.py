"""attrs classes to and from JSON data, exactly: cattrs with strict hooks.

cattrs walks the classes; the hooks here make it strict, because by itself it turns ``2.7`` into 2 and ``"false"`` into
True, takes a string for a list, and reports an unknown kind as a missing field. A hook that refuses a value raises
``MisfitError``; of the tree of exceptions that cattrs gathers them in, ``read`` makes one finding per place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import cache
from itertools import repeat
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args

import attrs
from cattrs import BaseValidationError, ClassValidationError, Converter, IterableValidationError
from cattrs.errors import AttributeValidationNote, ForbiddenExtraKeysError, IterableValidationNote
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from prepkit.codec import field_types as codec_shapes
from prepkit.codec.field_types import SCALARS, TAG
from prepkit.codec.text import inside, refusal, shown
from prepkit.findings import Finding, PlanRejected

Read = Callable[[Any, Any], Any]
Write = Callable[[Any], Any]


class MisfitError(ValueError):
    """A value that its type does not allow. ``at`` is a key below the place where it was met, or empty."""

    def __init__(self, rule: str, what: str, fix: str, at: str = "") -> None:
        super().__init__(what)
        self.rule, self.what, self.fix, self.at = rule, what, fix, at


def write(value: object) -> Any:
    """The data form of a value: dicts, lists, strings, numbers, booleans and None, as JSON has them."""
    return _converter().unstructure(value)


def prepare(classes: Iterable[type]) -> None:
    """Generates the functions that write these classes and the classes of their fields, where there are none yet."""
    for cls in classes:
        _converter().get_unstructure_hook(cls)


def read(data: object, cls: Any, where: str) -> Any:
    """The value of type ``cls`` that the data stands for. Raises ``PlanRejected`` with all that does not fit."""
    try:
        return _converter().get_structure_hook(cls)(data, cls)
    except (MisfitError, BaseValidationError) as error:
        raise PlanRejected(tuple(_findings(error, where))) from None


@cache
def _converter() -> Converter:
    """The one converter. Its functions for a class are generated when the class is first met."""
    converter = Converter(unstruct_collection_overrides={tuple: list})
    for cls in SCALARS:  # by class, not by predicate: cattrs asks its own hooks for these classes first
        converter.register_structure_hook(cls, _read_scalar)
    converter.register_structure_hook(StrEnum, _read_choice)
    converter.register_structure_hook_func(codec_shapes.is_choice, _read_choice)
    converter.register_structure_hook_factory(codec_shapes.is_tuple, _tuple_reader)
    converter.register_structure_hook_factory(codec_shapes.is_union, _union_reader)
    converter.register_structure_hook_factory(attrs.has, _class_reader)
    converter.register_unstructure_hook(bool, lambda value: value)  # or int's would take it
    for plain, wider in ((int, Integral), (float, Real), (str, str)):
        converter.register_unstructure_hook(plain, _scalar_writer(plain, wider))
    converter.register_unstructure_hook_factory(codec_shapes.is_union, _union_writer)
    converter.register_unstructure_hook_factory(attrs.has, _class_writer)
    return converter


# --- in ------------------------------------------------------------------------------------------------------------

MOST = 100
"""Misfits of one list, or of one object's keys, that are told: a hostile file has no say over memory."""


def _wrong_type(value: object, cls: Any) -> MisfitError:
    what = f"{shown(value)} stands where {codec_shapes.describe(cls)} is expected"
    return MisfitError("wrong-type", what, codec_shapes.retyped(value, cls))


def _read_scalar(value: Any, cls: Any) -> Any:
    if not codec_shapes.fits(cls, value):
        raise _wrong_type(value, cls)
    if cls is NoneType:
        return None
    try:
        scalar = cls(value)
    except OverflowError:
        scalar = math.inf
    if cls is float and not math.isfinite(scalar):
        raise MisfitError("wrong-value", f"{shown(value)} is not a finite number", "write a finite number")
    return scalar


def _read_choice(value: Any, cls: Any) -> Any:
    if not isinstance(value, str):
        raise _wrong_type(value, cls)
    known = codec_shapes.choices(cls)
    if value not in known:
        near = codec_shapes.nearest(value, known)
        what = f"{shown(value)} is not one of {', '.join(map(repr, known))}"
        raise MisfitError("wrong-value", what, f"write {near!r}" if near else "write one of them")
    return cls(value) if isinstance(cls, type) else str(value)


def _tuple_reader(cls: Any, converter: Converter) -> Read:
    endless = Ellipsis in get_args(cls)
    slots = [(converter.get_structure_hook(item), item) for item in get_args(cls) if item is not Ellipsis]

    def read_value(value: Any, _: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _wrong_type(value, cls)
        if not endless and len(value) != len(slots):
            what = f"{shown(value)} has {len(value)} items, not {len(slots)}"
            raise MisfitError("wrong-value", what, f"write {codec_shapes.describe(cls)}")
        out: list[Any] = []
        misfits: list[Exception] = []
        for item, (hook, kind) in zip(value, repeat(slots[0]) if endless else slots, strict=False):
            try:
                out.append(hook(item, kind))
            except (MisfitError, BaseValidationError) as error:
                error.add_note(IterableValidationNote("", len(out) + len(misfits), kind))
                misfits.append(error)
                if len(misfits) == MOST:
                    misfits.append(_more(len(value), len(out) + MOST))
                    break
        if misfits:
            raise IterableValidationError("", misfits, cls)
        return tuple(out)

    return read_value


def _more(items: int, looked: int) -> MisfitError:
    what = f"{MOST} items of {items} do not fit, and {items - looked} were not looked at"
    return MisfitError("too-many", what, "mend these first, or write the file anew")


def _union_reader(cls: Any, converter: Converter) -> Read:
    kinds = codec_shapes.kinds(cls)
    hooks = {member: converter.get_structure_hook(member) for member in get_args(cls)}
    members = sorted(hooks, key=lambda member: member is float)  # float last: an int that may be one stays one

    def read_value(value: Any, _: Any) -> Any:
        if kinds and isinstance(value, dict):
            kind = _kind_of(value, kinds)
            return hooks[kind](value, kind)
        if kinds and isinstance(value, str):  # a bare name is short for an object of that kind with its defaults
            kind = _kind_named(value, kinds, at="")
            return hooks[kind]({}, kind)
        for member in members:
            if codec_shapes.fits(member, value):
                return hooks[member](value, member)
        raise _wrong_type(value, cls)

    return read_value


def _kind_of(data: dict[Any, Any], kinds: dict[str, type]) -> type:
    """The class that the tag of an object names."""
    if TAG in data:
        return _kind_named(data[TAG], kinds, at=TAG)
    what = f"no key {TAG!r} says which of {', '.join(kinds)} this is"
    raise MisfitError("missing-key", what, f"add the key {TAG!r} with one of these names", at=TAG)


def _kind_named(name: object, kinds: dict[str, type], at: str) -> type:
    if isinstance(name, str) and name in kinds:
        return kinds[name]
    what = f"{shown(name)} is not one of {', '.join(kinds)}"
    near = codec_shapes.nearest(name, kinds) if isinstance(name, str) else ""
    raise MisfitError("unknown-kind", what, f"write {near!r}" if near else "write one of these names", at)


def _class_reader(cls: type, converter: Converter) -> Read:
    inner: Read = make_dict_structure_fn(
        cls, converter, _cattrs_forbid_extra_keys=True, _cattrs_detailed_validation=True, **_overrides(cls)
    )
    own = {cls.__name__: cls} if cls in codec_shapes.tagged() else {}

    def read_value(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong_type(value, cls)
        if own and TAG in value:
            _kind_of(value, own)
            value = {key: item for key, item in value.items() if key != TAG}
        return inner(value, cls)

    return read_value


def _overrides(cls: type) -> dict[str, Any]:
    kept = {field.name for field in codec_shapes.fields(cls)}
    return {field.name: override(omit=field.name not in kept) for field in attrs.fields(cls)}


# --- out -----------------------------------------------------------------------------------------------------------


def _scalar_writer(cls: type, wider: type) -> Write:
    """The plain form of what counts as one: 1.0 of 1, 1 of True, text of an enum or of torch's version.

    Anything else is left as it is, for ``canonical`` to refuse with its place: ``Config(accumulation="4")`` is not 4.
    """
    return lambda value: value if type(value) is cls or not isinstance(value, wider) else cls(value)


@cache  # cattrs forgets all it has generated whenever it meets a new kind of tuple, and generates it again
def _class_writer(cls: type, converter: Converter) -> Write:
    inner: Write = make_dict_unstructure_fn(cls, converter, **_overrides(cls))
    tag = {TAG: cls.__name__}
    return (lambda value: tag | inner(value)) if cls in codec_shapes.tagged() else inner


def _union_writer(cls: Any, converter: Converter) -> Write:
    """By the class of the value; but an int where only floats are meant becomes one, as it will be read."""
    as_float = float in get_args(cls) and int not in get_args(cls)

    def write_value(value: Any) -> Any:
        if type(value) is tuple:
            return [write_value(item) for item in value]
        return float(value) if as_float and type(value) is int else converter.unstructure(value)

    return write_value


# --- what went wrong -----------------------------------------------------------------------------------------------


def _findings(error: Exception, where: str) -> Iterator[Finding]:
    """One finding per place, in the order of the fields; keys that are not known come after them."""
    match error:
        case MisfitError():
            yield refusal(error.rule, inside(where, error.at) if error.at else where, error.what, error.fix)
        case IterableValidationError():
            for below in error.exceptions:
                note = _note(below, IterableValidationNote)
                yield from _findings(below, where if note is None else inside(where, note.index))
        case ClassValidationError():
            for below in error.exceptions:
                yield from _in_class(below, error.cl, where)
        case _:  # raised by the class itself
            yield refusal("wrong-value", where, str(error), "write a value that the class accepts")


def _in_class(error: Exception, cls: type, where: str) -> Iterator[Finding]:
    note = _note(error, AttributeValidationNote)
    if isinstance(error, ForbiddenExtraKeysError):
        keys = [field.name for field in codec_shapes.fields(cls)]
        extra = sorted(error.extra_fields, key=repr)
        if len(extra) > MOST:
            what = f"{len(extra)} keys of {cls.__name__} are unknown; {MOST} of them are told"
            yield refusal("too-many", where, what, "write the file anew")
        for key in extra[:MOST]:
            near = codec_shapes.nearest(str(key), keys)
            what = f"{cls.__name__} has no key {shown(key)}, only {', '.join(keys) or 'none at all'}"
            yield refusal("unknown-key", inside(where, key), what, f"write {near!r} instead" if near else "remove it")
    elif note is None:
        yield from _findings(error, where)
    elif isinstance(error, KeyError):
        key = note.name
        fix = f"add {key!r}: {codec_shapes.describe(note.type)}"
        yield refusal("missing-key", inside(where, key), f"{cls.__name__} needs the key {key!r}", fix)
    else:
        yield from _findings(error, inside(where, note.name))


def _note(error: Exception, cls: type) -> Any:
    return next((note for note in getattr(error, "__notes__", ()) if isinstance(note, cls)), None)
