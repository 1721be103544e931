"""What a plan says in single values: what policies are asked about, and what a pull request's comment compares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args

import attrs

from prepkit import codec
from prepkit.codec import field_types
from prepkit.codec.languages import TAG
from prepkit.codec.text import shown
from prepkit.config import Config, Engine
from prepkit.config.optimizer import specs
from prepkit.findings.text import near
from prepkit.plan import Plan
from prepkit.predict import predict
from prepkit.predict.optimizers import LIBRARIES
from prepkit.resolve.deepspeed.data import ZERO, data_of, look
from prepkit.resolve.deepspeed.data import said as written
from prepkit.steps import InitializeDeepSpeed

BYTES = ("memory.for_certain", "memory.at_most", "memory.host", "traffic.sent", "traffic.between_nodes")
"""Paths whose values are bytes."""
WHATS: dict[str, Any] = {
    "engine": Literal[tuple(field_types.kinds(Engine))],
    **dict.fromkeys(("world_size", "per_node"), int),
    "device": str,
    **dict.fromkeys(("mesh.replicate", "mesh.shard", "mesh.tensor", "global_batch", "accumulation"), int),
    "optimizer": str,
    "parameters": int,
    **dict.fromkeys(BYTES, int),
    **dict.fromkeys(("warnings", "overridden"), tuple[str, ...]),
}
"""Every path that a plan says, but for those of its config, with the type of its value where that is known."""
LEAST = {what: 0 if what in (*BYTES, "parameters") else 1 for what, kind in WHATS.items() if kind is int}
"""Paths of numbers to the least that a plan has there."""
NAMES: dict[str, tuple[tuple[str, ...], float]] = {
    "optimizer": (tuple(dict.fromkeys(name for _, classes in LIBRARIES for name in classes)), 0.9),
    "device": (("cpu", "cuda", "hpu", "ipu", "mlu", "mps", "mtia", "musa", "npu", "sdaa", "xla", "xpu"), 0.6),
}
"""Paths of names that anyone may add to: those that are known, and how like one of them another is a misspelt one."""
TELLS = {
    "global_batch": "--batch-size N",
    "per_node": "--per-node N",
    "traffic.between_nodes": "--per-node N",
    "optimizer": "--optimizer adamw",
}
"""Paths to the option that says what a plan may lack there; nothing on the command line says any other."""
NUMBERS = ("above", "below")
"""Tests that compare numbers."""
CONFIG = Config
"""The type of what ``config`` says."""


def said(plan: Plan) -> dict[str, Any]:
    """The values by name; None is what is not known, such as traffic between nodes where nobody says how large one is.

    ``memory`` and ``traffic`` are of the fullest rank, in bytes, and per optimizer step; activations are not counted.
    """
    prediction, env = predict(plan), plan.facts.env
    known = prediction.classes
    sizes = {axis.name: axis.size for axis in plan.mesh}
    between = prediction.crossing(env.per_node) if known and env.per_node else None
    if plan.world_size == 1:
        between = 0
    return {
        "engine": type(plan.config.engine).__name__,
        "world_size": plan.world_size,
        "per_node": env.per_node,
        "device": env.device,
        "mesh": {name: sizes.get(name, 1) for name in ("replicate", "shard", "tensor")},
        "global_batch": plan.owners.global_batch,
        "accumulation": plan.owners.accumulation_steps,
        "optimizer": _optimizer(plan),
        "parameters": sum(param.numel for param in plan.facts.model.params),
        "memory": {
            "for_certain": max(ranks.floor() for ranks in known) if known else None,
            "at_most": max(ranks.total() for ranks in known) if known else None,
            "host": max(ranks.total("host") for ranks in known) if known else None,
        },
        "traffic": {"sent": prediction.sent if known else None, "between_nodes": between},
        "warnings": [finding.rule for finding in plan.warnings],
        "overridden": [finding.rule for finding in plan.overridden],
        "config": _config(plan),
    }


def _config(plan: Plan) -> dict[str, Any]:
    """The config as data; where DeepSpeed runs, with what its whole JSON says in the end, whichever file said it."""
    data: dict[str, Any] = codec.to_data(plan.config)
    step = next((one.step for one in plan.steps if isinstance(one.step, InitializeDeepSpeed)), None)
    if step is None:
        return data
    own = data_of(step.settings)
    away = {f"offload_{part}": look(own, f"{ZERO}.offload_{part}.device", "none") for part in ("optimizer", "param")}
    data["engine"] |= {"stage": step.stage, "micro_batch": look(own, "train_micro_batch_size_per_gpu"), **away}
    if data["optimizer"] is None and isinstance(made := own.get("optimizer"), dict):
        data["optimizer"] = {TAG: made.get("type"), **look(made, "params", {})}
    return data


def _optimizer(plan: Plan) -> str | None:
    """Who steps: the class that was given, those that the config asks for, or the type that DeepSpeed's JSON names."""
    if plan.facts.optimizer is not None:
        return plan.facts.optimizer.name
    if asked := specs(plan.config.optimizer):
        return " + ".join(type(spec).__name__ for spec in asked)
    named = look(written(plan.config.engine), "optimizer.type")
    if not isinstance(named, str):
        return None
    known, _ = NAMES["optimizer"]
    return next((name for name in known if name.lower() == named.lower()), named)  # DeepSpeed reads any case


