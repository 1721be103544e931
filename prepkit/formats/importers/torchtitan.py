"""torchtitan's job config: the TOML that its trainer read until its configs became Python (``config/job_config.py``).

It is read as data: nothing that it names is imported or run.
"""

from __future__ import annotations

from math import prod
from typing import Any

from attrs import evolve

from prepkit.codec.text import shown
from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FSDP2,
    Adam,
    AdamW,
    CheckpointBlocks,
    ClipNorm,
    CompileBlocks,
    Config,
    Engine,
    LoadWeights,
    Mesh,
    OffloadToCPU,
    Precision,
    Single,
    TensorParallel,
    TorchAO,
    Weights,
)
from prepkit.facts.env import MOST_RANKS
from prepkit.findings.text import near
from prepkit.formats.importers.foreign import Foreign, foreign
from prepkit.formats.importers.source import Imported, Source

_LAUNCHING = (
    *("job", "profiling", "metrics", "lr_scheduler", "validation", "memory_estimation", "experimental", "debug"),
    *("comm.train_timeout_seconds", "comm.trace_buf_size", "comm.save_traces_folder", "comm.save_traces_file_prefix"),
    *("comm.mode", "model.name", "model.flavor", "model.tokenizer_path", "model.hf_assets_path"),
    *("model.print_after_conversion", "training.dataset", "training.dataset_path", "training.seq_len"),
    *("training.gc_freq", "training.gc_debug", "training.seed", "training.deterministic", "training.dataloader"),
    "training.debug_moe_force_load_balance",
    *("optimizer.implementation", "parallelism.disable_loss_parallel"),
    *("training.warmup_steps", "model.norm_type"),  # of 2024
)
"""Sections and keys of data, logging, schedules and the run itself."""
_NUMBERS = (
    *("training.seq_len", "training.seed", "training.gc_freq", "training.warmup_steps", "lr_scheduler.warmup_steps"),
    *("lr_scheduler.decay_ratio", "lr_scheduler.lr_min", "lr_scheduler.min_lr_factor", "metrics.log_freq"),
    *("profiling.profile_freq", "validation.local_batch_size", "validation.seq_len", "validation.freq"),
    *("validation.steps", "comm.train_timeout_seconds", "comm.trace_buf_size", "checkpoint.interval"),
    *("checkpoint.keep_latest_k",),
)
"""Those of them that are numbers."""
_ELSEWHERE = (
    ("pipeline_parallel_degree", "prepkit makes no pipelines", "data_parallel_shard_degree"),
    ("context_parallel_degree", "prepkit cuts no sequences over ranks", "data_parallel_shard_degree"),
    ("expert_parallel_degree", "prepkit spreads no experts over ranks", "data_parallel_shard_degree"),
    ("expert_tensor_parallel_degree", "prepkit spreads no experts over ranks", "tensor_parallel_degree"),
)
_OF_ABSENT_WAYS = (
    *("pipeline_parallel_split_points", "pipeline_parallel_layers_per_stage", "pipeline_parallel_schedule"),
    *("pipeline_parallel_schedule_csv", "pipeline_parallel_microbatch_size", "context_parallel_rotate_method"),
    *("context_parallel_load_balancer", "module_fqns_per_model_part", "pipeline_parallel_first_stage_less_layers"),
    *("pipeline_parallel_last_stage_less_layers", "expert_parallel_comm_backend"),
    "pipeline_parallel_expert_parallel_overlap",
)
"""Keys that say more of what ``_ELSEWHERE`` refuses: where that is off they do nothing in torchtitan either."""
_HERE = "parallelism."
_SHOWN = 8
"""Keys that one finding names."""


def read_torchtitan(source: Source) -> Imported:
    """The file as prepkit's config. Raises ``PlanRejected`` with every finding."""
    file, sizes = _opened(source)
    config = _config(file, sizes)
    at: dict[int, Config] = {}
    if sizes.shard == -1 and sizes.replicate == 1 and sizes.tensor > 1:  # on so many nothing is left to shard
        again, _ = _opened(source)
        at = {sizes.tensor: evolve(_config(again, evolve(sizes, shard=1)), origins=tuple(dict.fromkeys(again.origins)))}
    if file.flag("fault_tolerance.enable"):
        what = "prepkit starts no groups of replicas that may come and go"
        file.error("not-supported", "fault_tolerance.enable", what, "Write false.")
    file.launching("fault_tolerance")
    if file.raw("job.custom_config_module") or file.raw("experimental.custom_args_module"):  # whose keys it knows
        file.launching(*file.unread(), *file.unlike())
    elif own := file.unlike():
        more = f" and {len(own) - _SHOWN} more" if len(own) > _SHOWN else ""
        what = f"torchtitan's own trainer refuses {', '.join(own[:_SHOWN])}{more}, and a fork that adds them reads them"
        file.launching(*own)
        file.error("fork-key", own[0], what, "Remove them where no fork is meant.")
    size = file.whole("training.local_batch_size") or file.whole("training.batch_size")
    return file.imported(config, world_size=_places(file, sizes), at=at, batch_size=size)


