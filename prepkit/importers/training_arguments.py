"""The part of transformers' ``TrainingArguments`` that prepares a model.

A YAML or JSON of them, as ``HfArgumentParser`` reads it, and as TRL's files hold it beside more.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from attrs import evolve

from prepkit.codec.text import shown
from prepkit.config import (
    BF16,
    DDP,
    FP16,
    AsStored,
    CheckpointBlocks,
    ClipNorm,
    CompileModel,
    Config,
    DeepSpeed,
    Engine,
    NoCheckpointing,
    NoClip,
    NoCompile,
    Precision,
    SendWeights,
)
from prepkit.importers.accelerate_fsdp import fsdp
from prepkit.importers.deepspeed import from_json, read_deepspeed
from prepkit.importers.foreign import Foreign, foreign
from prepkit.importers.imported import Imported
from prepkit.importers.source import Source, read

_LEGACY = {"full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "no_shard": "NO_SHARD"} | {
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2",
}
"""Words of the old ``fsdp: "full_shard auto_wrap"`` to sharding strategies."""
_MAX_NORM = 1.0
"""The Trainer clips to this norm where nothing is said (``max_grad_norm``)."""


def read_training_arguments(source: Source) -> Imported:
    """The file as prepkit's config; what concerns data, logging and evaluation is listed as not preparation.

    Raises ``PlanRejected`` with every finding.
    """
    file = foreign("transformers", source)
    return training_arguments(file, Path(source.path))


def training_arguments(file: Foreign, path: Path, accumulation: str = "gradient_accumulation_steps") -> Imported:
    """The same of a file that has other keys beside those of ``TrainingArguments``."""
    steps = file.whole(accumulation, "accumulation")
    norm = file.number("max_grad_norm", "clip")
    clip = _MAX_NORM if norm is None else norm
    compiled = file.flag("torch_compile", "compile")
    backend, mode = file.text("torch_compile_backend"), file.text("torch_compile_mode")
    config = Config(
        precision=_precision(file),
        accumulation=steps,
        clip=ClipNorm(clip) if clip > 0 else NoClip(),
        compile=CompileModel(backend=backend or "inductor", mode=mode or "default") if compiled else NoCompile(),
        checkpointing=_checkpointing(file),
        device="cpu" if file.flag("use_cpu", *(("device",) if file.data.get("use_cpu") else ())) else None,
        timeout_s=float(file.number("ddp_timeout", "timeout_s") or 1800.0),
    )
    config = _engine(file, config, path)
    _rest(file)
    return file.imported(config)


def _checkpointing(file: Foreign) -> CheckpointBlocks | NoCheckpointing:
    """Under the name that transformers has had since 5, or the older one."""
    new, old = "activation_checkpointing", "gradient_checkpointing"
    for end in ("", "_kwargs"):
        if file.raw(f"{new}{end}") is not None and file.has(f"{old}{end}"):
            file.without_effect(f"{old}{end}", f"{new}{end} is there, and is read in its place")
        file.covered(f"{new}{end}")
        file.covered(f"{old}{end}")
    name = new if file.raw(new) is not None else old
    options = file.raw(f"{name}_kwargs", "checkpointing")
    if isinstance(options, dict) and options.get("every_n_layers") not in (None, 1):
        file.warn("no-effect", f"{name}_kwargs", "every block is recomputed (every_n_layers)", "Remove it.")
    return CheckpointBlocks() if file.flag(name, "checkpointing") else NoCheckpointing()


def _precision(file: Foreign) -> Precision:
    bf16, fp16 = file.flag("bf16", "precision"), file.flag("fp16", "precision")
    if bf16 and fp16:
        file.error("contradiction", "fp16", "bf16 is true as well, and a run has one precision", "Keep one of them.")
    return BF16() if bf16 else FP16() if fp16 else AsStored()


def _engine(file: Foreign, config: Config, path: Path) -> Config:
    asked = file.raw("fsdp")
    if file.raw("deepspeed") and asked:
        file.error("contradiction", "fsdp", "deepspeed is given as well, and one of them shards", "Keep one of them.")
    if file.raw("deepspeed"):
        return _deepspeed(file, config, path)
    if asked not in (None, False, "", []):
        return _fsdp(file, config, asked, path)
    if file.raw("fsdp_config"):
        file.without_effect("fsdp_config", "it is read with `fsdp` only", "Write fsdp: true, or remove it.")
    return evolve(config, engine=_ddp(file))


def _ddp(file: Foreign) -> Engine:
    unused = file.flag("ddp_find_unused_parameters", "engine.find_unused_parameters")
    bucket = file.number("ddp_bucket_cap_mb", "engine.bucket_cap_mb")
    buffers = file.flag("ddp_broadcast_buffers", "engine.broadcast_buffers")
    static = file.flag("ddp_static_graph", "engine.static_graph")
    return DDP(
        find_unused_parameters=bool(unused),
        bucket_cap_mb=25.0 if bucket is None else bucket,
        broadcast_buffers=buffers is not False,
        static_graph=bool(static),
    )


def _fsdp(file: Foreign, config: Config, asked: Any, path: Path) -> Config:
    """``fsdp_config`` with or without the prefix ``fsdp_``, in the file or in a JSON of its own."""
    file.raw("fsdp", "engine")
    section: Any = file.data.get("fsdp_config") or {}
    if isinstance(section, str):
        section = _json(file, "fsdp_config", section, path)
    if not isinstance(section, dict):
        file.error("wrong-type", "fsdp_config", f"{shown(section)} is no section", "Write keys below it, or remove it.")
        section = {}
    words = asked.replace(",", " ").split() if isinstance(asked, str) else asked if isinstance(asked, list) else []
    named = {f"fsdp_{str(key).removeprefix('fsdp_')}": value for key, value in section.items()}
    typed = {f"fsdp_config.fsdp_{str(key).removeprefix('fsdp_')}": f"fsdp_config.{key}" for key in section}
    named.setdefault("fsdp_version", 2)
    named.setdefault("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
    _renamed(file, words, named, typed)
    checkpointed = named.pop("fsdp_activation_checkpointing", None)
    offloaded = bool(named.pop("fsdp_activation_checkpointing_offload", None))
    inner = Foreign(
        kind=file.kind,
        source=file.source,
        data={"fsdp_config": named},
        places={name: place for name, key in typed.items() if (place := file.places.get(key))},
        shown_as=typed,
    )
    for name in ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings"):
        inner.raw(f"fsdp_config.fsdp_{name}")
    precision = _reduced(config.precision)
    engine = fsdp(inner, precision)
    sent = inner.flag("fsdp_config.fsdp_cpu_ram_efficient_loading")
    file.covered("fsdp_config")
    inner.say_unknown()
    file.origins += [origin for origin in inner.origins if origin.key in typed.values()]  # the others are defaults
    file.findings += inner.findings
    config = evolve(config, engine=engine, precision=precision)
    if sent:
        config = evolve(config, weights=SendWeights())
    return evolve(config, checkpointing=CheckpointBlocks(offload=offloaded)) if checkpointed else config


def _renamed(file: Foreign, words: list[Any], named: dict[str, Any], typed: dict[str, str]) -> None:
    """The Trainer's words and names as accelerate's keys, in place."""
    _strategy(named, typed)
    for word in words:
        if word in _LEGACY and named["fsdp_version"] == 1:
            named.setdefault("fsdp_sharding_strategy", _LEGACY[word])
        elif word in _LEGACY:
            if word != "full_shard":  # which is what version 2 does
                why = f"FSDP of version 2 reads fsdp_config.reshard_after_forward in place of {word}"
                file.without_effect("fsdp", why, "Write fsdp: true.")
        elif word == "offload":
            named["fsdp_offload_params"] = True
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
    return read(str(found)).data()


def _deepspeed(file: Foreign, config: Config, path: Path) -> Config:
    given = file.raw("deepspeed", "engine")
    if isinstance(given, dict):
        inner = from_json(Foreign(kind=file.kind, source=file.source, data=given))
        file.covered("deepspeed")
        return _with_json(config, inner)
    found = next((place for place in (Path(str(given)), path.parent / str(given)) if place.is_file()), None)
    if found is None:
        what = f"there is no file {given}, neither from here nor beside {path.name}"
        file.error("missing-file", "deepspeed", what, "Give the path of the JSON file.")
        return config
    inner = read_deepspeed(read(str(found))).config
    assert isinstance(inner.engine, DeepSpeed)
    file.origins += [origin for origin in inner.origins if origin.setting.startswith("config.engine")]
    return _with_json(config, inner)


def _with_json(config: Config, inner: Config) -> Config:
    """The arguments with DeepSpeed's own config, whose loss scale counts where both ask for one precision."""
    same = type(inner.precision) is type(config.precision)
    return evolve(config, engine=inner.engine, precision=inner.precision if same else config.precision)


def _rest(file: Foreign) -> None:
    """Everything else is about data, logging and the loop, unless it is nearly a key that was looked for."""
    for key in file.unread():
        if not get_close_matches(key, file.known(), n=1, cutoff=0.88):
            file.launching(key)
