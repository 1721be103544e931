"""transformers' ``TrainingArguments`` of a config: the keys that prepare a model."""

from __future__ import annotations

import json
from typing import Any

from attrs import evolve

from prepkit.config import (
    BF16,
    DDP,
    FP16,
    FSDP1,
    FSDP2,
    CheckpointBlocks,
    ClipNorm,
    CompileModel,
    Config,
    DeepSpeed,
)
from prepkit.formats.exporters.accelerate import fsdp_section
from prepkit.formats.exporters.deepspeed import folded, steps_of, with_json
from prepkit.formats.exporters.exported import LeftOut
from prepkit.formats.importers.argument_values import DEFAULTS
from prepkit.resolve.deepspeed.data import look


def training_arguments_file(config: Config, world_size: int | None, per_node: int | None) -> LeftOut:  # noqa: ARG001
    """The arguments. ``output_dir`` and all that concerns data and logging are yours to add."""
    data: dict[str, Any] = {"gradient_accumulation_steps": steps_of(config), "ddp_timeout": _whole(config.timeout_s)}
    data["max_grad_norm"] = config.clip.max_norm if isinstance(config.clip, ClipNorm) else 0.0
    if isinstance(config.precision, BF16 | FP16):
        data["bf16" if isinstance(config.precision, BF16) else "fp16"] = True
    if config.device == "cpu":
        data["use_cpu"] = True
    match config.compile:
        case CompileModel(backend=backend, mode=mode):
            data |= {"torch_compile": True, "torch_compile_backend": backend, "torch_compile_mode": mode}
    sharded = isinstance(config.engine, FSDP1 | FSDP2)
    if isinstance(config.checkpointing, CheckpointBlocks) and not sharded:
        data["gradient_checkpointing"] = True
    means = config
    match config.engine:
        case DDP() as engine:
            data |= _ddp(engine)
        case FSDP1() | FSDP2():
            data |= _fsdp(config)
        case DeepSpeed() as zero:
            data["deepspeed"] = folded(evolve(config, accumulation=1, clip=None))
            if "gradient_clipping" not in json.loads(zero.config):
                data["deepspeed"]["gradient_clipping"] = "auto"  # the Trainer fills in its max_grad_norm
            means = evolve(config, engine=with_json(zero, data["deepspeed"]))
            data = _said_too(data["deepspeed"]) | data
    return LeftOut(data=data, means=means)


def _said_too(said: dict[str, Any]) -> dict[str, Any]:
    """Arguments that have to be what the JSON says, or the Trainer refuses to start (``HfTrainerDeepSpeedConfig``)."""
    found: dict[str, Any] = {}
    for key, (name, default) in DEFAULTS.items():
        there = look(said, key)
        if isinstance(there, list) and there != default:
            found |= dict(zip(("adam_beta1", "adam_beta2"), there, strict=False))
        elif isinstance(there, bool | int | float) and there != default:
            found[name] = there
    return found


def _whole(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


def _ddp(engine: DDP) -> dict[str, Any]:
    return {
        "ddp_find_unused_parameters": engine.find_unused_parameters,
        "ddp_bucket_cap_mb": _whole(engine.bucket_cap_mb),
        "ddp_broadcast_buffers": engine.broadcast_buffers,
        "ddp_static_graph": engine.static_graph,
    }


def _fsdp(config: Config) -> dict[str, Any]:
    """``fsdp`` and ``fsdp_config``, under the names that the Trainer reads."""
    section = {name.removeprefix("fsdp_"): value for name, value in fsdp_section(config).items()}
    section["cpu_offload"] = section.pop("offload_params")
    if isinstance(config.engine, FSDP1):
        section["reshard_after_forward"] = section.pop("sharding_strategy").lower()
        section.pop("ignored_modules", None)
    classes = section.get("transformer_layer_cls_to_wrap")
    if classes is not None:
        section["transformer_layer_cls_to_wrap"] = classes.split(",")
    return {"fsdp": True, "fsdp_config": section}
