"""accelerate's launch config: what ``accelerate config`` writes, in YAML or JSON (behaviour section 10)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import evolve

from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FP16,
    MSAMP,
    XLA,
    CheckpointBlocks,
    Compile,
    CompileBlocks,
    CompileModel,
    Config,
    DelayedScaling,
    Engine,
    FP8Backend,
    Mesh,
    MXFP8BlockScaling,
    Precision,
    Single,
    TensorParallel,
    TorchAO,
    TransformerEngine,
)
from prepkit.findings import PlanRejected
from prepkit.formats.importers.accelerate_engines import (
    deepspeed,
    found_elsewhere,
    fsdp,
    launching,
    meant_type,
    say_of_other_types,
    say_places,
    weights,
)
from prepkit.formats.importers.foreign import Foreign, foreign
from prepkit.formats.importers.source import Imported, Source

# --- names -----------------------------------------------------------------------------------------------------------


_PREFIXES = {"fsdp_config": "fsdp", "dynamo_config": "dynamo_"}
"""Sections whose keys the launcher gives this beginning, where a file leaves it out (``_validate_launch_command``)."""


def name_in_full(file: Foreign) -> None:
    """Keys of sections as the launcher names them, shown as the file does: ``sharding_strategy`` is read by it too."""
    for section, start in _PREFIXES.items():
        given = file.data.get(section)
        if isinstance(given, dict):
            names = {key: str(key) if str(key).startswith(start) else f"{start.rstrip('_')}_{key}" for key in given}
            _rename(file, section, names)
    given = file.data.get("fp8_config")
    if isinstance(given, dict):
        own = ("fp8_format",)
        names = {key: str(key) if key in own else str(key).removeprefix("fp8_") for key in given}
        _rename(file, "fp8_config", names)


def _rename(file: Foreign, section: str, names: dict[Any, str]) -> None:
    """Gives keys of a section their full names; of two that become one the later counts, which is said."""
    given, renamed = file.data[section], {}
    for key, name in names.items():
        path, written = f"{section}.{name}", f"{section}.{key}"
        if name in renamed:
            what = f"it is given twice, as {file.shown_as.get(path, path)} too"
            file.error("contradiction", written, what, "Keep one of them.")
        renamed[name] = given[key]
        if written != path:
            file.shown_as[path] = written
            if written in file.places:
                file.places[path] = file.places[written]
    file.data[section] = renamed


DEVICES = {
    "MULTI_GPU": "cuda",
    "MULTI_CPU": "cpu",
    "MULTI_XPU": "xpu",
    "MULTI_NPU": "npu",
    "MULTI_MLU": "mlu",
    "MULTI_SDAA": "sdaa",
    "MULTI_MUSA": "musa",
    "MULTI_HPU": "hpu",
    "MULTI_NEURON": "neuron",
}
"""Distributed types that are DDP on a kind of device (behaviour section 1.1)."""
TYPES = ("NO", *DEVICES, "DEEPSPEED", "FSDP", "XLA", "TPU", "MEGATRON_LM", "TP")
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_NOT_COMPILED = ("DEEPSPEED", "XLA", "TPU")
"""Distributed types whose launchers set no ``ACCELERATE_DYNAMO_*`` (``prepare_deepspeed_cmd_env``, ``prepare_tpu``)."""
_ELSEWHERE = {
    "fsdp_config": ("FSDP",),
    "deepspeed_config": ("DEEPSPEED",),
    "megatron_lm_config": ("MEGATRON_LM",),
}
"""Sections to the distributed types under which accelerate reads them."""


def read_accelerate(source: Source) -> Imported:
    """The file as prepkit's config. Raises ``PlanRejected`` with every finding."""
    file = foreign("accelerate", source)
    name_in_full(file)
    found_elsewhere(file, _keys_of_sections)
    return understand(file, source.path)


def asked_for(data: dict[str, Any]) -> Foreign:
    """The account of a file that holds this: which keys are asked for, and how. No file that it names is found."""
    file = Foreign(kind="accelerate", source="schema", data=data)
    name_in_full(file)
    with suppress(PlanRejected):
        understand(file, "schema")
    return file


def _keys_of_sections(section: str) -> tuple[str, ...]:
    """Every key that is asked for where the file has the section."""
    kind = _ELSEWHERE.get(section, ("MULTI_GPU",))[0]
    return tuple(asked_for({"distributed_type": kind, section: {"": 1}}).asked)