def _opened(source: Source) -> tuple[Foreign, Mesh]:
    """The file with what is of no concern to preparation told apart, and the sizes of its mesh."""
    file = foreign("torchtitan", source)
    file.typed = True
    move_older_keys(file)
    for section in ("training", "parallelism", "optimizer", "activation_checkpoint", "compile", "comm", "model"):
        file.section(section)
    for name in _NUMBERS:
        file.number(name)
    file.launching(*_LAUNCHING)
    return file, _sizes(file)


def _config(file: Foreign, sizes: Mesh) -> Config:
    norm = file.number("training.max_norm", "clip")
    steps = file.whole("training.steps", "total_steps")
    timeout = file.number("comm.init_timeout_seconds", "timeout_s")
    steps_of_batch, whole_batch = _batches(file, sizes)
    config = Config(
        engine=_engine(file, sizes),
        mesh=_mesh(file, sizes),
        checkpointing=_checkpointing(file),
        compile=_compile(file),
        weights=_weights(file),
        optimizer=_optimizer(file),
        clip=ClipNorm(1.0 if norm is None else float(norm)),
        accumulation=steps_of_batch,
        global_batch=whole_batch,
        total_steps=steps,
        timeout_s=300.0 if timeout is None else float(timeout),
    )
    return evolve(config, precision=precision(file, config.engine))


def _places(file: Foreign, sizes: Mesh) -> int | None:
    """Processes in all; None where the file does not say, or no job has so many."""
    each = (sizes.replicate, sizes.shard, sizes.tensor)
    if min(each) < 1 or prod(each) <= MOST_RANKS:
        return prod(each) if min(each) > 0 else None
    what = f"{' x '.join(map(str, each))} is more processes than any job has"
    file.error("wrong-value", f"{_HERE}data_parallel_shard_degree", what, "Write -1 for the rest.", misread=False)
    return None


def _sizes(file: Foreign) -> Mesh:
    names = {"replicate": "data_parallel_replicate_degree", "shard": "data_parallel_shard_degree"}
    names["tensor"] = "tensor_parallel_degree"
    found = {axis: file.count(f"{_HERE}{name}", f"mesh.{axis}") for axis, name in names.items()}
    for name, what, other in _ELSEWHERE:
        if (file.whole(f"{_HERE}{name}") or 1) > 1:
            file.error("not-supported", f"{_HERE}{name}", what, f"Write 1, and give its ranks to {other}.")
    for name in _OF_ABSENT_WAYS:
        if file.has(f"{_HERE}{name}"):
            file.launching(f"{_HERE}{name}")
    for name, why in (
        ("enable_async_tensor_parallel", "prepkit overlaps no communication inside a layer"),
        ("enable_compiled_autograd", "backward runs as torch runs it"),
    ):
        if file.flag(f"{_HERE}{name}"):
            file.warn("not-supported", f"{_HERE}{name}", why, "Write false.")
    return Mesh(**{axis: size for axis, size in found.items() if size is not None})


def _engine(file: Foreign, sizes: Mesh) -> Engine:
    policy = file.word(f"{_HERE}fsdp_reshard_after_forward", ("default", "always", "never"))
    offload = file.flag("training.enable_cpu_offload", *(("engine.offload",) if sizes.shard != 1 else ()))
    file.raw(f"{_HERE}data_parallel_shard_degree", "engine")
    if sizes.shard != 1:
        if policy is not None:
            file.raw(f"{_HERE}fsdp_reshard_after_forward", "engine.reshard_after_forward")
        kept = OffloadToCPU() if offload else None
        return FSDP2(reshard_after_forward=policy != "never", offload=kept)
    if offload:
        what = "torchtitan offloads under FSDP only, and data_parallel_shard_degree is 1"
        file.without_effect("training.enable_cpu_offload", what)
    if policy is not None:
        file.without_effect(f"{_HERE}fsdp_reshard_after_forward", "data_parallel_shard_degree is 1")
    if sizes.tensor > 1:
        if sizes.replicate > 1:
            what = "whole copies of layers that are cut: prepkit has them under FSDP2 only, one shard each"
            file.error(
                "not-supported",
                f"{_HERE}tensor_parallel_degree",
                what,
                "Write data_parallel_replicate_degree = 1 and data_parallel_shard_degree = -1.",
            )
        file.raw(f"{_HERE}tensor_parallel_degree", "engine")
        return TensorParallel()
    if sizes.replicate > 1:
        file.raw(f"{_HERE}data_parallel_replicate_degree", "engine")
    return DDP() if sizes.replicate > 1 else Single()


