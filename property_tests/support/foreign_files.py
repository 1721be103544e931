"""Config files of other libraries, and what people do to them: the text and the values bent in every usual way."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from typing import Any

import tomli_w
from hypothesis import strategies as st
from ruamel.yaml import YAML

SEEDS: dict[str, tuple[str, dict[str, Any]]] = {
    "accelerate": (
        ".yaml",
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "mixed_precision": "bf16",
            "num_processes": 8,
            "num_machines": 2,
            "use_cpu": False,
            "downcast_bf16": "no",
            "dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": True},
            "parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 4},
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
                "fsdp_reshard_after_forward": True,
                "fsdp_offload_params": False,
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            },
        },
    ),
    "accelerate with DeepSpeed": (
        ".yml",
        {
            "distributed_type": "DEEPSPEED",
            "mixed_precision": "fp8",
            "num_processes": 2,
            "fp8_config": {"backend": "TE", "margin": 1, "override_linear_precision": [False, False, False]},
            "deepspeed_config": {
                "zero_stage": 3,
                "zero3_init_flag": True,
                "gradient_accumulation_steps": 4,
                "gradient_clipping": 1.0,
                "offload_optimizer_device": "nvme",
                "offload_optimizer_nvme_path": "/nvme",
                "offload_param_device": "cpu",
                "deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock",
            },
        },
    ),
    "deepspeed": (
        ".json",
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 500},
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 5e8,
                "offload_param": {"device": "cpu", "pin_memory": True},
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        },
    ),
    "transformers": (
        ".json",
        {
            "output_dir": "out",
            "bf16": True,
            "fsdp": "full_shard auto_wrap",
            "fsdp_config": {"transformer_layer_cls_to_wrap": ["Block"], "cpu_ram_efficient_loading": True},
            "gradient_checkpointing": True,
            "gradient_accumulation_steps": 4,
            "max_grad_norm": 1.0,
            "ddp_timeout": 1800,
            "torch_compile": True,
        },
    ),
    "transformers with DeepSpeed": (
        ".yaml",
        {
            "output_dir": "out",
            "fp16": True,
            "deepspeed": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"},
            "ddp_bucket_cap_mb": 25,
        },
    ),
    "axolotl": (
        ".yml",
        {
            "base_model": "some/model",
            "bf16": "auto",
            "micro_batch_size": 4,
            "gradient_checkpointing": "offload",
            "fsdp_version": 2,
            "fsdp_config": {"transformer_layer_cls_to_wrap": "Block", "reshard_after_forward": False},
            "dp_shard_size": 4,
            "tensor_parallel_size": 2,
        },
    ),
    "llamafactory": (
        ".yaml",
        {
            "model_name_or_path": "some/model",
            "stage": "sft",
            "finetuning_type": "full",
            "pure_bf16": True,
            "fp8": True,
            "fp8_backend": "torchao",
            "disable_gradient_checkpointing": False,
            "ddp_timeout": 180000000,
        },
    ),
    "torchtitan": (
        ".toml",
        {
            "job": {"dump_folder": "out"},
            "model": {"name": "llama3", "converters": ["float8"]},
            "optimizer": {"name": "AdamW", "lr": 8e-4},
            "training": {"local_batch_size": 4, "global_batch_size": 64, "max_norm": 1.0, "steps": 10},
            "parallelism": {"data_parallel_shard_degree": 8, "tensor_parallel_degree": 2},
            "activation_checkpoint": {"mode": "full"},
            "float8": {"filter_fqns": ["output"], "recipe_name": "rowwise"},
            "compile": {"enable": True, "components": ["model"]},
        },
    ),
}
"""Kind, or what else tells it, to the extension that its files have and the values of a usual one."""

ODD: tuple[Any, ...] = (
    *(
        "",
        " ",
        "auto",
        "True",
        "FALSE",
        "no",
        "none",
        "null",
        "1",
        "8.0",
        "5e8",
        "nan",
        "-1",
        "../x",
        "${HOME}",
        "é\u2028",
    ),
    *(True, False, 0, 1, -1, 2, 3, 8.0, 1.5, 5e8, float("inf"), 2**70, None),
    *([], {}, [True], ["Block", "Block"], [1, [2]], {"": 1}, {"a.b": {"c": 1}}, {"enabled": "auto"}),
)
"""What stands where something else should."""


@st.composite
def files(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file name with an extension, and its bytes."""
    suffix, values = SEEDS[draw(st.sampled_from(tuple(SEEDS)))]
    suffix = draw(st.sampled_from((suffix, suffix, suffix, ".yaml", ".json", ".toml")))
    data = draw(_bent(values))
    text = WRITERS[suffix](data)
    for _ in range(draw(st.integers(0, 2))):
        text = draw(_typed(text))
    raw = text.encode()
    return f"config{suffix}", draw(
        st.sampled_from((raw, raw, b"\xef\xbb\xbf" + raw, raw.replace(b"\n", b"\r\n"), raw[:-9]))
    )