def understand(file: Foreign, path: str) -> Imported:
    """The same of keys that were read already; ``path`` is where another file that they name may lie beside."""
    if not file.has("distributed_type"):
        fix = f"Write one of {', '.join(TYPES)}."
        file.error("wrong-value", "distributed_type", "accelerate needs it in every config file", fix)
    kind = file.word("distributed_type", TYPES, "engine") or meant_type(file, TYPES, _ELSEWHERE)
    say_places(file)
    known = launching(file)
    file.launching(*known)
    for section, readers in _ELSEWHERE.items():
        if kind not in readers and file.section(section):
            why = f"accelerate reads it under {readers[0]} only, and distributed_type is {kind}"
            file.without_effect(section, why, f"Write distributed_type: {readers[0]}, or remove the section.")
    world, machines = processes(file, kind)
    mesh = mesh_of(file, kind)
    precision = _precision(file, kind)
    engine = _engine(file, kind, world, mesh, precision)
    config = Config(
        engine=engine,
        mesh=None if isinstance(engine, TensorParallel | DDP) else mesh,
        precision=precision,
        compile=_compile(file, kind),
        device=_device(file, kind),
    )
    if kind == "FSDP":
        config = evolve(config, weights=weights(file), checkpointing=_checkpointing(file))
    if kind == "DEEPSPEED":
        config = deepspeed(file, config, Path(path))
    if file.unread():
        others = {section: readers[0] for section, readers in _ELSEWHERE.items() if kind not in readers}
        say_of_other_types(file, known, {key: of for one, of in others.items() for key in _keys_of_sections(one)})
    return file.imported(
        config,
        known=known,
        world_size=world,
        per_node=world // machines if world and world % machines == 0 else None,
        device=config.device or DEVICES.get(kind) or {"XLA": "xla", "TPU": "xla"}.get(kind),
    )


def _device(file: Foreign, kind: str) -> str | None:
    if file.flag("use_cpu"):
        file.raw("use_cpu", "device")
        return "cpu"
    return "cpu" if kind == "MULTI_CPU" else None


def _engine(file: Foreign, kind: str, world: int | None, mesh: Mesh | None, precision: Precision) -> Engine:
    match kind:
        case "NO":
            return Single()
        case "FSDP":
            return fsdp(file, precision)
        case "XLA" | "TPU":
            return XLA()
        case "TP":
            return TensorParallel()
        case "MEGATRON_LM":
            file.section("megatron_lm_config")
            file.covered("megatron_lm_config")
            what = "Megatron-LM replaces model, optimizer and loop, and prepkit prepares a model that you have"
            file.error("not-supported", "distributed_type", what, "Write FSDP, with a parallelism_config for tp_size.")
            return Single()
        case _:
            if mesh is not None and mesh.tensor > 1 and mesh.replicate * mesh.shard == 1:
                return TensorParallel()
            return Single() if world == 1 else DDP()


def _precision(file: Foreign, kind: str) -> Precision:
    """The precision; under FSDP accelerate reduces in the compute dtype (H-10c), elsewhere in that of the weights."""
    word = file.word("mixed_precision", _PRECISIONS, "precision") or "no"
    if file.flag("downcast_bf16") and kind not in ("XLA", "TPU"):
        file.without_effect("downcast_bf16", "it is read on TPUs only")
    backend = _fp8(file, word)
    if file.flag("fp16"):  # how versions before 0.7 wrote it
        if file.has("mixed_precision"):
            file.without_effect("fp16", "mixed_precision is there, and says it")
        else:
            word = "fp16" if file.raw("fp16", "precision") else word
    options = {"reduce_dtype": "float16" if word == "fp16" else "bfloat16"} if kind == "FSDP" else {}
    match word:
        case "bf16":
            return BF16(**options)  # type: ignore[arg-type]  # one of the names of dtypes
        case "fp16":
            return FP16(**options)  # type: ignore[arg-type]
        case "fp8":
            return FP8(backend=backend, **options)  # type: ignore[arg-type]
    return None