def _mesh(file: Foreign, sizes: Mesh) -> Mesh | None:
    """The mesh, where it says more than the engine does."""
    if sizes.shard != 1:
        return sizes
    file.origins[:] = [one for one in file.origins if not one.setting.startswith("config.mesh.")]
    return None


def _checkpointing(file: Foreign) -> CheckpointBlocks | None:
    here = "activation_checkpoint"
    mode = file.word(f"{here}.mode", ("selective", "full", "none", "memory_budget"), "checkpointing") or "selective"
    kept = file.flag(f"{here}.preserve_rng_state")
    if file.flag(f"{here}.early_stop"):
        file.warn(
            "not-supported", f"{here}.early_stop", "recomputation stops early wherever torch lets it", "Remove it."
        )
    for name in ("determinism_check", "debug", "visualize_memory_budget_pareto", "memory_budget"):
        if file.has(f"{here}.{name}"):
            file.launching(f"{here}.{name}")
    for name in ("selective_ac_option", "per_op_sac_force_recompute_mm_shapes_by_fqns"):
        if mode != "selective" and file.has(f"{here}.{name}"):
            file.without_effect(f"{here}.{name}", f"it is for mode selective, and mode is {mode}")
        file.raw(f"{here}.{name}")
    if mode == "none":
        return None
    every = _every(file) if mode == "selective" else None
    if mode != "full" and every is None:
        what = f"every block is recomputed whole; prepkit picks no operations ({mode})"
        file.warn("not-supported", f"{here}.mode", what, "Write full or none.")
    return CheckpointBlocks(preserve_rng_state=bool(kept), every=every or 1)


def _every(file: Foreign) -> int | None:
    """Return which blocks are recomputed: every second where nothing is said; None: it says operations."""
    name = "activation_checkpoint.selective_ac_option"
    option = file.raw(name)
    if option == "op":
        file.covered(name)
        return None
    if isinstance(option, str) and option.isdecimal():  # a text in torchtitan, whatever it holds
        every: int | None = int(file.raw(name, "checkpointing.every"))
    else:
        every = 2 if option is None else file.whole(name, "checkpointing.every")
    if every is not None and every < 1:
        file.error("wrong-value", name, f"there is no block {every}", "Write a number from 1, or op.")
    return max(every or 1, 1)


_PARTS = ("model", "loss")
"""What torchtitan compiles."""


def _compile(file: Foreign) -> CompileBlocks | None:
    older = file.flag("training.compile", *(("compile",) if file.raw("training.compile") else ()))
    on = file.flag("compile.enable", *(("compile",) if file.raw("compile.enable") else ()))
    parts = file.names("compile.components", "compile")
    backend = file.text("compile.backend", "compile.backend")
    for part in parts or ():
        if part not in _PARTS:
            meant = near(part, _PARTS, 1) or _PARTS
            what = f"{shown(part)} is none of {', '.join(_PARTS)}, and torchtitan would compile nothing for it"
            file.error("wrong-value", "compile.components", what, f"Write {' or '.join(meant)} in its place.")
    if not (older or on) or (parts is not None and "model" not in parts):
        return None
    if parts is not None and "loss" in parts:
        file.warn("not-supported", "compile.components", "the loss is computed in your loop", "Write ['model'].")
    return CompileBlocks(backend=backend or "inductor", fullgraph=True)


def _weights(file: Foreign) -> Weights:
    """Files that torchtitan reads into the model, where they are safetensors."""
    here = "checkpoint."
    path = file.text(f"{here}initial_load_path")
    if path and file.flag(f"{here}initial_load_in_hf"):
        file.raw(f"{here}initial_load_path", "weights")
        weights: Weights = LoadWeights(path)
    else:
        weights = None
    file.launching("checkpoint")
    return weights


