"""torchtitan's job config: the TOML that its trainer read until its configs became Python (``config/job_config.py``).

It is read as data: nothing that it names is imported or run.
"""

from __future__ import annotations

from math import prod

from attrs import evolve

from prepkit.config import (
    DDP,
    FSDP2,
    Adam,
    AdamW,
    CheckpointBlocks,
    ClipNorm,
    CompileBlocks,
    Config,
    Engine,
    KeepOnDevice,
    KeepWeights,
    LoadWeights,
    Mesh,
    NoCheckpointing,
    NoClip,
    NoCompile,
    OffloadToCPU,
    Single,
    TensorParallel,
    Weights,
)
from prepkit.formats.importers.foreign import Foreign, foreign
from prepkit.formats.importers.imported import Imported
from prepkit.formats.importers.source import Source
from prepkit.formats.importers.torchtitan_older import move_older_keys
from prepkit.formats.importers.torchtitan_precision import precision

_LAUNCHING = (
    *("job", "profiling", "metrics", "lr_scheduler", "validation", "memory_estimation", "experimental", "debug"),
    *("comm.train_timeout_seconds", "comm.trace_buf_size", "comm.save_traces_folder", "comm.save_traces_file_prefix"),
    *("comm.mode", "model.name", "model.flavor", "model.tokenizer_path", "model.hf_assets_path"),
    *("model.print_after_conversion", "training.dataset", "training.dataset_path", "training.seq_len"),
    *("training.gc_freq", "training.gc_debug", "training.seed", "training.deterministic"),
    *("optimizer.implementation", "parallelism.disable_loss_parallel"),
    *("training.warmup_steps", "model.norm_type"),  # of 2024
)
"""Sections and keys of data, logging, schedules and the run itself."""
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
)
"""Keys that say more of what ``_ELSEWHERE`` refuses: where that is off they do nothing in torchtitan either."""
_HERE = "parallelism."


def read_torchtitan(source: Source) -> Imported:
    """The file as prepkit's config. Raises ``PlanRejected`` with every finding."""
    file = foreign("torchtitan", source)
    move_older_keys(file)
    for section in ("training", "parallelism", "optimizer", "activation_checkpoint", "compile", "comm", "model"):
        file.section(section)
    file.launching(*_LAUNCHING)
    sizes = _sizes(file)
    norm = file.number("training.max_norm", "clip")
    steps = file.whole("training.steps", "total_steps")
    timeout = file.number("comm.init_timeout_seconds", "timeout_s")
    config = Config(
        engine=_engine(file, sizes),
        mesh=_mesh(sizes),
        checkpointing=_checkpointing(file),
        compile=_compile(file),
        weights=_weights(file),
        optimizer=_optimizer(file),
        clip=NoClip() if norm is not None and norm <= 0 else ClipNorm(1.0 if norm is None else float(norm)),
        accumulation=_accumulation(file, sizes),
        total_steps=steps,
        timeout_s=300.0 if timeout is None else float(timeout),
    )
    config = evolve(config, precision=precision(file, config.engine))
    if file.flag("fault_tolerance.enable"):
        what = "prepkit starts no groups of replicas that may come and go"
        file.error("not-supported", "fault_tolerance.enable", what, "Write false.")
    file.launching("fault_tolerance")
    if file.raw("experimental.custom_args_module"):  # which adds keys that only that module knows
        file.launching(*file.unread(), *file.unlike(("training", "model", "optimizer", "parallelism")))
    places = (sizes.replicate, sizes.shard, sizes.tensor)
    return file.imported(config, world_size=prod(places) if min(places) > 0 else None)


def _sizes(file: Foreign) -> Mesh:
    names = {"replicate": "data_parallel_replicate_degree", "shard": "data_parallel_shard_degree"}
    names["tensor"] = "tensor_parallel_degree"
    found = {axis: file.whole(f"{_HERE}{name}", f"mesh.{axis}") for axis, name in names.items()}
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
            file.warn("no-effect", f"{_HERE}{name}", why, "Write false.")
    return Mesh(**{axis: size for axis, size in found.items() if size is not None})


def _engine(file: Foreign, sizes: Mesh) -> Engine:
    policy = file.word(f"{_HERE}fsdp_reshard_after_forward", ("default", "always", "never"))
    offload = file.flag("training.enable_cpu_offload", *(("engine.offload",) if sizes.shard != 1 else ()))
    if sizes.shard != 1:
        file.raw(f"{_HERE}data_parallel_shard_degree", "engine")
        if policy is not None:
            file.raw(f"{_HERE}fsdp_reshard_after_forward", "engine.reshard_after_forward")
        kept = OffloadToCPU() if offload else KeepOnDevice()
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
        return TensorParallel()
    return DDP() if sizes.replicate > 1 else Single()


