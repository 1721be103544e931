"""Sections of accelerate's file about an engine.

``fsdp_config``, for both versions of FSDP (behaviour K-F1 to K-F19); ``deepspeed_config``, and the JSON that it points
to (behaviour DP-1 to DP-12).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, cast

from attrs import evolve

from prepkit.codec.misfits import MOST
from prepkit.codec.text import shown
from prepkit.config import (
    FSDP1,
    FSDP2,
    BroadcastWeights,
    ClipNorm,
    Config,
    DeepSpeed,
    OffloadToCPU,
    Precision,
    Weights,
    Wrap,
    WrapBlocks,
    WrapClasses,
    WrapRoot,
    WrapSize,
)
from prepkit.config.engines import Sharding
from prepkit.findings.keywords import meant_key
from prepkit.findings.text import near
from prepkit.formats.importers.deepspeed import read_deepspeed, with_own_dtypes
from prepkit.formats.importers.foreign import Foreign, beside
from prepkit.resolve.deepspeed.data import AUTO, OWN_CLIP, filled, keys_of
from prepkit.resolve.deepspeed.keys import SECTIONS

_IN_FSDP = "fsdp_config."
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_FIRST_ONLY = ("backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "use_orig_params")
_MIN_PARAMS = 100_000_000
"""Elements above which accelerate's launcher makes a module a unit where the file says no number."""