def _optimizer(file: Foreign) -> AdamW | Adam:
    here, at = "optimizer.", "optimizer"
    name = file.word(f"{here}name", ("AdamW", "Adam"), at) or "AdamW"
    if file.flag(f"{here}early_step_in_backward"):
        what = "the optimizer steps after backward, when gradients are whole, averaged and clipped"
        file.error("not-supported", f"{here}early_step_in_backward", what, "Write false.")
    return (AdamW if name == "AdamW" else Adam)(
        lr=_number(file, "lr", 8e-4),  # the defaults are those of torchtitan
        betas=(_number(file, "beta1", 0.9), _number(file, "beta2", 0.95)),
        eps=_number(file, "eps", 1e-8),
        weight_decay=_number(file, "weight_decay", 0.1),
    )


def _number(file: Foreign, name: str, default: float) -> float:
    setting = "betas" if name.startswith("beta") else name
    value = file.number(f"optimizer.{name}", f"optimizer.{setting}")
    return default if value is None else float(value)


def _batches(file: Foreign, sizes: Mesh) -> tuple[int | None, int | None]:
    """Micro-batches per step: ``global_batch_size / (local_batch_size * ranks that read other data)``.

    Where the file leaves the ranks open, the global batch, of which they follow.
    """
    name = "training.global_batch_size"
    local = file.whole("training.local_batch_size") or file.whole("training.batch_size") or 8
    asked = file.whole(name)
    if asked is None or asked < 0:
        file.launching("training.local_batch_size", "training.batch_size")
        return 1, None
    known = sizes.shard > 0 and sizes.replicate > 0
    setting = "accumulation" if known else "global_batch"
    for key in ("training.local_batch_size", "training.batch_size", name):
        file.raw(key, setting)
    at_once = local * (sizes.replicate * sizes.shard if known else 1)
    if at_once < 1 or asked % at_once or asked < at_once:
        ranks = f"each of {sizes.replicate * sizes.shard} ranks" if known else "each rank, however many there are"
        what = f"{asked} is no multiple of {local} samples on {ranks}"
        file.error("contradiction", name, what, f"Write a multiple of {at_once}.", misread=False)
        return 1, None
    return (asked // at_once, None) if known else (None, asked)


# --- older files -----------------------------------------------------------------------------------------------------


_PARALLELISM = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")
_EXPERIMENTAL = (
    *("pipeline_parallel_degree", "context_parallel_degree", "enable_async_tensor_parallel"),
    *("pipeline_parallel_schedule", "pipeline_parallel_split_points", "context_parallel_rotate_method"),
    "enable_compiled_autograd",
)
_OLD_FLOAT8 = ("enable_float8_linear", "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
MOVED: dict[str, str] = (
    {f"training.{name}": f"parallelism.{name}" for name in _PARALLELISM}
    | {"training.data_parallel_degree": "parallelism.data_parallel_shard_degree"}
    | {f"experimental.{name}": f"parallelism.{name}" for name in _EXPERIMENTAL}
    | {f"training.{name}": f"float8.{name}" for name in _OLD_FLOAT8}
)
"""Path in a file of 2024 (``torchtitan/config_manager.py``) to the path of the same key since."""


def move_older_keys(file: Foreign) -> None:
    """Moves them in place; findings and origins show each where it was written.

    ``float8.enable_float8_linear`` becomes the converter ``float8``, which asks for the same.
    """
    for old, new in MOVED.items():
        if file.has(old):
            _move(file, old, new)
    section = file.data.get("float8")
    if isinstance(section, dict) and "enable_float8_linear" in section:
        on = section.pop("enable_float8_linear")
        written = file.shown_as.get("float8.enable_float8_linear", "float8.enable_float8_linear")
        place = file.places.get(written)
        if on is True:
            _put(file, "model.converters", [*(_get(file.data, "model.converters") or ()), "float8"])
            file.shown_as.setdefault("model.converters", written)
            if place is not None:
                file.places["model.converters"] = place
        elif on is not False:
            file.error("wrong-type", written, f"{on!r} is not true or false", "Write true or false.")
        else:
            file.launching("float8")  # off, with whatever it says of how
            file.data.pop("float8")


def _move(file: Foreign, old: str, new: str) -> None:
    section, _, name = old.rpartition(".")
    value = _get(file.data, section).pop(name)
    if file.has(new):
        what = f"it is given twice, as {file.shown_as.get(new, new)} too"
        file.error("contradiction", old, what, "Keep one of them.")
        return
    _put(file, new, value)
    file.shown_as[new] = old
    if old in file.places:
        file.places[new] = file.places[old]


def _get(data: Any, path: str) -> Any:
    for part in path.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


def _put(file: Foreign, path: str, value: Any) -> None:
    section, _, name = path.partition(".")
    held = file.data.setdefault(section, {})
    if isinstance(held, dict):
        held[name] = value


# --- precision -------------------------------------------------------------------------------------------------------


_FLOAT8 = ("float8", "quantize.linear.float8")
"""Names of the converter, and of its section, in older and in newer files."""
_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_BLOCKS = ("attention", "feed_forward", "moe")
"""Children of torchtitan's blocks, which are ``layers.0``, ``layers.1`` and so on."""


def precision(file: Foreign, engine: Engine) -> Precision:
    """The precision: bfloat16 where nothing is said, reduced in float32 (``MixedPrecisionPolicy``)."""
    compute = file.word("training.mixed_precision_param", ("bfloat16", "float32"), "precision") or "bfloat16"
    reduce = file.word("training.mixed_precision_reduce", ("float32", "bfloat16"), "precision.reduce_dtype")
    stored = file.word("training.dtype", ("float32", "bfloat16"), "precision.master_weights")
    float8 = _float8(file)
    if isinstance(engine, TensorParallel) and compute == "bfloat16" and stored != "bfloat16":
        if file.has("training.mixed_precision_param"):
            why = "torchtitan computes in the stored dtype where layers are cut and nothing is sharded"
            file.without_effect("training.mixed_precision_param", why)
        compute = "float32"
    options = {"reduce_dtype": reduce or "float32", "output_dtype": "bfloat16", "master_weights": stored != "bfloat16"}
    if float8 is not None:
        return FP8(backend=float8, **options)  # type: ignore[arg-type]  # names of dtypes
    if compute == "float32" or isinstance(engine, TensorParallel):
        return None
    return BF16(**options)  # type: ignore[arg-type]


def _float8(file: Foreign) -> TorchAO | None:
    asked = file.names("model.converters", "precision") or ()
    for name in asked:
        if name not in _FLOAT8:
            what = f"prepkit swaps no layers for {name!r}"
            file.error("not-supported", "model.converters", what, f"Write {list(_FLOAT8[1:])} or [].")
    for section in (*_FLOAT8, "mx", "quantize.linear.mx"):
        if file.section(section) and section not in asked:
            file.without_effect(section, f"model.converters does not name it: {list(asked)}")
    file.raw("quantize")
    file.raw("quantize.linear")
    here = next((name for name in _FLOAT8 if name in asked), None)
    if here is None:
        return None
    at = "precision.backend"
    gathered = file.flag(f"{here}.enable_fsdp_float8_all_gather", f"{at}.float8_all_gather")
    computed = file.flag(f"{here}.precompute_float8_dynamic_scale_for_fsdp", f"{at}.precompute_scales")
    if file.flag(f"{here}.force_recompute_fp8_weight_in_bwd"):
        name = f"{here}.force_recompute_fp8_weight_in_bwd"
        file.warn("no-effect", name, "torchao decides it by itself since 0.8", "Remove it.")
    if file.raw(f"{here}.moe_fqns_prototype"):
        what = "experts are not multiplied in float8"
        file.error("not-supported", f"{here}.moe_fqns_prototype", what, "Write [].")
    recipe = file.word(f"{here}.recipe_name", _RECIPES, f"{at}.recipe")
    emulate = file.flag(f"{here}.emulate", f"{at}.emulate")
    return TorchAO(
        recipe=recipe or "tensorwise",  # type: ignore[arg-type]  # one of its words
        pad_inner_dim=False,
        float8_all_gather=bool(gathered),
        precompute_scales=bool(computed),
        keep_first_and_last=False,
        skip=_skip(file, f"{here}.filter_fqns"),
        emulate=bool(emulate),
    )


def _skip(file: Foreign, name: str) -> tuple[str, ...]:
    """Patterns for texts that torchtitan looks for anywhere in a path: its own models say where they can be."""
    found = []
    for text in file.names(name, "precision.backend.skip") or ():
        first = text.partition(".")[0]
        if first in _BLOCKS and "." in text:
            found.append(f"layers.*.{text}*")
        elif first in ("output", "lm_head", "layers") or text.startswith("layers."):
            found.append(f"{text}*")
        else:
            what = f"torchtitan skips every path that contains {text!r}; prepkit takes shell patterns over whole paths"
            fix = "Remove it, and write TorchAO(skip=('layers.*.attention.wq',)) in prepkit's config."
            file.error("not-supported", name, what, fix)
    return tuple(found)
