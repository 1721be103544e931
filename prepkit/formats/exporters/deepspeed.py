"""DeepSpeed's own JSON of a config: what ``DeepSpeed(config=...)`` has, with every field beside it written into it."""

from __future__ import annotations

import json
import math
from typing import Any

from attrs import evolve

from prepkit.config import FP16, ClipNorm, Config, DeepSpeed
from prepkit.config.precision import PRECISIONS
from prepkit.formats.exporters.exported import LeftOut


def deepspeed_file(config: Config, world_size: int | None, per_node: int | None) -> LeftOut:  # noqa: ARG001
    """The JSON; for another engine than DeepSpeed one that says as much as it can."""
    data = folded(config)
    if not isinstance(config.engine, DeepSpeed):
        return LeftOut(data=data, means=config)
    return LeftOut(data=data, means=evolve(config, engine=with_json(config.engine, data)))


def with_json(engine: DeepSpeed, data: dict[str, Any]) -> DeepSpeed:
    """The engine whose ``folded`` fields stand in its JSON alone."""
    return evolve(
        engine, stage=None, offload_optimizer=None, offload_param=None, micro_batch=None, config=json.dumps(data)
    )


def folded(config: Config) -> dict[str, Any]:
    """DeepSpeed's config with stage, offload, micro batch, precision, accumulation and clipping in it.

    What it says itself stays, ``"auto"`` too; a number that it gives beside another of the config is a finding of
    reading back, and of the rules.
    """
    engine = config.engine if isinstance(config.engine, DeepSpeed) else DeepSpeed(stage=0)
    data: dict[str, Any] = json.loads(engine.config)
    zero = data.setdefault("zero_optimization", {})
    if isinstance(zero, dict):
        if engine.stage is not None or "stage" not in zero:
            zero["stage"] = 2 if engine.stage is None else engine.stage
        for name in ("offload_optimizer", "offload_param"):
            device = getattr(engine, name)
            if device is not None:
                zero[name] = {**(zero.get(name) or {}), "device": device}
    if engine.micro_batch is not None:
        data["train_micro_batch_size_per_gpu"] = engine.micro_batch
    section = PRECISIONS[type(config.precision)].deepspeed_section
    if section is not None:
        data[section] = {**(data.get(section) or {}), "enabled": True, **_scaling(config)}
    if steps_of(config) != 1:
        data["gradient_accumulation_steps"] = steps_of(config)
    elif config.global_batch is not None and type(data.get("train_micro_batch_size_per_gpu")) is int:
        data["train_batch_size"] = config.global_batch  # alone DeepSpeed would make the micro batch of it
    if isinstance(config.clip, ClipNorm):
        data["gradient_clipping"] = config.clip.max_norm
    data.setdefault("gradient_clipping", 0.0)  # or DeepSpeed would clip to a norm of its own
    return data


def steps_of(config: Config) -> int:
    """Micro-batches per optimizer step where loaders and ranks have no say: 1 if nothing is said."""
    return 1 if config.accumulation is None else config.accumulation


def _scaling(config: Config) -> dict[str, int]:
    """The loss scale of float16, where it is a power of two, which is all that DeepSpeed knows."""
    match config.precision:
        case FP16(init_scale=scale, growth_interval=interval):
            power = math.frexp(scale)[1] - 1 if scale > 0 and math.isfinite(scale) else 0
            return {"initial_scale_power": max(power, 0), "loss_scale_window": interval}
    return {}