def _fp8(file: Foreign, word: str) -> FP8Backend:
    here = "fp8_config"
    if word != "fp8":
        if file.section(here):
            file.without_effect(here, f"accelerate reads it with mixed_precision: fp8 only, and that is {word}")
        return TorchAO()
    if not file.section(here):
        what = "accelerate takes the first library that it finds installed; the plan is for torchao"
        file.warn("asks-machine", here, what, "Write fp8_config with backend: TE, AO or MSAMP.")
        return TorchAO()
    at = "precision.backend"
    backend = file.word(f"{here}.backend", ("TE", "MSAMP", "AO"), at)
    eval_too = file.flag(f"{here}.use_autocast_during_eval", at) or False
    margin = file.whole(f"{here}.margin", at) or 0
    form = file.word(f"{here}.fp8_format", ("HYBRID", "E4M3"), at) or "HYBRID"
    interval = file.whole(f"{here}.interval", at) or 1
    history = file.whole(f"{here}.amax_history_len", at) or 1024
    algorithm = file.word(f"{here}.amax_compute_algo", ("max", "most_recent"), at) or "most_recent"
    blocks = file.flag(f"{here}.use_mxfp8_block_scaling", at)
    wider = _three(file, f"{here}.override_linear_precision")
    level = file.word(f"{here}.opt_level", ("O1", "O2"), at) or "O2"
    pad = file.flag(f"{here}.pad_inner_dim", at)
    gather = file.flag(f"{here}.enable_fsdp_float8_all_gather", at)
    _other_backends(file, backend)
    if backend == "AO":
        return TorchAO(pad_inner_dim=pad is not False, float8_all_gather=gather)
    if backend == "MSAMP":
        return MSAMP(opt_level=level)  # type: ignore[arg-type]
    delayed = DelayedScaling(
        margin=margin,
        fp8_format=form,  # type: ignore[arg-type]
        interval=interval,
        amax_history_len=history,
        amax_compute_algo=algorithm,  # type: ignore[arg-type]
        override_linear_precision=wider,
    )
    recipe = MXFP8BlockScaling(margin=margin, fp8_format=form) if blocks else delayed  # type: ignore[arg-type]
    return TransformerEngine(recipe=recipe, autocast_during_eval=eval_too)


_OF_BACKENDS = {
    "TE": (
        *("margin", "fp8_format", "interval", "amax_history_len", "amax_compute_algo", "use_mxfp8_block_scaling"),
        *("override_linear_precision", "use_autocast_during_eval"),
    ),
    "MSAMP": ("opt_level",),
    "AO": ("pad_inner_dim", "enable_fsdp_float8_all_gather"),
}


def _other_backends(file: Foreign, backend: str | None) -> None:
    """Says which keys another library would read, and which nobody reads, though ``accelerate config`` writes them."""
    for ours, name in (("amax_history_length", "amax_history_len"), ("amax_compute_algorithm", "amax_compute_algo")):
        why = f"accelerate config writes this name, and its launcher reads {name}"
        file.without_effect(f"fp8_config.{ours}", f"{why}, whose default counts", f"Write it as {name}.")
    for other, names in _OF_BACKENDS.items():
        for name in names if backend is not None and other != backend else ():
            file.without_effect(f"fp8_config.{name}", f"it is for backend: {other}, and that is {backend}")


def _three(file: Foreign, name: str) -> tuple[bool, bool, bool]:
    """Three switches; the older files write the list as text."""
    value = file.raw(name, "precision.backend")
    if isinstance(value, str):
        value = [part.strip().lower() == "true" for part in value.strip("[]()").split(",")]
    if value is None:
        return (False, False, False)
    if isinstance(value, list) and len(value) == 3 and all(isinstance(item, bool) for item in value):
        return (value[0], value[1], value[2])
    file.error("wrong-type", name, f"{value!r} is not three times true or false", "Write [false, false, false].")
    return (False, False, False)


def _uncompiled(file: Foreign, kind: str) -> None:
    """Says that compilation is asked for where the launcher hands it on to nobody."""
    file.section("dynamo_config")
    for key, backend in (("dynamo_config", "dynamo_config.dynamo_backend"), ("dynamo_backend", "dynamo_backend")):
        if str(file.raw(backend)).upper() in ("NONE", "NO", "FALSE"):
            file.launching(key)
        else:
            why = f"accelerate's launcher hands it on to no process under {kind}"
            file.without_effect(key, why, "Remove it, and write compile=CompileBlocks() in prepkit's config.")


