"""attrs classes to and from JSON data, exactly: cattrs with strict hooks.

cattrs walks the classes; the hooks here make it strict, because by itself it turns ``2.7`` into 2 and ``"false"`` into
True, takes a string for a list, and reports an unknown kind as a missing field. A hook that refuses a value raises
``MisfitError``; of the tree of exceptions that cattrs gathers them in, ``read`` makes one finding per place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import cache, reduce
from itertools import repeat
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args

import attrs
from cattrs import BaseValidationError, ClassValidationError, Converter, IterableValidationError
from cattrs.errors import AttributeValidationNote, IterableValidationNote
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from prepkit.codec import field_types as codec_shapes
from prepkit.codec import misfits
from prepkit.codec.field_types import SCALARS
from prepkit.codec.languages import TAG, Language
from prepkit.codec.misfits import MisfitError
from prepkit.codec.text import inside, refusal, shown
from prepkit.config import Config
from prepkit.findings import Finding, PlanRejected
from prepkit.findings.text import shorter

Read = Callable[[Any, Any], Any]
Write = Callable[[Any], Any]


def write(value: object) -> Any:
    """The data form of a value: dicts, lists, strings, numbers, booleans and None, as JSON has them."""
    return _converter().unstructure(value)


def prepare(classes: Iterable[type]) -> None:
    """Generates the functions that write these classes and the classes of their fields, where there are none yet."""
    for cls in classes:
        _converter().get_unstructure_hook(cls)


def read(data: object, cls: Any, where: str, language: Language) -> Any:
    """The value of type ``cls`` that the data stands for. Raises ``PlanRejected`` with all that does not fit.

    ``language``: what fixes are typed in.
    """
    try:
        return _converter().get_structure_hook(cls)(data, cls)
    except (MisfitError, BaseValidationError) as error:
        found = tuple(_finding(place, misfit, where, language) for place, misfit in _misfits(error, ()))
        raise PlanRejected(
            found, rest=_mended(data) if cls is Config and len(found) <= misfits.MOST else None
        ) from None


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
    converter.register_unstructure_hook_factory(codec_shapes.is_tuple, _tuple_writer)
    converter.register_unstructure_hook_factory(codec_shapes.is_union, _union_writer)
    converter.register_unstructure_hook_factory(attrs.has, _class_writer)
    return converter


# --- in ------------------------------------------------------------------------------------------------------------


_LARGEST = 2**64
"""What no count, size or seed of torch reaches."""


def _read_scalar(value: Any, cls: Any) -> Any:
    if not codec_shapes.fits(cls, value):
        raise misfits.wrong_type(value, cls)
    if cls is NoneType:
        return None
    try:
        scalar = cls(value)
    except OverflowError:
        scalar = math.inf
    if cls is int and not -_LARGEST < scalar < _LARGEST:
        raise MisfitError("wrong-value", f"{shown(value)} is too large", "write a number of at most 64 bits")
    if cls is float and not math.isfinite(scalar):
        raise MisfitError("wrong-value", f"{shown(value)} is not a finite number", "write a finite number")
    return scalar


def _read_choice(value: Any, cls: Any) -> Any:
    if not isinstance(value, str):
        raise misfits.wrong_type(value, cls)
    known = codec_shapes.choices(cls)
    if value not in known:
        raise misfits.wrong_choice(value, known)
    return cls(value) if isinstance(cls, type) else str(value)


def _tuple_reader(cls: Any, converter: Converter) -> Read:
    endless = Ellipsis in get_args(cls)
    slots = [(converter.get_structure_hook(item), item) for item in get_args(cls) if item is not Ellipsis]

    def read_value(value: Any, _: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or (not endless and len(value) != len(slots)):
            listed = isinstance(value, list)
            error = misfits.wrong_length(value, cls, len(slots)) if listed else misfits.wrong_type(value, cls)
            error.given = value
            raise error
        out: list[Any] = []
        wrong: list[Exception] = []
        for item, (hook, kind) in zip(value, repeat(slots[0]) if endless else slots, strict=False):
            try:
                out.append(hook(item, kind))
            except (MisfitError, BaseValidationError) as error:
                error.add_note(IterableValidationNote("", len(out) + len(wrong), kind))
                wrong.append(error)
                if len(wrong) == misfits.MOST:
                    wrong.append(misfits.too_many(len(value), len(out) + len(wrong)))
                    break
        if wrong:
            raise IterableValidationError("", wrong, cls)
        return tuple(out)

    return read_value


def _union_reader(cls: Any, converter: Converter) -> Read:
    kinds = codec_shapes.kinds(cls)
    hooks = {member: converter.get_structure_hook(member) for member in get_args(cls)}
    members = sorted(hooks, key=lambda member: member is float)  # float last: an int that may be one stays one
    wide = float in hooks

    def read_value(value: Any, _: Any) -> Any:
        if kinds and isinstance(value, dict):
            kind = _kind_of(value, cls, kinds)
            return hooks[kind](value, kind)
        if kinds and isinstance(value, str):  # a bare name is short for an object of that kind with its defaults
            kind = _kind_named(value, cls, kinds, at=None)
            return hooks[kind]({}, kind)
        for member in members:
            if wide and member is int and isinstance(value, int) and not -_LARGEST < value < _LARGEST:
                continue  # as a float, which it may be as well
            if codec_shapes.fits(member, value):
                return hooks[member](value, member)
        raise misfits.wrong_type(value, cls)

    return read_value


def _kind_of(data: dict[Any, Any], cls: Any, kinds: dict[str, type]) -> type:
    """The class that the tag of an object names."""
    if TAG not in data:
        raise misfits.no_kind(data, cls, kinds)
    return _kind_named(data[TAG], cls, kinds, at=TAG)


def _kind_named(name: object, cls: Any, kinds: dict[str, type], at: str | None) -> type:
    if isinstance(name, str) and name in kinds:
        return kinds[name]
    raise misfits.wrong_kind(name, cls, kinds, at)


def _class_reader(cls: type, converter: Converter) -> Read:
    inner: Read = make_dict_structure_fn(cls, converter, _cattrs_detailed_validation=True, **_overrides(cls))
    own = {cls.__name__: cls} if cls in codec_shapes.tagged() else {}
    names = dict.fromkeys(field.name for field in codec_shapes.fields(cls))

    def read_value(value: Any, _: Any) -> Any:
        if not isinstance(value, dict):
            raise misfits.wrong_type(value, cls)
        if own and TAG in value:
            _kind_of(value, cls, own)
            value = {key: item for key, item in value.items() if key != TAG}
        if value.keys() <= names.keys():
            return inner(value, cls)
        unknown = misfits.unknown_keys(cls, value, names)
        try:
            inner(value, cls)
        except ClassValidationError as error:
            raise ClassValidationError("", [*error.exceptions, *unknown], cls) from None
        raise ClassValidationError("", unknown, cls)

    return read_value


def _overrides(cls: type) -> dict[str, Any]:
    kept = {field.name for field in codec_shapes.fields(cls)}
    return {field.name: override(omit=field.name not in kept) for field in attrs.fields(cls)}


# --- out -----------------------------------------------------------------------------------------------------------


def _scalar_writer(cls: type, wider: type) -> Write:
    """The plain form of what counts as one: 1.0 of 1, 1 of True, text of an enum or of torch's version.

    Anything else is left as it is, for ``canonical`` to refuse with its place: ``Config(accumulation="4")`` is not 4.
    """

    def write_value(value: Any) -> Any:
        if type(value) is cls or not isinstance(value, wider):
            return value
        try:
            return cls(value)
        except OverflowError:  # an int that no float holds; refused when it is read
            return value

    return write_value


@cache  # cattrs forgets all it has generated whenever it meets a new kind of tuple, and generates it again
def _class_writer(cls: type, converter: Converter) -> Write:
    inner: Write = make_dict_unstructure_fn(cls, converter, **_overrides(cls))
    tag = {TAG: cls.__name__} if cls in codec_shapes.tagged() else {}

    def write_value(value: Any) -> Any:
        if not isinstance(value, cls):  # refused when it is read
            return value
        return tag | inner(value) if tag else inner(value)

    return write_value


def _tuple_writer(cls: Any, converter: Converter) -> Write:
    """A list; what is neither a tuple nor a list stays as it is, or text would become a list of its characters."""
    slots = tuple(converter.get_unstructure_hook(item) for item in get_args(cls) if item is not Ellipsis)
    endless = Ellipsis in get_args(cls)

    def write_value(value: Any) -> Any:
        if not isinstance(value, tuple | list):
            return value
        if endless:
            write_item = slots[0]
            return [write_item(item) for item in value]
        hooks = slots if len(slots) == len(value) else repeat(converter.unstructure)
        return [hook(item) for hook, item in zip(hooks, value, strict=False)]

    return write_value


def _union_writer(cls: Any, converter: Converter) -> Write:
    """By the class of the value; but an int where only floats are meant becomes one, as it will be read."""
    as_float, write_float = float in get_args(cls) and int not in get_args(cls), _scalar_writer(float, Real)

    def write_value(value: Any) -> Any:
        if type(value) is tuple:
            return [write_value(item) for item in value]
        return write_float(value) if as_float and type(value) is int else converter.unstructure(value)

    return write_value


# --- what went wrong -----------------------------------------------------------------------------------------------


_Place = tuple[object, ...]
"""Keys and indices that lead from the whole to a value."""

_OWN = "write a value that the class accepts"


def _finding(place: _Place, misfit: MisfitError, where: str, language: Language) -> Finding:
    return refusal(misfit.rule, reduce(inside, place, where), misfit.what, misfit.fix(language))


def _misfits(error: Exception, place: _Place) -> Iterator[tuple[_Place, MisfitError]]:
    """Each place that does not fit, in the order of the fields; keys that are not known come after them."""
    match error:
        case MisfitError():
            yield (place if error.at is None else (*place, error.at)), error
        case IterableValidationError():
            for below in error.exceptions:
                note = _note(below, IterableValidationNote)
                yield from _misfits(below, place if note is None else (*place, note.index))
        case ClassValidationError():
            for below in error.exceptions:
                yield from _in_class(below, error.cl, place)
        case _:  # raised by the class itself
            yield place, MisfitError("wrong-value", shorter(str(error)), _OWN)


def _in_class(error: Exception, cls: type, place: _Place) -> Iterator[tuple[_Place, MisfitError]]:
    note = _note(error, AttributeValidationNote)
    if note is None:
        yield from _misfits(error, place)
    elif isinstance(error, KeyError):
        yield from _misfits(misfits.missing_key(cls, note.name, note.type), place)
    else:
        given = getattr(error, "given", None)
        whole = misfits.completed(given, note.type, getattr(attrs.fields(cls), note.name).default)
        yield from _misfits(whole or error, (*place, note.name))


_ROUNDS = 8
"""Times that data are mended: what was wrong inside a value may leave the value itself wrong."""


def _mended(data: object) -> Config | None:
    """The config with what was probably meant in the place of each misfit, or nothing there; None where none is left.

    What is wrong with the engine as a whole leaves nothing to go on with: everything else depends on it.
    """
    if not isinstance(data, dict):
        return None
    for _ in range(_ROUNDS):
        try:
            config: Config = _converter().get_structure_hook(Config)(data, Config)
        except (MisfitError, BaseValidationError) as error:
            found = sorted(_misfits(error, ()), key=lambda one: len(one[0]), reverse=True)
            for place, misfit in found:
                around = place[:-1] if misfit.rule == "missing-key" else place  # a key that is not there cannot go
                if around == () or (around == ("engine",) and (misfit.meant is None or misfit.rule == "wrong-type")):
                    return None
                data = _changed(data, around, misfit)
        else:
            return config
    return None


def _changed(data: Any, place: _Place, misfit: MisfitError) -> Any:
    """The data with one misfit mended: replaced, renamed or left out. A list is left out as a whole."""
    key, below = place[0], place[1:]
    if not isinstance(data, dict) or key not in data:
        return data
    rest = {name: value for name, value in data.items() if name != key}
    if below and isinstance(data[key], dict):
        return data | {key: _changed(data[key], below, misfit)}
    if below or misfit.meant is None:
        return rest
    if isinstance(misfit.meant, tuple):
        section, written = misfit.meant
        return rest | {section: written}
    if misfit.rule == "unknown-key":
        return rest if misfit.meant in rest else rest | {misfit.meant: data[key]}
    return rest | {key: misfit.meant}


def _note(error: Exception, cls: type) -> Any:
    return next((note for note in getattr(error, "__notes__", ()) if isinstance(note, cls)), None)
