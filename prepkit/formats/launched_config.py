"""The config that accelerate's launcher makes of its file and of the options over it; what contradicts a script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from prepkit.findings import Finding
from prepkit.formats.launcher_options import refuses
from prepkit.formats.launches import Argument, LaunchLine, Script
from prepkit.formats.started import SWITCHED, given_by
from prepkit.rules import found

_OF_DEEPSPEED = frozenset(
    {"zero_stage", "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device", "zero3_init_flag"}
    | {"offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model"}
)


def with_options(launch: LaunchLine) -> tuple[dict[str, Any], dict[str, Any], tuple[Argument, ...]]:
    """The config of accelerate, the same with the options of the line over it as its launcher makes it, and those.

    Only what differs counts: an option that says the same as the file, or that nothing reads under the distributed
    type, changes nothing; nor does one that is known when it runs only. A line that names no config is one itself
    where it says which distributed type it starts.
    """
    before = _before(launch)
    data = deepcopy(before)
    if launch.launcher != "accelerate" or not data:
        return before, data, ()
    kind = next((kind for name, kind in SWITCHED.items() if name in launch.options), str(data.get("distributed_type")))
    inner = data.get("deepspeed_config")
    named = bool(isinstance(inner, dict) and inner.get("deepspeed_config_file"))
    over = []
    for name, option in launch.options.items():
        path = _path(name, kind, beside_json=named)
        if path is None or refuses(launch.launcher, name, option.value) or "$" in str(option.value):
            continue  # a launcher that refuses it starts with no config
        if named and kind == "DEEPSPEED" and option.value == "no":
            continue
        if len(path) > 1 and not isinstance(data.get(path[0]), dict):
            data[path[0]] = {}
        section = data if len(path) == 1 else data[path[0]]
        value = kind if name in SWITCHED else option.value
        key = next((one for one in (path[-1], path[-1].partition("_")[2]) if one in section), path[-1])
        if str(section.get(key)).casefold() != str(value).casefold():
            section[key] = _typed(value)
            over.append(option)
    return before, data, tuple(over)


def two_places(script: Script) -> Iterator[Finding]:
    """What the arguments of a script say otherwise than the config of accelerate that starts it.

    The Trainer refuses to start then; in other scripts DeepSpeed's number counts, and Accelerator's does not.
    """
    for launch in script.launches:
        data = with_options(launch)[1]
        for section, key, name in _TWICE:
            inner, own = data.get(section), next((one for one in launch.arguments if one.name == name), None)
            if own is None or not isinstance(inner, dict) or data.get("distributed_type") != _KIND[section]:
                continue
            there, here = _typed(inner.get(key, "")), _typed(own.value)
            both = here is True and there is True  # who recomputes a block twice
            if not both and not (type(here) in (int, float) and type(there) in (int, float) and here != there):
                continue
            where = f"{script.path}:{own.line}:{own.column}"
            file = launch.config_file.path if launch.config_file is not None else "the launcher"
            what = f"{own.typed} is {own.value}, and {file} says {inner[key]} in {section}.{key}"
            fix = "Keep one of them." if both else f"Write {own.typed} {inner[key]}, or {own.value} there."
            yield found("launch.two-places", where, what, fix)


_TWICE = (
    ("deepspeed_config", "gradient_accumulation_steps", "gradient_accumulation_steps"),
    ("deepspeed_config", "gradient_clipping", "max_grad_norm"),
    ("fsdp_config", "fsdp_activation_checkpointing", "gradient_checkpointing"),
)
"""Section and key of accelerate's config, and the argument that says the same."""
_KIND = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP"}


def _before(launch: LaunchLine) -> dict[str, Any]:
    """What the options of a line stand over: its file; without one the least that a config says."""
    if launch.file or "config_file" in launch.options:
        return deepcopy(dict(launch.file))
    kind = next((kind for name, kind in SWITCHED.items() if name in launch.options), "")
    numbers = {name: number for name in ("num_processes", "num_machines") if (number := given_by(launch, name))}
    json = launch.options.get("deepspeed_config_file")
    if not kind or (json is not None and kind != "DEEPSPEED"):
        return {}
    if json is None:
        return {"distributed_type": kind, **numbers}
    place = next((one.place for one in launch.configs if one.path == json.value), None)
    inner = {"deepspeed_config": {"deepspeed_config_file": str(Path(place).resolve())}} if place is not None else None
    return {} if inner is None else {"distributed_type": kind, **numbers, **inner}


def _path(name: str, kind: str, *, beside_json: bool) -> tuple[str, ...] | None:
    """Where the config has what an option says; None: it says nothing of the config, or how many processes start."""
    if name == "mixed_precision":
        return (name,)
    if name in SWITCHED:
        return ("distributed_type",)
    if name.startswith("fsdp_") and kind == "FSDP":
        return ("fsdp_config", name)
    if name in _OF_DEEPSPEED and kind == "DEEPSPEED" and not beside_json:
        return ("deepspeed_config", name)
    if name.startswith("dynamo_"):
        return ("dynamo_config", name)
    return ("parallelism_config", name) if name.startswith("parallelism_config_") and kind == "FSDP" else None


def _typed(value: Any) -> Any:
    """As YAML reads it."""
    if isinstance(value, str) and value.casefold() in ("true", "false"):
        return value.casefold() == "true"
    if isinstance(value, str) and re.fullmatch(r"-?\d{1,12}(\.\d{1,12})?", value):
        return float(value) if "." in value else int(value)
    return value


def trained(launch: LaunchLine) -> dict[str, tuple[str | bool | None, tuple[int, int]]]:
    """Options of a line as ``TrainingArguments``, None where one is known when it runs; empty where they are none.

    They are told by two of the names, beside one that asks for DeepSpeed or FSDP: other scripts have some of them too.
    """
    named = {one.name for one in launch.arguments}
    known: dict[str, tuple[str | bool | None, tuple[int, int]]] = {
        one.name: (None if "$" in str(one.value) else one.value, (one.line, one.column)) for one in launch.arguments
    }
    size = known.get("per_device_train_batch_size", (None, ()))
    if "output_dir" not in named or size[0] is None or not {"deepspeed", "fsdp"} & named:
        return {}
    if "deepspeed" in named:
        said, place = known.get("deepspeed", ("$", (1, 1)))
        file = next((named.place for named in launch.configs if named.path == said), None)
        if file is None or not file.endswith(".json"):
            return {}
        known["deepspeed"] = str(Path(file).resolve()), place
    return known
