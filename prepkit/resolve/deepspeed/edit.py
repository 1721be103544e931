"""Another DeepSpeed engine from a given one: where a setting also stands in the JSON, it is changed there too.

Without that, the changed setting would stand in two places that disagree (rule ``deepspeed.two-places``).
"""

from __future__ import annotations

import json
from typing import Any

from attrs import evolve

from prepkit.config import DeepSpeed
from prepkit.resolve.deepspeed.data import NotJsonError, drop, look, parse, put

ZERO = "zero_optimization"


def restaged(engine: DeepSpeed, stage: int) -> DeepSpeed:
    """The engine at another ZeRO stage; below 3 parameters are no longer offloaded, which only 3 can do."""
    edited = _without(evolve(engine, stage=stage), f"{ZERO}.stage")
    return edited if stage == 3 or not offloads(edited, "param") else offloaded(edited, "param", away=False)


def offloads(engine: DeepSpeed, kind: str) -> bool:
    """Whether ``optimizer`` or ``param`` leaves the device."""
    own = engine.offload_optimizer if kind == "optimizer" else engine.offload_param
    named = own or look(_data(engine), f"{ZERO}.offload_{kind}.device", "none")
    return named not in ("none", "auto", None)


def offloaded(engine: DeepSpeed, kind: str, *, away: bool = True) -> DeepSpeed:
    """The engine with ``optimizer`` or ``param`` in host memory, or, not away, on the device."""
    place: Any = "cpu" if away else None
    changed = evolve(engine, offload_optimizer=place) if kind == "optimizer" else evolve(engine, offload_param=place)
    path = f"{ZERO}.offload_{kind}"
    return _without(changed, f"{path}.device") if away else _without(changed, path)


def with_zero(engine: DeepSpeed, key: str, value: int) -> DeepSpeed:
    """The engine with one key of ``zero_optimization`` set in its JSON."""
    data = _data(engine)
    put(data, f"{ZERO}.{key}", value)
    return evolve(engine, config=json.dumps(data))


def _data(engine: DeepSpeed) -> dict[str, Any]:
    """The JSON; the oldest form of its section, a bare ``true``, as the section that it means."""
    try:
        data = parse(engine.config)
    except NotJsonError:
        return {}
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
