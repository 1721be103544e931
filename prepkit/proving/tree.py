"""Arguments and outputs of a forward as JSON beside their tensors: nothing is pickled, and no class is imported."""

from __future__ import annotations

import dataclasses
import json
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


class NotPlain(ValueError):
    """An argument is neither a tensor nor plain data, so that a record cannot hold it; the text names its class."""


def written(value: Any, keep: Callable[[Tensor], str]) -> Any:
    """The value as JSON data; ``keep`` takes each tensor and returns the key under which it lies."""
    match value:
        case Tensor():
            return {"tensor": keep(value)}
        case None | bool() | int() | float() | str():
            return {"value": value}
        case Mapping():
            if all(isinstance(key, str) for key in value):
                return {"dict": {key: written(one, keep) for key, one in value.items()}}
        case tuple() if hasattr(value, "_fields"):
            return {"fields": list(value._fields), "named": [written(one, keep) for one in value]}
        case tuple() | list():
            return {type(value).__name__ if type(value) is list else "tuple": [written(one, keep) for one in value]}
    raise NotPlain(f"the forward was given an object of class {type(value).__name__}")


def read(text: str, tensors: Mapping[str, Tensor]) -> Any:
    """The value again. Raises ``ValueError`` for anything that ``written`` does not write."""
    return _read(json.loads(text), tensors)


def readable(text: str, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether ``read`` takes it for arguments and keywords."""
    try:
        found = read(text, tensors)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return False
    return isinstance(found, list) and len(found) == 2 and isinstance(found[1], dict)


def _read(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    match data:
        case {"tensor": str(key), **rest} if not rest and key in tensors:
            return tensors[key]
        case {"value": None | bool() | int() | float() | str() as value, **rest} if not rest:
            return value
        case {"dict": dict(items), **rest} if not rest:
            return {key: _read(one, tensors) for key, one in items.items()}
        case {"fields": list(fields), "named": list(items), **rest} if not rest and len(fields) == len(items):
            named = PackedSequence if tuple(fields) == PackedSequence._fields else namedtuple("Named", fields)
            return named(*(_read(one, tensors) for one in items))
        case {"list": list(items), **rest} if not rest:
            return [_read(one, tensors) for one in items]
        case {"tuple": list(items), **rest} if not rest:
            return tuple(_read(one, tensors) for one in items)
    raise ValueError(f"{data!r:.80} is no argument of a recorded forward")


def tensors_of(value: Any, inside: tuple[Any, ...] = ()) -> Iterator[Tensor]:
    """Every tensor in an output, in an order that the same class of output always has.

    ``inside``: the objects that hold the value, which one of them may hold again.
    """
    if isinstance(value, Tensor):
        yield value
    elif not any(value is one for one in inside):
        for one in _held(value):
            yield from tensors_of(one, (*inside, value))


def _held(value: Any) -> Iterable[Any]:
    """What an output has inside: entries, fields, or what an object of any class keeps in its attributes."""
    match value:
        case Mapping():
            return value.values()
        case tuple() | list():
            return value
        case type() | nn.Module() | ModuleType() | FunctionType() | MethodType() | partial():
            return ()
    fields = tuple(one.name for one in getattr(type(value), "__attrs_attrs__", ()))
    if dataclasses.is_dataclass(value):
        fields = tuple(field.name for field in dataclasses.fields(value))
    return [getattr(value, name) for name in fields] if fields else getattr(value, "__dict__", {}).values()
