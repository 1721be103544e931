"""Variables that ``accelerate launch`` sets, read as the file that it set them from (behaviour section 10)."""

from __future__ import annotations

from collections.abc import Mapping

from prepkit.formats.importers.accelerate import understand
from prepkit.formats.importers.foreign import Foreign
from prepkit.formats.importers.imported import Imported

_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DEEPSPEED",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "MEGATRON_LM",
}
"""Switch to the distributed type that it asks for, in the order in which accelerate asks (ST-6, ST-7, ST-8)."""
_SINGLE = {
    "ACCELERATE_MIXED_PRECISION": "mixed_precision",
    "ACCELERATE_USE_CPU": "use_cpu",
    "ACCELERATE_DOWNCAST_BF16": "downcast_bf16",
    "WORLD_SIZE": "num_processes",
    "ACCELERATE_FP8_BACKEND": "fp8_config.backend",
    "ACCELERATE_FP8_FORMAT": "fp8_config.fp8_format",
    "ACCELERATE_FP8_OPT_LEVEL": "fp8_config.opt_level",
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": "fp8_config.amax_compute_algo",
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": "fp8_config.amax_history_len",
    "ACCELERATE_FP8_INTERVAL": "fp8_config.interval",
    "ACCELERATE_FP8_MARGIN": "fp8_config.margin",
    "ACCELERATE_FP8_PAD_INNER_DIM": "fp8_config.pad_inner_dim",
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": "fp8_config.enable_fsdp_float8_all_gather",
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": "fp8_config.use_autocast_during_eval",
    "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": "fp8_config.use_mxfp8_block_scaling",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "deepspeed_config.gradient_accumulation_steps",
    "ACCELERATE_GRADIENT_CLIPPING": "deepspeed_config.gradient_clipping",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "deepspeed_config.zero_stage",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config.deepspeed_config_file",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "deepspeed_config.zero3_init_flag",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "deepspeed_config.zero3_save_16bit_model",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "deepspeed_config.offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "deepspeed_config.offload_param_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": "deepspeed_config.offload_optimizer_nvme_path",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "deepspeed_config.offload_param_nvme_path",
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "deepspeed_config.deepspeed_moe_layer_cls_names",
}
_FSDP = {
    "FSDP_VERSION": "fsdp_version",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap",
} | {
    f"FSDP_{name}": f"fsdp_{name.lower()}"
    for name in (
        *("SHARDING_STRATEGY", "OFFLOAD_PARAMS", "MIN_NUM_PARAMS", "AUTO_WRAP_POLICY", "BACKWARD_PREFETCH"),
        *("STATE_DICT_TYPE", "FORWARD_PREFETCH", "USE_ORIG_PARAMS", "CPU_RAM_EFFICIENT_LOADING"),
        *("SYNC_MODULE_STATES", "ACTIVATION_CHECKPOINTING", "ACTIVATION_CHECKPOINTING_OFFLOAD"),
        *("RESHARD_AFTER_FORWARD", "IGNORED_MODULES"),
    )
}
_DYNAMO = {
    f"ACCELERATE_DYNAMO_{name}": f"dynamo_{name.lower()}"
    for name in ("BACKEND", "MODE", "USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION")
}
_PARALLELISM = {
    f"PARALLELISM_CONFIG_{name}": f"parallelism_config_{name.lower()}"
    for name in ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE", "TP_SIZE", "CP_SIZE", "SP_SIZE")
}
KEYS: dict[str, str] = (
    _SINGLE
    | {variable: f"fsdp_config.{key}" for variable, key in _FSDP.items()}
    | {variable: f"dynamo_config.{key}" for variable, key in _DYNAMO.items()}
    | {variable: f"parallelism_config.{key}" for variable, key in _PARALLELISM.items()}
)
"""Variable to the key of accelerate's file that it stands for."""


def read_variables(variables: Mapping[str, str]) -> Imported:
    """The variables as prepkit's config; others than accelerate's are nobody's business.

    Raises ``PlanRejected`` with every finding, each under the name of its variable.
    """
    kind = next((kind for name, kind in _SWITCHES.items() if _on(variables.get(name))), None)
    world = int(variables["WORLD_SIZE"]) if variables.get("WORLD_SIZE", "").isdecimal() else 1
    cpu = _on(variables.get("ACCELERATE_USE_CPU"))
    data: dict[str, object] = {
        "distributed_type": kind or ("NO" if world == 1 else "MULTI_CPU" if cpu else "MULTI_GPU")
    }
    names: dict[str, str] = {
        "distributed_type": next((name for name in _SWITCHES if _on(variables.get(name))), "WORLD_SIZE")
    }
    for variable, key in KEYS.items():
        section = key.partition(".")[0]
        if key == "mixed_precision" and kind == "DEEPSPEED" and _unasked(variables):
            continue
        if not variables.get(variable) or (section == "fsdp_config" and kind != "FSDP"):
            continue
        if section == "deepspeed_config" and kind != "DEEPSPEED":
            continue
        names[key] = variable
        target: dict[str, object] = data
        if "." in key:
            target = data.setdefault(section, {})  # type: ignore[assignment]  # a section is a mapping
        target[key.rpartition(".")[2]] = variables[variable]
    if "parallelism_config" in data and not _on(variables.get("ACCELERATE_USE_PARALLELISM_CONFIG", "true")):
        del data["parallelism_config"]
    return understand(Foreign(kind="environment", source="environment", data=data, shown_as=names), "environment")


def _unasked(variables: Mapping[str, str]) -> bool:
    """Whether the launcher set "no" because nobody said a precision: the JSON beside it says one then (DP-5, DP-34)."""
    said = variables.get("ACCELERATE_CONFIG_DS_FIELDS", "mixed_precision").split(",")
    file = variables.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    return bool(file) and variables.get("ACCELERATE_MIXED_PRECISION") == "no" and "mixed_precision" not in said


def _on(value: str | None) -> bool:
    return (value or "").strip().lower() in ("1", "true", "yes", "on", "y", "t")