def fsdp(file: Foreign, precision: Precision) -> FSDP1 | FSDP2:
    """The engine. Keys that the other version reads are said to do nothing.

    Version 1 keeps buffers in the dtype in which it reduces, where anything is cast (H-10c).
    """
    file.section("fsdp_config")
    version = file.whole(f"{_IN_FSDP}fsdp_version", "engine") or 1
    if version not in (1, 2):
        file.error("wrong-value", f"{_IN_FSDP}fsdp_version", f"there is no version {version} of FSDP", "Write 1 or 2.")
    file.word(f"{_IN_FSDP}fsdp_state_dict_type", ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"))
    if file.has(f"{_IN_FSDP}fsdp_state_dict_type"):  # save writes shards, export the whole: whoever saves says which
        file.launching(f"{_IN_FSDP}fsdp_state_dict_type")
    if version == 2:
        return _second(file)
    return evolve(_first(file), buffer_dtype=None if precision is None else precision.reduce_dtype)


def meant_type(file: Foreign, types: Sequence[str], sections: Mapping[str, Sequence[str]]) -> str:
    """The type that a file means whose ``distributed_type`` is none: what NO would do is not wrong with it as well."""
    if (given := file.data.get("distributed_type")) is None and file.has("distributed_type"):
        return "NO"
    told = (readers[0] for section, readers in sections.items() if file.data.get(section))
    return next(iter(near(str(given).upper(), types, 1)), next(told, "MULTI_GPU"))


def weights(file: Foreign) -> Weights:
    """Rank 0's values for all, where the file lets the others load nothing (M2-13, F1-47).

    The launcher does so where the file says nothing of it (K-F19).
    """
    name = f"{_IN_FSDP}fsdp_cpu_ram_efficient_loading"
    said = file.flag(name, "weights")
    sent = file.kind == "accelerate" if said is None else said
    second = file.whole(f"{_IN_FSDP}fsdp_version") == 2
    if sent and not second and file.flag(f"{_IN_FSDP}fsdp_sync_module_states") is False:
        what = "rank 0 alone has values then, and fsdp_sync_module_states: false keeps them there"
        if said is None:
            what = f"accelerate's launcher means true where nothing is said; {what}"
        file.error("contradiction", name, what, "Write fsdp_sync_module_states: true, or false here.")
    return BroadcastWeights() if sent else None


def _wrap(file: Foreign) -> Wrap:
    policy = file.word(f"{_IN_FSDP}fsdp_auto_wrap_policy", _POLICIES, "engine.wrap")
    current = f"{_IN_FSDP}fsdp_transformer_layer_cls_to_wrap"
    older = f"{_IN_FSDP}fsdp_transformer_cls_names_to_wrap"
    names = file.names(current, "engine.wrap") or file.names(older, "engine.wrap")
    file.names(older)
    least = file.whole(f"{_IN_FSDP}fsdp_min_num_params", *(("engine.wrap",) if policy == "SIZE_BASED_WRAP" else ()))
    if policy == "SIZE_BASED_WRAP":
        _say_digits(file, f"{_IN_FSDP}fsdp_min_num_params", least)
        return WrapSize(_MIN_PARAMS if least is None else least)
    if least is not None:
        file.without_effect(
            f"{_IN_FSDP}fsdp_min_num_params", "it is read with fsdp_auto_wrap_policy: SIZE_BASED_WRAP only"
        )
    if policy == "TRANSFORMER_BASED_WRAP":
        return WrapClasses(names) if names else WrapBlocks()
    if names:
        why = "it is read with fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP only"
        file.without_effect(current if file.has(current) else older, why)
    return WrapRoot()


def _say_digits(file: Foreign, name: str, number: int | None) -> None:
    """Says that a process reads a variable with ``int``, which takes digits alone, whatever a reader makes of them."""
    given = file.raw(name)
    if number is not None and file.kind == "accelerate" and not str(given).strip().lstrip("+-").isdecimal():
        what = f"{shown(given)} is not in digits, and accelerate refuses it: it reads it with Python's int"
        file.error("wrong-value", name, what, f"Write {number}.", misread=False)


def _first(file: Foreign) -> FSDP1:
    strategy = cast("Sharding", file.word(f"{_IN_FSDP}fsdp_sharding_strategy", STRATEGIES, "engine.sharding"))
    reshard = f"{_IN_FSDP}fsdp_reshard_after_forward"
    if file.has(reshard):
        file.without_effect(reshard, "FSDP of version 1 reads fsdp_sharding_strategy in its place", "Remove it.")
    prefetch = file.word(f"{_IN_FSDP}fsdp_backward_prefetch", _PREFETCH, "engine.backward_prefetch")
    older = file.word(f"{_IN_FSDP}fsdp_backward_prefetch_policy", _PREFETCH)
    if older is not None:
        file.without_effect(
            f"{_IN_FSDP}fsdp_backward_prefetch_policy", "accelerate reads fsdp_backward_prefetch", "Rename it."
        )
    limit = file.flag(f"{_IN_FSDP}fsdp_limit_all_gathers", "engine.limit_all_gathers")
    forward = file.flag(f"{_IN_FSDP}fsdp_forward_prefetch", "engine.forward_prefetch")
    original = file.flag(f"{_IN_FSDP}fsdp_use_orig_params", "engine.use_orig_params")
    sync = file.flag(f"{_IN_FSDP}fsdp_sync_module_states", "engine.sync_module_states")
    return FSDP1(
        wrap=_wrap(file),
        sharding=strategy or "FULL_SHARD",
        offload=file.flag(f"{_IN_FSDP}fsdp_offload_params", "engine.offload") or False,
        backward_prefetch=prefetch or "NO_PREFETCH",  # type: ignore[arg-type]
        forward_prefetch=forward or False,
        limit_all_gathers=limit is not False,
        use_orig_params=original is not False,
        sync_module_states=sync is not False,
        ignored=_ignored(file),
    )


def _second(file: Foreign) -> FSDP2:
    for name in (*_FIRST_ONLY, "limit_all_gathers", "sync_module_states"):
        file.without_effect(f"{_IN_FSDP}fsdp_{name}", "FSDP of version 2 does not read it")
    strategy = file.word(f"{_IN_FSDP}fsdp_sharding_strategy", STRATEGIES)
    if strategy:
        why = "FSDP of version 2 reads fsdp_reshard_after_forward in its place"
        file.without_effect(f"{_IN_FSDP}fsdp_sharding_strategy", why)
    reshard = f"{_IN_FSDP}fsdp_reshard_after_forward"
    freed: bool | None
    if isinstance(file.raw(reshard), str) and str(file.raw(reshard)).upper() in STRATEGIES:
        freed = str(file.raw(reshard, "engine.reshard_after_forward")).upper() not in ("SHARD_GRAD_OP", "NO_SHARD")
        what = "version 2 wants true or false here, and a name is refused by accelerate"
        file.warn("wrong-value", reshard, what, f"Write {str(freed).lower()}.")
    else:
        freed = file.flag(reshard, "engine.reshard_after_forward")
    offload = file.flag(f"{_IN_FSDP}fsdp_offload_params", "engine.offload")
    if _ignored(file):
        file.error("not-supported", f"{_IN_FSDP}fsdp_ignored_modules", "FSDP2 here shards every module", "Remove it.")
    return FSDP2(
        wrap=_wrap(file),
        reshard_after_forward=freed is not False,
        offload=OffloadToCPU() if offload else None,
    )


def _ignored(file: Foreign) -> tuple[str, ...]:
    """Patterns; accelerate takes one regular expression over paths; a plain path is a pattern of ours too."""
    name = f"{_IN_FSDP}fsdp_ignored_modules"
    text = file.text(name, "engine.ignored")
    if text is None:
        return ()
    if any(letter in text for letter in "\\[](){}^$+?|"):
        fix = "Write shell patterns over dotted paths in prepkit's config: FSDP1(ignored=('vision_tower.*',))."
        file.error("not-supported", name, f"{text!r} is a regular expression; prepkit takes shell patterns", fix)
        return ()
    return (text.replace(".*", "*"),)


# --- machines --------------------------------------------------------------------------------------------------------


def say_places(file: Foreign) -> None:
    """Says which machine or port there is none of; scripts often give other ones, so that one left out is no fault."""
    file.whole("main_process_port")
    rank, machines = file.data.get("machine_rank"), file.data.get("num_machines")
    if type(rank) is int and type(machines) is int and not 0 <= rank < max(machines, 1):
        what = f"the machines are 0 to {machines - 1}, and this is {rank}" if machines > 1 else "the only machine is 0"
        file.error("contradiction", "machine_rank", what, "Write the number of this machine, from 0.", misread=False)


# --- keys in another place ---

_CLUSTER = (
    *("compute_environment", "debug", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend"),
    *("same_network", "main_training_function", "enable_cpu_affinity", "gpu_ids", "mpirun_config", "tpu_name"),
    *("tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "command_file", "commands"),
)
_SAGEMAKER = (
    *("ec2_instance_type", "iam_role_name", "image_uri", "profile", "region", "base_job_name", "pytorch_version"),
    *("transformers_version", "py_version", "sagemaker_inputs_file", "sagemaker_metrics_file", "additional_args"),
)
LAUNCHING = (*_CLUSTER, *_SAGEMAKER)
"""Keys that start processes, and say nothing of what a process does with the model."""
_SECTIONS = ("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config", "fp8_config")
_HOISTED = (
    *("mixed_precision", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
    *("gpu_ids", "rdzv_backend", "main_training_function"),
)
"""Keys of the top that are options of the launcher too: it copies every key of a section onto its options."""

_AT_THE_TOP = frozenset((*LAUNCHING, *_SECTIONS, *_HOISTED, "distributed_type", "use_cpu", "downcast_bf16"))


def launching(file: Foreign) -> tuple[str, ...]:
    """Those of the keys that accelerate takes in this file: a file for SageMaker has some of its own."""
    return LAUNCHING if file.data.get("compute_environment") == "AMAZON_SAGEMAKER" else _CLUSTER


def found_elsewhere(file: Foreign, keys_of: Callable[[str], Sequence[str]]) -> None:
    """Reads keys that stand at the top and belong into a section, which is said, and the other way round."""
    for section in _SECTIONS:
        given = file.data.get(section)
        if not isinstance(given, dict):
            continue
        strange = [key for key in file.data if "_" in str(key) and key not in _AT_THE_TOP]
        inside = frozenset(keys_of(section)) if strange else frozenset[str]()
        for key in strange:
            if (path := f"{section}.{key}") in inside and key not in inside:
                what = f"accelerate refuses a file with it at the top: it is a key of {section}"
                fix = f"Remove it: {section} has it too." if file.has(path) else f"Move it into {section}."
                file.error("unknown-key", key, what, fix, misread=False)
                _put(file, key, path)
        for key in [key for key in given if key in _HOISTED]:
            _hoist(file, f"{section}.{key}", str(key))


def _hoist(file: Foreign, path: str, key: str) -> None:
    """Reads a key of a section as that of the top, over which its launcher takes it."""
    value = file.raw(path)
    if file.has(key) and file.data[key] != value:
        what = f"accelerate's launcher takes it over {key}: {shown(file.data[key])} at the top"
        file.error("contradiction", path, what, "Keep one of them, at the top.", misread=False)
    elif not file.has(key):
        what = f"accelerate's launcher reads it as {key} of the top, over which it would go"
        file.warn("contradiction", path, what, "Move it to the top.")
    file.data[key] = value
    file.shown_as[key] = path
    if path in file.places:
        file.places[key] = file.places[path]


def _put(file: Foreign, key: str, path: str) -> None:
    section, _, name = path.partition(".")
    if not file.has(path):
        file.data[section][name] = file.data[key]
        file.shown_as[path] = key
        if key in file.places:
            file.places[path] = file.places[key]


# --- keys of other types ---------------------------------------------------------------------------------------------


def say_of_other_types(file: Foreign, launching: tuple[str, ...], others: Mapping[str, str]) -> None:
    """Says of keys at the top which key of a section is meant, where the distributed type is one that reads it not.

    ``others``: keys of such sections, each with a type that reads it.
    """
    inside = [key for key in others if "." in key.strip(".")]
    for key in file.unread()[:MOST]:
        meant = "".join(meant_key(key, (*file.known(), *launching, *inside))[:1])
        if meant not in inside:
            continue
        kind, name = others[meant], meant.rpartition(".")[2]
        what = f"accelerate knows no such key here; {meant} is one, under distributed_type: {kind} only"
        fix = f"Write it as {meant}, with distributed_type: {kind}"
        if name in _ARGUMENTS:
            fix = f"Write Accelerator({name}=...) in the script"
        file.error("unknown-key", key, what, f"{fix}, and remove it here.", misread=False)


_ARGUMENTS = ("gradient_accumulation_steps",)
"""Keys of a section that are arguments of ``Accelerator`` as well, under every type."""


# --- DeepSpeed -------------------------------------------------------------------------------------------------------


_IN_DEEPSPEED = "deepspeed_config."
_DEVICES = ("none", "cpu", "nvme")
_LAUNCHING = (
    *("deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter"),
    *("deepspeed_inclusion_filter", "zero3_save_16bit_model"),
)
_BESIDE_A_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path"),
)
"""Keys that accelerate refuses beside a JSON file (DP-5)."""
Device = Literal["none", "cpu", "nvme"]


def deepspeed(file: Foreign, config: Config, path: Path) -> Config:
    """The config with DeepSpeed as its engine."""
    config = _engine(file, config, path)
    _say_whose(file)
    return with_own_dtypes(config)


def _say_whose(file: Foreign) -> None:
    """Keys that accelerate's launcher does not read here, and DeepSpeed's own file has."""
    known = file.known()
    for key in file.section("deepspeed_config"):
        homes = [
            f"{path}.{name}".strip(".")
            for path, keys in SECTIONS.items()
            if (name := str(key).removeprefix(f"{path.rpartition('.')[2]}_" if path else "")) in keys
        ]
        if homes and f"{_IN_DEEPSPEED}{key}" not in known:
            what = "accelerate's launcher reads no such key here; DeepSpeed's own file does"
            home = next((home for home in homes if home.startswith("zero_optimization.")), homes[0])
            fix = f"Write {home} into a DeepSpeed JSON, and that file's path as deepspeed_config_file."
            file.error("unknown-key", f"{_IN_DEEPSPEED}{key}", what, fix, misread=False)


def _engine(file: Foreign, config: Config, path: Path) -> Config:
    file.section("deepspeed_config")
    file.launching(*(f"{_IN_DEEPSPEED}{name}" for name in _LAUNCHING))
    experts = file.names(f"{_IN_DEEPSPEED}deepspeed_moe_layer_cls_names", "engine.leaf_modules") or ()
    stage = file.whole(f"{_IN_DEEPSPEED}zero_stage", "engine.stage")
    init = file.flag(f"{_IN_DEEPSPEED}zero3_init_flag")
    if init and (stage == 3 or file.has(f"{_IN_DEEPSPEED}deepspeed_config_file")):
        file.launching(
            f"{_IN_DEEPSPEED}zero3_init_flag"
        )  # how the model is built; one on meta is filled by config.weights
    json_file = file.text(f"{_IN_DEEPSPEED}deepspeed_config_file", "engine.config")
    if json_file is not None:
        return _from_file(file, config, path, json_file, experts)
    if init and stage != 3 and (stage is not None or not file.has(f"{_IN_DEEPSPEED}zero_stage")):
        file.without_effect(f"{_IN_DEEPSPEED}zero3_init_flag", f"it is for stage 3, and zero_stage is {stage or 2}")
    engine = DeepSpeed(
        stage=2 if stage is None else stage,
        offload_optimizer=_device(file, "optimizer"),
        offload_param=_device(file, "param"),
        leaf_modules=experts,
        config=_rest(file),
    )
    steps = file.whole_or_auto(f"{_IN_DEEPSPEED}gradient_accumulation_steps", "accumulation")
    clip = file.number_or_auto(f"{_IN_DEEPSPEED}gradient_clipping", "clip")
    if clip == 0:
        what = f"accelerate hands no 0 on, and DeepSpeed clips to {OWN_CLIP} where nothing is said"
        fix = f'Write {OWN_CLIP}, or a deepspeed_config_file with "gradient_clipping": 0.0.'
        file.warn("no-effect", f"{_IN_DEEPSPEED}gradient_clipping", what, fix)
    return evolve(config, engine=engine, accumulation=steps, clip=ClipNorm(clip or OWN_CLIP))


def _device(file: Foreign, what: str) -> Device | None:
    path = f"{_IN_DEEPSPEED}offload_{what}_nvme_path"
    file.means(path, f"engine.config.zero_optimization.offload_{what}.nvme_path")
    if file.text(path) not in (None, "none"):
        file.raw(path, "engine.config")
    word = file.word(f"{_IN_DEEPSPEED}offload_{what}_device", _DEVICES, f"engine.offload_{what}")
    return cast("Device | None", word)


def _rest(file: Foreign) -> dict[str, object]:
    """Parts of DeepSpeed's own config that stand in the section itself, and the paths of offload files."""
    data: dict[str, object] = {}
    for name in ("bf16", "fp16", "seq_parallel_communication_data_type"):
        value = file.raw(f"{_IN_DEEPSPEED}{name}", *(("engine.config",) if file.has(f"{_IN_DEEPSPEED}{name}") else ()))
        if value is not None:
            why = "accelerate's launcher reads no such key here; DeepSpeed's own file does"
            file.without_effect(f"{_IN_DEEPSPEED}{name}", why, "Write it into the deepspeed_config_file.")
    zero = {}
    for what in ("optimizer", "param"):
        place = file.raw(f"{_IN_DEEPSPEED}offload_{what}_nvme_path")
        if isinstance(place, str) and place != "none":
            zero[f"offload_{what}"] = {"device": "nvme", "nvme_path": place}
    return data | ({"zero_optimization": zero} if zero else {})


def _from_file(file: Foreign, config: Config, path: Path, name: str, experts: tuple[str, ...]) -> Config:
    for key in _BESIDE_A_FILE:
        if file.raw(f"{_IN_DEEPSPEED}{key}") is not None or file.has(f"{_IN_DEEPSPEED}{key}"):
            what = "accelerate refuses it beside deepspeed_config_file"
            file.error("contradiction", f"{_IN_DEEPSPEED}{key}", what, f"Write it into {name}, and remove it here.")
    found = beside(name, path)
    if found is None:
        file.missing(f"{_IN_DEEPSPEED}deepspeed_config_file", name, path)
        return config
    inner = file.part(f"{_IN_DEEPSPEED}deepspeed_config_file", lambda: read_deepspeed(file.json(found)))
    if inner is None:
        return config
    file.origins += inner.config.origins
    file.taken(inner, found)
    file.findings += inner.notes
    assert isinstance(inner.config.engine, DeepSpeed)
    engine = evolve(inner.config.engine, leaf_modules=experts)
    if file.has("mixed_precision") and "precision" in {o.setting.partition(".")[2] for o in inner.config.origins}:
        what = "accelerate refuses it beside deepspeed_config_file, which says the precision too"
        if type(inner.config.precision) is not type(config.precision):
            file.error("contradiction", "mixed_precision", what, "Remove it, or write the same in both.")
    precision = inner.config.precision if not file.has("mixed_precision") else config.precision
    if precision is None:  # as accelerate fills in what is left to it
        engine = filled(engine, {"fp16.enabled": False, "bf16.enabled": False})
    if keys_of(engine).get("gradient_clipping") == AUTO:
        inner = evolve(inner, config=evolve(inner.config, clip=ClipNorm(OWN_CLIP)))
    return evolve(
        config,
        engine=engine,
        precision=precision,
        accumulation=inner.config.accumulation,
        global_batch=inner.config.global_batch,
        clip=inner.config.clip,
    )