def every(values: Any, path: str) -> Iterator[Any]:
    """All values at a dotted path, of each object where several are in a list; none where there is no such path."""
    name, _, rest = path.partition(".")
    if isinstance(values, list):
        for one in values:
            yield from every(one, path)
    elif isinstance(values, dict) and name in values:
        yield from every(values[name], rest) if rest else (values[name],)


def at(values: Any, path: str) -> Any:
    """The value at a dotted path. Raises ``KeyError`` where there is none."""
    for name in path.split("."):
        if not isinstance(values, dict) or name not in values:
            raise KeyError(path)
        values = values[name]
    return values


# --- what no plan says -----------------------------------------------------------------------------------------------


def impossible(what: str, test: str, value: object, types: tuple[Any, ...]) -> tuple[str, str] | None:
    """Why no plan answers a test with this value, and what to type; None where one may.

    ``types``: those that values at the path have. Of a list it is asked of each of its values.
    """
    kinds = tuple(one for cls in types for one in field_types.options(cls))
    kinds = _items(kinds) if test == "has" else kinds
    number = int in kinds or float in kinds
    if not (number if test in NUMBERS else any(field_types.may_be(kind, value) for kind in kinds)):
        return _never(what, test, value, kinds)
    return _out_of_reach(what, test, value)


def _items(kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    """The types of what lists of these types have, and the objects that stand for a list of one."""
    listed = [one for kind in kinds if field_types.is_tuple(kind) for one in get_args(kind) if one is not Ellipsis]
    items = tuple(dict.fromkeys(one for kind in listed for one in field_types.options(kind)))
    return (*items, *(one for one in kinds if attrs.has(one))) if items else ()


def _never(what: str, test: str, value: object, kinds: tuple[Any, ...]) -> tuple[str, str]:
    """Why no plan has this value there, and what to type."""
    if not kinds:
        return f"{what} is no list, so that it has nothing", "Write is, or in with a list."
    named = [one.__name__ for one in kinds if one in field_types.tagged()]
    named += [one for kind in kinds if field_types.is_choice(kind) for one in field_types.choices(kind)]
    plain = [field_types.describe(one) for one in kinds if one in field_types.SCALARS and one is not NoneType]
    plain += [field_types.describe(one) for one in kinds if field_types.is_tuple(one) and not named]
    ways = tuple(dict.fromkeys((*(f'"{one}"' for one in named), *plain)))
    if not ways:
        known = [name for kind in kinds for name in field_types.names_within(kind)]
        return f"{what} is no single value", f"Ask about one of its settings: {', '.join(known)}."
    of_kind = f"{what} is one of {', '.join(ways)}" if len(ways) > 1 else f"{what} is {ways[0]}"
    if test in NUMBERS:
        return f"{of_kind}, and no number", "Write is, is_not, in or not_in."
    if isinstance(value, str) and any(map(field_types.is_tuple, kinds)) and not named:
        return f"{of_kind}, and never {shown(value)}", f'Write has = "{value}".'
    close = near(value, named, 1) if isinstance(value, str) else ()
    return f"{of_kind}, and never {shown(value)}", f'Write "{close[0]}".' if close else f"Write {' or '.join(ways)}."


def _out_of_reach(what: str, test: str, value: object) -> tuple[str, str] | None:
    """Why no plan has this value, though it is of the right type, and what to type; None where a plan may have it."""
    if isinstance(value, float) and (math.isnan(value) or (test in NUMBERS and math.isinf(value))):
        return f"every plan gives the same answer to {value}", "Write a finite number."
    least = LEAST.get(what)
    if least is not None and isinstance(value, int | float) and test != "above":
        least += test == "below"
        if value < least:
            return f"{what} is never {'below' if test == 'below' else 'as low as'} {value}", f"Write at least {least}."
    names, likeness = NAMES.get(what, ((), 1.0))
    if isinstance(value, str) and names and value not in names and (not value or near(value, names, 1, likeness)):
        ways = near(value, names, 1, max(likeness, 0.75)) or names
        fix = " or ".join(f'"{one}"' for one in ways)
        return f"{what} is never {shown(value)}", f"Write {fix}."
    return None
