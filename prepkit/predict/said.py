"""What a plan says in single values: what policies are asked about, and what a pull request's comment compares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from prepkit import codec
from prepkit.codec.field_types import kinds
from prepkit.codec.languages import TAG
from prepkit.config import Config, Engine
from prepkit.config.optimizer import specs
from prepkit.plan import Plan
from prepkit.predict import predict
from prepkit.resolve.deepspeed.data import ZERO, data_of, look
from prepkit.resolve.deepspeed.data import said as written
from prepkit.steps import InitializeDeepSpeed

BYTES = ("memory.for_certain", "memory.at_most", "memory.host", "traffic.sent", "traffic.between_nodes")
"""Paths whose values are bytes."""
WHATS: dict[str, Any] = {
    "engine": Literal[tuple(kinds(Engine))],
    **dict.fromkeys(("world_size", "per_node"), int),
    "device": str,
    **dict.fromkeys(("mesh.replicate", "mesh.shard", "mesh.tensor", "global_batch", "accumulation"), int),
    "optimizer": str,
    "parameters": int,
    **dict.fromkeys(BYTES, int),
    **dict.fromkeys(("warnings", "overridden"), tuple[str, ...]),
}
"""Every path that a plan says, but for those of its config, with the type of its value where that is known."""
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
    return named if isinstance(named, str) else None


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
