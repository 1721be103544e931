"""accelerate's launch config of a config: what ``accelerate config`` would have written (behaviour section 10)."""

from __future__ import annotations

import re
from math import prod
from typing import Any

from attrs import evolve

from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FP16,
    FSDP1,
    FSDP2,
    MSAMP,
    XLA,
    BroadcastWeights,
    CheckpointBlocks,
    ClipNorm,
    Compile,
    CompileBlocks,
    CompileModel,
    Config,
    DeepSpeed,
    DelayedScaling,
    FP8Backend,
    MXFP8BlockScaling,
    OffloadToCPU,
    Precision,
    Single,
    TensorParallel,
    TorchAO,
    TransformerEngine,
    Wrap,
    WrapBlocks,
    WrapClasses,
    WrapSize,
)
from prepkit.formats.exporters.deepspeed import deepspeed_file, folded, reduces_otherwise, steps_of
from prepkit.formats.exporters.exported import LeftOut

JSON_NAME = "deepspeed.json"
"""Name of DeepSpeed's own config, which lies beside the file."""


def accelerate_file(config: Config, world_size: int | None, per_node: int | None) -> LeftOut:
    """The file; where DeepSpeed has a config of its own the JSON that it points to as well."""
    config = _counted(config, world_size)
    data: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "distributed_type": _kind(config)}
    if world_size is not None:
        data["num_processes"] = world_size
        data["num_machines"] = max(world_size // per_node, 1) if per_node else 1
    elif isinstance(config.engine, Single):
        data["num_processes"] = 1
    if config.device == "cpu":
        data["use_cpu"] = True
    data["mixed_precision"] = _word(config.precision)
    data |= _section("fp8_config", _float8(config.precision))
    data |= _section("dynamo_config", _compiled(config.compile))
    data |= _section("parallelism_config", _sizes(config, world_size))
    match config.engine:
        case FSDP1() | FSDP2():
            data["fsdp_config"] = fsdp_section(config)
        case DeepSpeed():
            return _with_deepspeed(config, data, config.engine)
    return LeftOut(data=data, means=config)


def _section(name: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name: values} if values else {}


def _kind(config: Config) -> str:
    match config.engine:
        case Single():
            return "NO"
        case FSDP1() | FSDP2():
            return "FSDP"
        case DeepSpeed():
            return "DEEPSPEED"
        case XLA():
            return "XLA"
        case DDP() | TensorParallel():
            return "MULTI_CPU" if config.device == "cpu" else "MULTI_GPU"


def _word(precision: Precision) -> str:
    return {BF16: "bf16", FP16: "fp16", FP8: "fp8"}.get(type(precision), "no")


def _float8(precision: Precision) -> dict[str, Any]:
    return backend_section(precision.backend) if isinstance(precision, FP8) else {}


def backend_section(backend: FP8Backend) -> dict[str, Any]:
    """Accelerate's ``fp8_config``."""
    match backend:
        case TorchAO(pad_inner_dim=pad, float8_all_gather=gathered):
            said: dict[str, Any] = {"backend": "AO", "pad_inner_dim": pad}
            return said if gathered is None else said | {"enable_fsdp_float8_all_gather": gathered}
        case MSAMP(opt_level=level):
            return {"backend": "MSAMP", "opt_level": level}
        case TransformerEngine(recipe=recipe, autocast_during_eval=eval_too):
            said = {"backend": "TE", "use_autocast_during_eval": eval_too}
            said |= {"margin": recipe.margin, "fp8_format": recipe.fp8_format}
            match recipe:
                case MXFP8BlockScaling():
                    return said | {"use_mxfp8_block_scaling": True}
                case DelayedScaling():
                    return said | {
                        "interval": recipe.interval,
                        "amax_history_len": recipe.amax_history_len,
                        "amax_compute_algo": recipe.amax_compute_algo,
                        "override_linear_precision": list(recipe.override_linear_precision),
                    }


def _compiled(asked: Compile) -> dict[str, Any]:
    match asked:
        case None:
            return {}
        case CompileModel(backend=backend, mode=mode) | CompileBlocks(backend=backend, mode=mode):
            said: dict[str, Any] = {"dynamo_backend": backend.upper(), "dynamo_mode": mode}
            said["dynamo_use_fullgraph"] = asked.fullgraph
            if asked.dynamic is not None:
                said["dynamo_use_dynamic"] = asked.dynamic
            return said | ({"dynamo_use_regional_compilation": True} if isinstance(asked, CompileBlocks) else {})


def _sizes(config: Config, world_size: int | None) -> dict[str, int]:
    mesh, sizes = config.mesh, {}
    match config.engine:
        case TensorParallel():
            tensor = mesh.tensor if mesh is not None else world_size
            sizes = {"dp_replicate": 1, "dp_shard": 1, "tp": max(1, tensor or 1)}
        case _ if mesh is not None and not isinstance(config.engine, DeepSpeed):
            sizes = {"dp_replicate": mesh.replicate, "dp_shard": mesh.shard, "tp": max(1, mesh.tensor)}
    return {f"parallelism_config_{name}_size": size for name, size in sizes.items()}


def _counted(config: Config, world_size: int | None) -> Config:
    """The config with the number in the place of the axis that takes what is left: accelerate works none out (PC-2)."""
    mesh = config.mesh
    if mesh is None or world_size is None:
        return config
    others = prod(size for size in (mesh.replicate, mesh.shard, mesh.tensor) if size != -1)
    if others < 1 or world_size % others:
        return config
    left = world_size // others
    return evolve(
        config,
        mesh=evolve(
            mesh,
            replicate=left if mesh.replicate == -1 else mesh.replicate,
            shard=left if mesh.shard == -1 else mesh.shard,
            tensor=left if mesh.tensor == -1 else mesh.tensor,
        ),
    )


def fsdp_section(config: Config) -> dict[str, Any]:
    """Accelerate's ``fsdp_config``, of either version."""
    said: dict[str, Any] = {}
    match config.engine:
        case FSDP2(wrap=wrap, reshard_after_forward=freed, offload=offload):
            said = {"fsdp_version": 2, **_wrapped(wrap), "fsdp_offload_params": isinstance(offload, OffloadToCPU)}
            said["fsdp_reshard_after_forward"] = freed is True or (freed is not False and freed > 0)
        case FSDP1() as engine:
            said = {"fsdp_version": 1, **_wrapped(engine.wrap), "fsdp_sharding_strategy": engine.sharding}
            said["fsdp_offload_params"] = engine.offload
            said["fsdp_backward_prefetch"] = engine.backward_prefetch
            for name in ("forward_prefetch", "limit_all_gathers", "use_orig_params", "sync_module_states"):
                said[f"fsdp_{name}"] = getattr(engine, name)
            if len(engine.ignored) == 1 and re.fullmatch(r"[\w.*]+", engine.ignored[0]):
                said["fsdp_ignored_modules"] = engine.ignored[0].replace("*", ".*")  # a regular expression
    if isinstance(config.checkpointing, CheckpointBlocks):
        said["fsdp_activation_checkpointing"] = True
    sent = isinstance(config.weights, BroadcastWeights)
    said["fsdp_cpu_ram_efficient_loading"] = sent  # the launcher means true where nothing is said
    if sent and isinstance(config.engine, FSDP1):
        said["fsdp_sync_module_states"] = True  # or the values would stay with rank 0
    return said


def _wrapped(wrap: Wrap) -> dict[str, Any]:
    match wrap:
        case WrapBlocks():
            return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        case WrapClasses(names=names):
            classes = {"fsdp_transformer_layer_cls_to_wrap": ",".join(names)} if names else {}
            return {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", **classes}
        case WrapSize(min_params=least):
            return {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": least}
    return {"fsdp_auto_wrap_policy": "NO_WRAP"}


def _with_deepspeed(config: Config, data: dict[str, Any], engine: DeepSpeed) -> LeftOut:
    """The section alone where it can say everything, else a JSON beside it that says the rest."""
    experts = {"deepspeed_moe_layer_cls_names": ",".join(engine.leaf_modules)} if engine.leaf_modules else {}
    clip = config.clip
    bare = engine.config == "{}" and engine.micro_batch is None
    otherwise = isinstance(config.precision, BF16 | FP16) and reduces_otherwise(config)
    if bare and isinstance(clip, ClipNorm) and not otherwise:
        stage = 2 if engine.stage is None else engine.stage
        section: dict[str, Any] = {"zero_stage": stage, "gradient_accumulation_steps": steps_of(config)}
        for name in ("optimizer", "param"):
            if (device := getattr(engine, f"offload_{name}")) is not None:
                section[f"offload_{name}_device"] = device
        section["gradient_clipping"] = clip.max_norm
        means = evolve(config, engine=evolve(engine, stage=stage))
        return LeftOut(data=data | {"deepspeed_config": section | experts}, means=means)
    if isinstance(config.precision, BF16 | FP16):
        del data["mixed_precision"]  # which accelerate refuses beside a JSON that says it
    data["deepspeed_config"] = {"deepspeed_config_file": JSON_NAME} | experts
    means = deepspeed_file(config, None, None).means
    return LeftOut(data=data, beside=((JSON_NAME, folded(config)),), means=means)