def _compile(file: Foreign, kind: str) -> Compile:
    here = "dynamo_config"
    if kind in _NOT_COMPILED and file.kind == "accelerate":
        _uncompiled(file, kind)
        return None
    old = file.raw("dynamo_backend", "compile")
    file.section(here)
    backend = file.raw(f"{here}.dynamo_backend", "compile.backend")
    mode = file.word(f"{here}.dynamo_mode", _MODES, "compile.mode") or "default"
    dynamic = file.flag(f"{here}.dynamo_use_dynamic", "compile.dynamic") or False  # as its launcher says (K-DY4)
    whole = file.flag(f"{here}.dynamo_use_fullgraph", "compile.fullgraph") or False
    regional = file.flag(f"{here}.dynamo_use_regional_compilation", "compile")
    name = str(backend or old or "NO").lower()
    if name in ("no", "false"):
        return None
    if regional:
        return CompileBlocks(backend=name, mode=mode, fullgraph=whole, dynamic=dynamic)
    return CompileModel(backend=name, mode=mode, fullgraph=whole, dynamic=dynamic)


def _checkpointing(file: Foreign) -> CheckpointBlocks | None:
    key = "fsdp_config.fsdp_activation_checkpointing"
    on = file.flag(key, "checkpointing")
    offload = file.flag(f"{key}_offload", *(("checkpointing.offload",) if on else ())) or False
    if offload and not on:
        what = "accelerate refuses it without fsdp_activation_checkpointing: only what is recomputed is offloaded"
        file.error("contradiction", f"{key}_offload", what, "Write fsdp_activation_checkpointing: true, or remove it.")
    if offload and file.whole("fsdp_config.fsdp_version") != 2:
        what = "accelerate refuses it under FSDP of version 1; here it works under each"
        file.warn("no-effect", f"{key}_offload", what, "Leave it, or write fsdp_version: 2.")
    return CheckpointBlocks(preserve_rng_state=True, offload=offload) if on else None


# --- sizes -----------------------------------------------------------------------------------------------------------


def processes(file: Foreign, kind: str) -> tuple[int | None, int]:
    """Return how many processes are started in all, None where the file does not say, and on how many machines."""
    world, machines = (file.count(name, misread=False) for name in ("num_processes", "num_machines"))
    file.declared |= {"num_processes", "num_machines"}
    if world is not None and world < 1 and world != -1:  # which is how accelerate's class says that it is not said
        file.error("wrong-value", "num_processes", f"{world} processes prepare nothing", "Write 1 or more.")
    if machines is not None and machines < 1:
        file.error("wrong-value", "num_machines", f"{machines} machines start nothing", "Write 1 or more.")
    machines = max(machines or 1, 1)
    if world is None or world < 1:
        return 1 if kind == "NO" else None, machines
    if kind == "NO" and world > 1 and file.source != "environment":  # ``simple_launcher`` of accelerate
        what = f"distributed_type: NO starts one process, and not {world}"
        file.warn("no-effect", "num_processes", what, "Write distributed_type: MULTI_GPU, or num_processes: 1.")
        return 1, machines
    if kind == "NO" or world % machines == 0:
        return world, machines
    each = world // machines
    what = f"{world} is no multiple of num_machines: {machines}; accelerate starts {each} on each machine"
    file.warn("contradiction", "num_processes", what, f"Write {each * machines} or {(each + 1) * machines}.")
    return each * machines or None, machines


def mesh_of(file: Foreign, kind: str) -> Mesh | None:
    """The mesh of ``parallelism_config``; None where there is none, and under DeepSpeed, which makes its own groups."""
    here = "parallelism_config"
    if not file.section(here):
        return None
    prefix = f"{here}.{here}"
    sizes = {name: _size(file, f"{prefix}_{name}_size") for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}
    for name, what in (("cp", "context"), ("sp", "sequence")):
        if sizes[name] > 1:
            why = f"prepkit cuts no sequences over ranks ({what} parallelism)"
            fix = f"Write {here}_{name}_size: 1 and give its ranks to dp_shard, or split the batch in the model."
            file.error("not-supported", f"{prefix}_{name}_size", why, fix)
    said = ("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable")
    file.launching(*(f"{prefix}_{name}" for name in (*said, "sp_attn_implementation")))
    for name, axis in (("dp_replicate", "replicate"), ("dp_shard", "shard"), ("tp", "tensor")):
        file.raw(f"{prefix}_{name}_size", f"mesh.{axis}")
    if kind == "DEEPSPEED":
        return None
    return Mesh(replicate=sizes["dp_replicate"], shard=sizes["dp_shard"], tensor=sizes["tp"])


def _size(file: Foreign, name: str) -> int:
    """Ranks along an axis. accelerate works none of them out (PC-2)."""
    size = file.count(name)
    if size is not None and size < 1:
        file.error("wrong-value", name, f"accelerate takes 1 or more, and this is {size}", "Write the number of ranks.")
    return 1 if size is None else size


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