@st.composite
def _bent(draw: st.DrawFn, values: dict[str, Any]) -> dict[str, Any]:
    """The values with one to four of them dropped, replaced, renamed, listed, turned into text or into floats."""
    data = copy.deepcopy(values)
    for _ in range(draw(st.integers(1, 4))):
        holders = [data, *(value for value in data.values() if isinstance(value, dict) and value)]
        holder = draw(st.sampled_from([held for held in holders if held] or [{"x": 1}]))
        key = draw(st.sampled_from(tuple(holder)))
        match draw(st.sampled_from(("drop", "odd", "odd", "rename", "list", "text", "float", "add"))):
            case "drop":
                del holder[key]
            case "odd":
                holder[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
            case "rename":
                holder[draw(st.sampled_from((key[:-1], key.upper(), f"{key} ", f"{key}.x", key[::-1])))] = holder.pop(
                    key
                )
            case "list":
                holder[key] = [holder[key]]
            case "text":
                holder[key] = str(holder[key])
            case "float" if isinstance(holder[key], int):
                holder[key] = float(holder[key])
            case _:
                added = draw(st.sampled_from(("nwe_key", "fsdp_config", "deepspeed_config", "fp16")))
                holder[added] = copy.deepcopy(draw(st.sampled_from(ODD)))
    return data


@st.composite
def _typed(draw: st.DrawFn, text: str) -> str:
    """The text as a hand would spoil it: lines doubled, tabs, anchors, comments, a torn end, a document more."""
    lines = text.split("\n")
    at = draw(st.integers(0, len(lines) - 1))
    match draw(st.sampled_from(("double", "tab", "anchor", "comment", "documents", "tear", "empty", "merge"))):
        case "double":
            lines.insert(at, lines[at])
        case "tab":
            lines[at] = f"\t{lines[at]}"
        case "anchor":
            lines[at] = lines[at].replace(": ", ": &a ", 1)
            lines.append("other: *a")
        case "comment":
            lines[at] += "  # why // not"
        case "documents":
            lines.insert(at, "---")
        case "tear":
            lines = lines[:at]
        case "merge":
            lines += ["base: &b {bf16: true}", "<<: *b"]
        case _:
            lines = ["# nothing"]
    return "\n".join(lines)


def _yaml(data: dict[str, Any]) -> str:
    out = io.StringIO()
    YAML().dump(data, out)
    return out.getvalue()


def _toml(data: dict[str, Any]) -> str:
    return tomli_w.dumps(_without_none(data))


def _without_none(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _without_none(value) for key, value in data.items() if value is not None}
    if isinstance(data, list):
        return [_without_none(value) for value in data if value is not None]
    return str(data) if isinstance(data, int) and abs(data) > 2**62 else data


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2)


WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {".yaml": _yaml, ".yml": _yaml, ".json": _json, ".toml": _toml}
"""Extension to what writes it."""
