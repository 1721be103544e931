"""``fsdp`` and ``fsdp_config`` of ``TrainingArguments``, as the Trainer hands them to accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import evolve

from prepkit.codec.text import shown
from prepkit.config import BF16, FP16, FSDP2, CheckpointBlocks, Config, OffloadToCPU, Precision, SendWeights
from prepkit.formats.importers.accelerate_fsdp import fsdp
from prepkit.formats.importers.foreign import Foreign
from prepkit.formats.importers.source import JSON, read

_LEGACY = {"full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "no_shard": "NO_SHARD"} | {
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2",
}
"""Words of the old ``fsdp: "full_shard auto_wrap"`` to sharding strategies."""
_HERE = "fsdp_config.fsdp_"


def sharded(file: Foreign, config: Config, asked: Any, path: Path) -> Config:
    """The config with FSDP as its engine; ``asked`` is the value of ``fsdp``."""
    file.raw("fsdp", "engine")
    inner = _as_accelerates(file, asked, path)
    typed = inner.shown_as
    precision = _reduced(config.precision)
    engine = fsdp(inner, precision)
    if inner.flag(f"{_HERE}cpu_offload_pin_memory", "engine.offload") is False and isinstance(engine, FSDP2):
        engine = evolve(engine, offload=OffloadToCPU(pin_memory=False)) if engine.offload == OffloadToCPU() else engine
    sent = inner.flag(f"{_HERE}cpu_ram_efficient_loading", "weights")
    checkpointed = inner.flag(f"{_HERE}activation_checkpointing", "checkpointing")
    offloaded = inner.flag(f"{_HERE}activation_checkpointing_offload", "checkpointing.offload") or False
    inner.launching(f"{_HERE}final_state_dict_type")
    file.covered("fsdp_config")
    inner.say_unknown()
    file.origins += [origin for origin in inner.origins if origin.key in typed.values()]  # the others are defaults
    file.not_preparation += inner.not_preparation
    file.findings += inner.findings
    config = evolve(config, engine=engine, precision=precision)
    if sent:
        config = evolve(config, weights=SendWeights())
    return evolve(config, checkpointing=CheckpointBlocks(offload=offloaded)) if checkpointed else config


def _as_accelerates(file: Foreign, asked: Any, path: Path) -> Foreign:
    """``fsdp_config`` under accelerate's names, shown as the file has them, in the file or in a JSON of its own."""
    section: Any = file.data.get("fsdp_config") or {}
    if isinstance(section, str):
        section = _json(file, "fsdp_config", section, path)
    if not isinstance(section, dict):
        file.error("wrong-type", "fsdp_config", f"{shown(section)} is no section", "Write keys below it, or remove it.")
        section = {}
    words = asked.replace(",", " ").split() if isinstance(asked, str) else asked if isinstance(asked, list) else []
    named = {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in section.items()}
    typed = {f"{_HERE}{str(key).removeprefix('fsdp_')}": f"fsdp_config.{key}" for key in section}
    _older_names(file, named, typed)
    named["fsdp_version"] = {"1": 1, "2": 2}.get(str(named.get("fsdp_version", 2)), named.get("fsdp_version"))
    named.setdefault("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    _renamed(file, words, named, typed)
    inner = Foreign(
        kind=file.kind,
        source=file.source,
        data={"fsdp_config": named},
        places={name: place for name, key in typed.items() if (place := file.places.get(key))},
        shown_as=typed,
    )
    if inner.flag(f"{_HERE}xla"):
        what = "torch_xla's own FSDP shards then, and prepkit's XLA engine shards nothing"
        inner.error("not-supported", f"{_HERE}xla", what, "Write false.")
    for name in ("xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"):  # which are read with xla only
        inner.raw(f"{_HERE}{name}")
    return inner


def _older_names(file: Foreign, named: dict[str, Any], typed: dict[str, str]) -> None:
    """What older files have at the top, where the section does not say it (transformers before 4.40)."""
    for name in ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"):
        value = file.raw(name)
        if value in (None, 0, "") or name in named:
            continue
        named[name] = value
        typed[f"fsdp_config.{name}"] = name
        if name == "fsdp_min_num_params":
            named.setdefault("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP")


def _renamed(file: Foreign, words: list[Any], named: dict[str, Any], typed: dict[str, str]) -> None:
    """The Trainer's words and names as accelerate's keys, in place."""
    _strategy(named, typed)
    for word in (str(word).lower() for word in words):
        if word in _LEGACY and named["fsdp_version"] == 1:
            named.setdefault("fsdp_sharding_strategy", _LEGACY[word])
            typed.setdefault("fsdp_config.fsdp_sharding_strategy", "fsdp")
        elif word in ("full_shard", "shard_grad_op"):
            named.setdefault("fsdp_reshard_after_forward", word == "full_shard")
            typed.setdefault("fsdp_config.fsdp_reshard_after_forward", "fsdp")
        elif word in _LEGACY:
            what = f"{word} is a way of FSDP of version 1, and fsdp_config says version 2, or nothing, which means 2"
            file.error("contradiction", "fsdp", what, "Write fsdp_config with version: 1, or fsdp: true.")
        elif word == "offload":
            named["fsdp_offload_params"] = True
            typed["fsdp_config.fsdp_offload_params"] = "fsdp"
        elif word != "auto_wrap":
            file.error("wrong-value", "fsdp", f"{word!r} is no word of transformers' fsdp", "Write fsdp: true.")
    if (offload := named.pop("fsdp_cpu_offload", None)) is not None:
        named["fsdp_offload_params"] = offload
        typed["fsdp_config.fsdp_offload_params"] = typed["fsdp_config.fsdp_cpu_offload"]


def _strategy(named: dict[str, Any], typed: dict[str, str]) -> None:
    """Version 1 has its strategy where version 2 has a switch, and other defaults than accelerate."""
    if named["fsdp_version"] == 1:
        named.setdefault("fsdp_backward_prefetch", "NO_PREFETCH")
        if isinstance(strategy := named.get("fsdp_reshard_after_forward"), str):
            named["fsdp_sharding_strategy"] = strategy.upper()
            typed["fsdp_config.fsdp_sharding_strategy"] = typed["fsdp_config.fsdp_reshard_after_forward"]
            del named["fsdp_reshard_after_forward"]


def _reduced(precision: Precision) -> Precision:
    """Under FSDP the Trainer's accelerate reduces gradients in the compute dtype (H-10c)."""
    match precision:
        case BF16():
            return evolve(precision, reduce_dtype="bfloat16")
        case FP16():
            return evolve(precision, reduce_dtype="float16")
    return precision


def _json(file: Foreign, key: str, name: str, path: Path) -> dict[str, Any]:
    found = next((place for place in (Path(name), path.parent / name) if place.is_file()), None)
    if found is None:
        what = f"there is no file {name}, neither from here nor beside {path.name}"
        file.error("missing-file", key, what, "Give the path of the JSON file.")
        return {}
    return read(str(found), JSON).data()
