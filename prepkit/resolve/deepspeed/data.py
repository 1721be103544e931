"""A user's DeepSpeed config as text and as data: read, searched, changed, and as settings of a step.

Nothing here changes what it is given: the text is frozen, and every parse makes data of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite
from typing import Any

from attrs import evolve

from prepkit.config import DeepSpeed, Engine
from prepkit.steps import Setting

Data = dict[str, Any]
Path = tuple[str, ...]

OWN_CLIP = 1.0
"""The norm that DeepSpeed clips to where its JSON does not say one (``GRADIENT_CLIPPING_DEFAULT``)."""
AUTO = "auto"
"""A value that somebody else is to fill in."""
DEFAULT_STAGE = 2
"""ZeRO stage where neither the engine nor its JSON names one (K-DS4)."""


class NotJsonError(ValueError):
    """The text is no JSON object; the message says where and why."""


def parse(text: str) -> Data:
    """The data in the text. Raises ``NotJsonError`` for what is no object, repeats a key, or holds ``NaN``."""
    try:
        data = json.loads(
            text, object_pairs_hook=_once, parse_constant=_no_constant, parse_int=_whole, parse_float=_fraction
        )
        _shallow(data)
    except json.JSONDecodeError as error:
        raise NotJsonError(f"not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise NotJsonError(f"nested more than {_DEPTH} levels deep") from None
    except ValueError as error:
        raise NotJsonError(str(error)) from None
    if not isinstance(data, dict):
        raise NotJsonError(f"the top level is a {type(data).__name__}, not an object of settings")
    return data


def _once(pairs: list[tuple[str, Any]]) -> Data:
    data: Data = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"the key {key!r:.60} appears twice in one object")
        data[key] = value
    return data


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is beyond what DeepSpeed takes")
    return int(digits)


def _fraction(digits: str) -> float:
    if not isfinite(value := float(digits)):
        raise ValueError(f"{digits:.20} is beyond what a number holds")
    return value


_DIGITS = 40
_DEPTH = 50
"""Levels of sections; DeepSpeed's own keys have four."""


def _shallow(data: Any) -> None:
    """Raises ``ValueError`` for what is nested deeper than any config, level by level: no recursion."""
    level = [data]
    for _ in range(_DEPTH):
        level = [
            item
            for held in level
            for item in (held.values() if isinstance(held, dict) else held if isinstance(held, list) else ())
        ]
        if not level:
            return
    raise ValueError(f"nested more than {_DEPTH} levels deep")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number that JSON has")


def said(engine: Engine) -> Data:
    """The data of the engine's JSON; none where it has none, or one that cannot be read, which is a finding."""
    try:
        return parse(getattr(engine, "config", "{}"))
    except NotJsonError:
        return {}


def look(data: Data, path: str, default: Any = None) -> Any:
    """The value at a dotted path; the default where any part of the path is missing (HC-3, HC-4).

    >>> look({"bf16": {"enabled": True}}, "bf16.enabled"), look({"bf16": 1}, "bf16.enabled", 0)
    (True, 0)
    """
    for key in path.split("."):
        if not isinstance(data, dict) or key not in data:
            return default
        data = data[key]
    return data


def put(data: Data, path: str, value: Any) -> None:
    """Sets the value at a dotted path, making sections on the way, in place of what is no section."""
    *above, last = path.split(".")
    for key in above:
        if not isinstance(data.get(key), dict):
            data[key] = {}
        data = data[key]
    data[last] = value


def drop(data: Data, path: str) -> None:
    """Removes what stands at a dotted path, if anything does (HC-5)."""
    *above, last = path.split(".")
    section = look(data, ".".join(above)) if above else data
    if isinstance(section, dict):
        section.pop(last, None)


