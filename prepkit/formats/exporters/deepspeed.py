"""DeepSpeed's own JSON of a config: what ``DeepSpeed(config=...)`` has, with every field beside it written into it."""

from __future__ import annotations

import json
import math
from typing import Any

from attrs import evolve

from prepkit.config import FP16, ClipNorm, Config, DeepSpeed, Mixed
from prepkit.config.precision import PRECISIONS
from prepkit.formats.exporters.exported import LeftOut
from prepkit.resolve.deepspeed.data import AUTO, stage
from prepkit.resolve.deepspeed.working import DTYPES


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
    _gradients(data, config)
    if steps_of(config) != 1:
        data["gradient_accumulation_steps"] = steps_of(config)
    elif config.global_batch is not None and type(data.get("train_micro_batch_size_per_gpu")) is int:
        data["train_batch_size"] = config.global_batch  # alone DeepSpeed would make the micro batch of it
    if isinstance(config.clip, ClipNorm):
        data["gradient_clipping"] = config.clip.max_norm
    data.setdefault("gradient_clipping", 0.0)  # or DeepSpeed would clip to a norm of its own
    return data


def reduces_otherwise(config: Config) -> bool:
    """Whether gradients are reduced in another dtype than DeepSpeed takes where its JSON says none."""
    precision = config.precision
    return isinstance(precision, Mixed) and precision.reduce_dtype != PRECISIONS[type(precision)].compute_dtype


def _gradients(data: dict[str, Any], config: Config) -> None:
    """Puts in the dtypes in which gradients are reduced and add up, as a plan has them."""
    precision = config.precision
    if not isinstance(precision, Mixed) or not reduces_otherwise(config):
        return
    dtype = DTYPES[precision.reduce_dtype]
    if data.get("communication_data_type") in (None, AUTO):
        data["communication_data_type"] = dtype
    types = data.get("data_types") or {}
    summed = isinstance(types, dict) and types.get("grad_accum_dtype") in (None, AUTO)
    if summed and dtype == "fp32" and stage(DeepSpeed(config=json.dumps(data))) > 0:
        data["data_types"] = {**types, "grad_accum_dtype": dtype}


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