def _mesh(sizes: Mesh) -> Mesh | None:
    """The mesh, where it says more than the engine does."""
    return sizes if sizes.shard != 1 else None


def _checkpointing(file: Foreign) -> CheckpointBlocks | NoCheckpointing:
    here = "activation_checkpoint"
    mode = file.word(f"{here}.mode", ("selective", "full", "none", "memory_budget"), "checkpointing") or "selective"
    kept = file.flag(f"{here}.preserve_rng_state")
    if file.flag(f"{here}.early_stop"):
        file.warn("no-effect", f"{here}.early_stop", "recomputation stops early wherever torch lets it", "Remove it.")
    for name in ("determinism_check", "debug", "visualize_memory_budget_pareto", "memory_budget"):
        if file.has(f"{here}.{name}"):
            file.launching(f"{here}.{name}")
    for name in ("selective_ac_option", "per_op_sac_force_recompute_mm_shapes_by_fqns"):
        if mode != "selective" and file.has(f"{here}.{name}"):
            file.without_effect(f"{here}.{name}", f"it is for mode selective, and mode is {mode}")
        file.raw(f"{here}.{name}")
    if mode == "none":
        return NoCheckpointing()
    every = _every(file) if mode == "selective" else None
    if mode != "full" and every is None:
        what = f"every block is recomputed whole; prepkit picks no operations ({mode})"
        file.warn("no-effect", f"{here}.mode", what, "Write full or none.")
    return CheckpointBlocks(preserve_rng_state=bool(kept), every=every or 1)


def _every(file: Foreign) -> int | None:
    """Which blocks are recomputed: every second where nothing is said; None: it says operations."""
    name = "activation_checkpoint.selective_ac_option"
    option = file.raw(name)
    if option == "op":
        file.covered(name)
        return None
    every = 2 if option is None else file.whole(name, "checkpointing.every")
    if every is not None and every < 1:
        file.error("wrong-value", name, f"there is no block {every}", "Write a number from 1, or op.")
    return max(every or 1, 1)


def _compile(file: Foreign) -> CompileBlocks | NoCompile:
    older = file.flag("training.compile", *(("compile",) if file.raw("training.compile") else ()))
    on = file.flag("compile.enable", *(("compile",) if file.raw("compile.enable") else ()))
    parts = file.names("compile.components", "compile")
    backend = file.text("compile.backend", "compile.backend")
    if not (older or on) or (parts is not None and "model" not in parts):
        return NoCompile()
    if parts is not None and "loss" in parts:
        file.warn("no-effect", "compile.components", "the loss is computed in your loop", "Write ['model'].")
    return CompileBlocks(backend=backend or "inductor", fullgraph=True)


def _weights(file: Foreign) -> Weights:
    """Files that torchtitan reads into the model, where they are safetensors."""
    here = "checkpoint."
    path = file.text(f"{here}initial_load_path")
    if path and file.flag(f"{here}initial_load_in_hf"):
        file.raw(f"{here}initial_load_path", "weights")
        weights: Weights = LoadWeights(path)
    else:
        weights = KeepWeights()
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


def _accumulation(file: Foreign, sizes: Mesh) -> int:
    """Micro-batches per step: ``global_batch_size / (local_batch_size * ranks that read other data)``."""
    name = "training.global_batch_size"
    local = file.whole("training.local_batch_size") or file.whole("training.batch_size") or 8
    asked = file.whole(name)
    if asked is None or asked < 0:
        file.launching("training.local_batch_size", "training.batch_size")
        return 1
    for key in ("training.local_batch_size", "training.batch_size", name):
        file.raw(key, "accumulation")
    if sizes.shard < 1:
        what = "micro-batches per step follow from it and from how many ranks there are, which the file does not say"
        file.error("wrong-value", name, what, f"Write {_HERE}data_parallel_shard_degree as a number.")
        return 1
    at_once = local * sizes.replicate * sizes.shard
    if at_once < 1 or asked % at_once or asked < at_once:
        ranks = sizes.replicate * sizes.shard
        what = f"{asked} is no multiple of {local} samples on each of {ranks} ranks"
        file.error("contradiction", name, what, f"Write a multiple of {at_once}.")
        return 1
    return asked // at_once