def leaves(data: Data, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything that is no section, with its path, in the order of the data; an empty section is a leaf too."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


def settings(data: Data) -> tuple[Setting, ...]:
    """The data as plain values of a step, sorted by path."""
    return tuple(Setting(path=path, value=json.dumps(value, sort_keys=True)) for path, value in sorted(leaves(data)))


def data_of(settings: tuple[Setting, ...]) -> Data:
    """The data again: what ``settings`` was given."""
    data: Data = {}
    for setting in settings:
        section = data
        for key in setting.path[:-1]:
            section = section.setdefault(key, {})
        section[setting.path[-1]] = json.loads(setting.value)
    return data


def keys_of(engine: Engine) -> dict[str, Any]:
    """Dotted keys of the engine's JSON to their values, with its stage and its offloads as that JSON has them.

    >>> keys_of(DeepSpeed(stage=3, config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}))
    {'zero_optimization.stage': 3, 'bf16.enabled': True}
    """
    data = _data(engine)
    for key in ("stage", "offload_optimizer", "offload_param"):
        if (value := getattr(engine, key, None)) is not None:
            put(data, f"{ZERO}.{key}" if key == "stage" else f"{ZERO}.{key}.device", value)
    return {".".join(path): value for path, value in leaves(data)}


def changed_keys(old: Engine, new: Engine) -> tuple[str, ...]:
    """``key=new instead of old`` for each key of their JSON that differs, as it has the values; none without one."""
    if not said(old):
        return ()
    before, after = keys_of(old), keys_of(new)
    every = {key: (before.get(key), after.get(key)) for key in (*before, *after)}
    return tuple(
        f"{key}={json.dumps(there)}" + (f" instead of {json.dumps(here)}" if key in before else "")
        for key, (here, there) in every.items()
        if here != there
    )


def stage(engine: DeepSpeed) -> int:
    """The ZeRO stage that the engine or its JSON asks for."""
    if engine.stage is not None:
        return engine.stage
    section = look(said(engine), "zero_optimization")
    if isinstance(section, bool):
        return int(section)  # the oldest form: true is stage 1 (deepspeed/runtime/zero/config.py)
    named = look(said(engine), "zero_optimization.stage", 0 if isinstance(section, dict) else DEFAULT_STAGE)
    return named if isinstance(named, int) else DEFAULT_STAGE


def tensor_parallel(engine: DeepSpeed) -> int:
    """Ranks that one model is split over by DeepSpeed's automatic tensor parallelism; 1 for none (DS-3)."""
    size = look(said(engine), "tensor_parallel.autotp_size")
    return size if isinstance(size, int) and size > 1 else 1


# --- edits -----------------------------------------------------------------------------------------------------------


ZERO = "zero_optimization"


def restaged(engine: DeepSpeed, stage: int) -> DeepSpeed:
    """The engine at another ZeRO stage; below 3 parameters are no longer offloaded, which only 3 can do."""
    edited = _without(evolve(engine, stage=stage), f"{ZERO}.stage")
    return edited if stage == 3 or not offloads(edited, "param") else offloaded(edited, "param", away=False)


def offloads(engine: DeepSpeed, kind: str) -> bool:
    """Return whether ``optimizer`` or ``param`` leaves the device."""
    own = engine.offload_optimizer if kind == "optimizer" else engine.offload_param
    named = own or look(_data(engine), f"{ZERO}.offload_{kind}.device", "none")
    return named not in ("none", "auto", None)


def offloaded(engine: DeepSpeed, kind: str, *, away: bool = True) -> DeepSpeed:
    """The engine with ``optimizer`` or ``param`` in host memory, or, not away, on the device."""
    place: Any = "cpu" if away else None
    changed = evolve(engine, offload_optimizer=place) if kind == "optimizer" else evolve(engine, offload_param=place)
    path = f"{ZERO}.offload_{kind}"
    return _without(changed, f"{path}.device") if away else _without(changed, path)


def filled(engine: DeepSpeed, values: dict[str, Any]) -> DeepSpeed:
    """The engine with these values where its JSON leaves them to a caller (``auto``), whose file has said them."""
    data = _data(engine)
    left = {path: value for path, value in values.items() if look(data, path) == AUTO}
    for path, value in left.items():
        put(data, path, value)
    return evolve(engine, config=json.dumps(data)) if left else engine


def with_key(engine: DeepSpeed, path: str, value: Any) -> DeepSpeed:
    """The engine with one key set in its JSON, by its dotted path."""
    data = _data(engine)
    put(data, path, value)
    return evolve(engine, config=json.dumps(data))


def _data(engine: Engine) -> dict[str, Any]:
    """The JSON; the oldest form of its section, a bare ``true``, as the section that it means."""
    data = said(engine)
    if isinstance(data.get(ZERO), bool):
        data[ZERO] = {"stage": int(data[ZERO])}
    return data


def _without(engine: DeepSpeed, path: str) -> DeepSpeed:
    """The engine without that setting in its JSON, which stays as it is written where there is none."""
    data = _data(engine)
    if look(data, path) is None:
        return engine
    drop(data, path)
    return evolve(engine, config=json.dumps(data))


def number_in(value: Any) -> float | None:
    """The finite number that a text is."""
    try:
        number = float(value) if isinstance(value, str) else float("nan")
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None
