"""What each kind of step does, in one line."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import assert_never

from prepkit.findings.text import count, in_bytes, listed, local_device
from prepkit.plan.byte_ranges import bytes_read
from prepkit.plan.layout import itemsize
from prepkit.steps import (
    Agree,
    AllocateTensors,
    AutocastForward,
    AutocastFP8Forward,
    AverageGradients,
    Axis,
    BuildMesh,
    CastForward,
    CheckFiles,
    CheckpointModules,
    CompileModules,
    ConvertFP8Linears,
    ConvertOptimizer,
    ConvertSyncBatchNorm,
    ConvertTransformerEngine,
    CreateGradScaler,
    CreateOptimizer,
    DDPCommHook,
    File,
    InitializeDeepSpeed,
    InitializeMSAMP,
    InitializeTensors,
    MakeContiguous,
    MarkLeafModules,
    MoveModel,
    MoveToXLA,
    ParallelizeModules,
    PartitionParameters,
    PrecomputeFloat8Scales,
    ReadTensors,
    RebindOptimizer,
    ReduceXLAGradients,
    RegisterEntryPoints,
    RegroupOptimizer,
    ReleaseOptimizer,
    SendTensors,
    ShardLoader,
    ShardUnits,
    StartProcessGroup,
    StashTensors,
    Step,
    Unit,
    UpcastParameters,
    WrapDDP,
    WrapFSDP1,
    WrapLoader,
)


def effect(step: Step) -> str:  # noqa: C901  # one case per kind, and mypy counts that none is missing
    """Return what the step does to what, in one line without its kind."""
    match step:
        case StartProcessGroup():
            return _start_process_group(step)
        case Agree():
            return "all ranks compare the digests of plan and model"
        case BuildMesh():
            return f"{axes(step.axes)} on {step.device}"
        case ReleaseOptimizer():
            return f"parameters taken out of {_slots(step.slots)}"
        case UpcastParameters():
            return f"{count(len(step.names), 'parameter')} to {step.dtype}: {listed(step.names, limit=2)}"
        case MakeContiguous():
            return f"{count(len(step.names), 'parameter')} laid in order: {listed(step.names, limit=2)}"
        case MoveModel():
            return f"parameters and buffers to {local_device(step.device.type)}"
        case AutocastForward():
            return f"forward in {step.dtype} on {step.device}, outputs in {step.output_dtype}"
        case ParallelizeModules():
            return parallelized(step)
        case CheckpointModules():
            return _checkpoint_modules(step)
        case CompileModules():
            return _compile_modules(step)
        case ShardUnits():
            return sharded(step)
        case AverageGradients():
            over = f" over {' x '.join(step.axes)}" if step.axes else " over all ranks"
            return f"of {listed(step.names)}{over}, once per window"
        case ConvertSyncBatchNorm():
            return f"{listed(step.paths)} ({count(len(step.paths), 'module')})"
        case CreateGradScaler():
            return _create_grad_scaler(step)
        case WrapFSDP1():
            return flattened(step)
        case RegroupOptimizer():
            return f"flat parameters put into the place of {_slots(step.slots)}"
        case WrapDDP():
            return copied(step)
        case RebindOptimizer():
            return f"parameters put back by name into {_slots(step.slots)}"
        case CreateOptimizer():
            return _create_optimizer(step)
        case ShardLoader():
            return _shard_loader(step)
        case WrapLoader():
            return _wrap_loader(step)
        case CheckFiles():
            return f"{_files(step.files)}: size and header as planned, on every rank"
        case AllocateTensors():
            buffers = f"; buffers on {local_device(step.buffers.type)}" if step.buffers else ""
            return f"storage on {local_device(step.device.type)} for what is on meta, the rest moved there{buffers}"
        case InitializeTensors():
            return _initialise(step)
        case ReadTensors():
            return _read(step)
        case StashTensors():
            return f"{count(len(step.params), 'parameter')} to meta, their values kept on the host where there are any"
        case SendTensors():
            return _send(step)
        case ConvertFP8Linears():
            return _convert_fp8(step)
        case ConvertTransformerEngine():
            return _convert_engine(step)
        case AutocastFP8Forward():
            return _autocast_fp8(step)
        case InitializeMSAMP():
            return _initialize_msamp(step)
        case PrecomputeFloat8Scales():
            return "scales of all float8 weights, after every optimizer step"
        case MoveToXLA():
            return f"parameters and buffers to this process's XLA device{', one process at a time' * step.forked}"
        case ReduceXLAGradients():
            return "gradients averaged over all processes, before every optimizer step"
        case CastForward():
            return f"floating inputs to {step.dtype}, outputs to {step.output_dtype}"
        case MarkLeafModules():
            return f"{listed(step.paths)} ({count(len(step.paths), 'module')}) gathered whole by ZeRO-3"
        case RegisterEntryPoints():
            return entry_points(step)
        case ConvertOptimizer():
            return f"{step.algorithm} takes the optimizer's place" + (", decoupled decay" if step.decoupled else "")
        case PartitionParameters():
            where = local_device(step.device.type)
            return f"each rank holds its part of every parameter, and the buffers on {where}, without values yet"
        case InitializeDeepSpeed():
            return _initialise_deepspeed(step)
        case _:
            assert_never(step)


def axes(mesh: tuple[Axis, ...]) -> str:
    """``replicate=2 x shard=8``; ``one process`` for none."""
    return " x ".join(f"{axis.name}={axis.size}" for axis in mesh) or "one process"


def _slots(slots: tuple[tuple[str, ...], ...]) -> str:
    total, foreign = sum(map(len, slots)), sum(group.count("") for group in slots)
    left = f" ({foreign:,} not the model's, left alone)" if foreign else ""
    return f"{count(total - foreign, 'slot')} in {count(len(slots), 'group')}{left}"


def _start_process_group(step: StartProcessGroup) -> str:
    return f"{step.backend} over {count(step.world_size, 'rank')}, time-out {step.timeout_s:g} s"


def _checkpoint_modules(step: CheckpointModules) -> str:
    rng = "" if step.preserve_rng_state else "; dropout is not replayed"
    kept = f"; outputs of {listed(step.keep_ops)} kept" if step.keep_ops else ""
    host = "; inputs in host memory" if step.offload else ""
    return f"{listed(step.paths)} ({count(len(step.paths), 'module')}){kept}{host}{rng}"


def _compile_modules(step: CompileModules) -> str:
    what = "the whole model" if step.paths == ("",) else f"{listed(step.paths)} ({count(len(step.paths), 'module')})"
    shapes = {None: "", True: ", dynamic shapes", False: ", static shapes"}[step.dynamic]
    breaks = ", no graph breaks" if step.fullgraph else ""
    options = "".join(f", {option.name}={option.value}" for option in step.options)
    limit = "" if step.recompile_limit is None else f", at most {count(step.recompile_limit, 'compilation')}"
    apart = ", counted apart" if step.isolate_recompiles else ""
    return f"{what} with {step.backend}, mode {step.mode}{options}{breaks}{shapes}{limit}{apart}"


def _create_grad_scaler(step: CreateGradScaler) -> str:
    kind = "sharded, " if step.sharded else ""
    how = f"x {step.growth_factor:g} after {count(step.growth_interval, 'step')}, x {step.backoff_factor:g} on overflow"
    return f"{kind}on {step.device}, from {step.init_scale:g}, {how}"


def _convert_fp8(step: ConvertFP8Linears) -> str:
    extras = (
        ("inner dimensions padded", step.pad_inner_dim),
        ("weights gathered in float8", step.all_gather),
        ("emulated", step.emulate),
    )
    parts = "".join(f", {text}" for text, on in extras if on)
    return f"{listed(step.paths)} ({count(len(step.paths), 'Linear')}), {step.recipe}{parts}"


def _convert_engine(step: ConvertTransformerEngine) -> str:
    both = ((step.linears, "Linear"), (step.norms, "LayerNorm"))
    return " and ".join(f"{listed(paths)} ({count(len(paths), kind)})" for paths, kind in both if paths)


def _initialize_msamp(step: InitializeMSAMP) -> str:
    left = f"; {listed(step.kept)} left, tied or packed" if step.kept else ""
    return f"{listed(step.linears)} ({count(len(step.linears), 'Linear')}), the optimizer, {step.opt_level}{left}"


def _autocast_fp8(step: AutocastFP8Forward) -> str:
    when = "in training and evaluation" if step.during_eval else "in training"
    amax = f", {step.amax_compute_algo} of {step.amax_history_len} steps" if step.amax_compute_algo else ""
    wide = ", some products in the wider dtype" if step.override_linear_precision else ""
    return f"forward in float8 {when}, {step.recipe} {step.fp8_format}, margin {step.margin}{amax}{wide}"


def _create_optimizer(step: CreateOptimizer) -> str:
    options = ", ".join(f"{option.name}={option.value}" for option in step.options)
    text = f"{step.algorithm}({options}) over {count(len(step.names), 'parameter')}"
    for group in step.groups:
        own = ", ".join(f"{option.name}={option.value}" for option in group.options)
        text += f", {len(group.names)} more with {own}"
    return text


def _files(files: tuple[File, ...]) -> str:
    return f"{count(len(files), 'file')} of {in_bytes(sum(file.size for file in files))}"


def _initialise(step: InitializeTensors) -> str:
    params = f"{count(len(step.params), 'parameter')} with seed {step.seed}" if step.params else ""
    buffers = f"{count(len(step.buffers), 'buffer')} where on meta" if step.buffers else ""
    return " and ".join(part for part in (params, buffers) if part) + ", by the modules' own initialisers"


def _read(step: ReadTensors) -> str:
    """Return what rank 0 reads is the most that any rank does."""
    most = in_bytes(bytes_read(step.sources, step.axes, 0))
    parts = Counter(source.name for source in step.sources if source.chunk is not None)
    assembled = f", {len(parts)} of them from {count(parts.total(), 'part')}," if parts else ""
    tensors = count(len({source.name for source in step.sources}), "tensor")
    return f"{tensors}{assembled} from {_files(step.files)}; at most {most} on a rank"


def _send(step: SendTensors) -> str:
    total = in_bytes(sum(prod(tensor.shape) * itemsize(tensor.dtype) for tensor in step.tensors))
    return f"{count(len(step.tensors), 'tensor')}, {total} in all, from rank 0 to every rank's own part"


def _initialise_deepspeed(step: InitializeDeepSpeed) -> str:
    said = {".".join(one.path): one.value for one in step.settings}
    makes = {"given": "the given optimizer", "section": "an optimizer of its config", "none": "no optimizer"}
    batch = said.get("train_batch_size", "?")
    clipping = said.get("gradient_clipping", "0.0")
    clipped = "" if clipping in ("0", "0.0") else f", clipped to {clipping}"
    stepped = "" if step.scheduler == "outside" else "; steps the scheduler too"
    also = " by MS-AMP" if step.library == "msamp" else ""
    what = f"ZeRO stage {step.stage}{also} on {step.device} with {makes[step.optimizer]}, batch {batch}{clipped}"
    return f"{what}; {count(len(step.settings), 'setting')}{stepped}"


def _shard_loader(step: ShardLoader) -> str:
    filled = "the tail filled up from the start" + " to whole batches" * step.fill
    tail = "the tail dropped" if step.drop_last else filled
    if step.spread:
        tail = "each sample once"
    over = ""
    if step.axes is not None:
        over = f", divided over {' x '.join(step.axes)}" if step.axes else ", undivided"
    elif step.same_data > 1:
        over = f", {step.same_data} neighbours read the same"
    size = f", batches of {step.batch_size}" if step.batch_size is not None else ""
    sent = ", read by rank 0 for all" if step.dispatch else ""
    return f"loader {step.index}{over}, {_order(step)}{size}, {tail}{sent}"


def _order(step: ShardLoader) -> str:
    seeded = "as it draws" if step.seed is None else f"with seed {step.seed}"
    match step.split:
        case "samples":
            by = "by its own sampler" if step.seed is None else "shuffled"
            return f"{by} {seeded}" if step.shuffle else "in order"
        case "sampler":
            return f"by its own sampler {seeded}"
        case "batches":
            return f"in batches of its own sampler {seeded}"
        case "stream":
            return f"a stream that every rank reads, with seed {step.seed}"
        case "shards":
            return "a stream in shards, each read by one rank"
        case _:
            assert_never(step.split)


def _wrap_loader(step: WrapLoader) -> str:
    where = "unmoved" if step.device is None else f"to {local_device(step.device.type)}"
    purpose = "evaluation" if step.evaluation else "training"
    window = ", its end ends the window" if step.ends_window else ""
    return f"loader {step.index} for {purpose}, batches {where}{window}"


# --- wrapping --------------------------------------------------------------------------------------------------------


def parallelized(step: ParallelizeModules) -> str:
    """Return which modules are cut, how, and over how many ranks."""
    parts = (f"{listed(cut.paths)} {cut.style} ({cut.input_layout} to {cut.output_layout})" for cut in step.styles)
    total = sum(len(cut.paths) for cut in step.styles)
    return f"{count(total, 'module')} over {step.axis}: {'; '.join(parts)}"


def sharded(step: ShardUnits) -> str:
    """The units, over which axes, in which dtypes, and what becomes of what was gathered."""
    inner = tuple(unit.path for unit in step.units if unit.path)
    root = "the root" if len(inner) < len(step.units) else ""
    blocks = f"{listed(inner)} ({count(len(inner), 'unit')})" if inner else ""
    dtypes = (("gathered in", step.param_dtype), ("reduced in", step.reduce_dtype), ("outputs in", _output(step.units)))
    parts = "".join(f", {verb} {dtype}" for verb, dtype in dtypes if dtype)
    over = f", over {' x '.join(step.axes)}" if step.axes else ""
    kept = f"; kept {'in pinned' if step.pin_memory else 'in'} host memory" if step.offload else ""
    norms = sum(unit.full_precision for unit in step.units)
    full = f"; {count(norms, 'unit')} in float32" if norms else ""
    whole = f"; {count(len(step.ignored), 'parameter')} whole on every rank" if step.ignored else ""
    inputs = "" if step.cast_forward_inputs else "; inputs as they come"
    unused = "; zeros reduced for what has no gradient" if step.reduce_unused else ""
    return (
        "already " * step.already_sharded
        + " then ".join(part for part in (blocks, root) if part)
        + over
        + parts
        + f"; {_resharding(step.units)}"
        + full
        + kept
        + whole
        + inputs
        + unused
    )


def _output(units: tuple[Unit, ...]) -> str | None:
    return next((unit.output_dtype for unit in units if unit.output_dtype), None)


def _resharding(units: tuple[Unit, ...]) -> str:
    """The root is left out where there are other units: it keeps its parameters, because backward begins with them."""
    ways = {unit.reshard_after_forward for unit in units if unit.path} or {u.reshard_after_forward for u in units}
    if len(ways) > 1:
        return "freed after forward where a unit says so"
    way = ways.pop()
    if isinstance(way, bool):
        return "freed after forward" if way else "kept gathered until backward"
    return f"resharded to {count(way, 'rank')} after forward"


def flattened(step: WrapFSDP1) -> str:
    """The flat units, where they lie, and every option that is not the usual one."""
    inner = tuple(unit.path for unit in step.units if unit.path)
    blocks = f"{listed(inner)} ({count(len(inner), 'unit')}) then the root" if inner else "the root"
    dtypes = (("gathered in", step.param_dtype), ("reduced in", step.reduce_dtype), ("buffers in", step.buffer_dtype))
    parts = "".join(f", {verb} {dtype}" for verb, dtype in dtypes if dtype)
    whole = sum(unit.full_precision for unit in step.units)
    extras = (
        (f"{count(whole, 'unit')} in float32", whole),
        ("one flat parameter per unit", not step.use_orig_params),
        ("kept in host memory", step.offload),
        ("storage for what is on meta, unit by unit", step.allocates),
        ("rank 0 is broadcast first", step.sync_module_states),
        ("the next unit of forward is gathered ahead", step.forward_prefetch),
        ("gathered when needed in backward", step.backward_prefetch is None),
        ("gathered after the present gradients", step.backward_prefetch == "BACKWARD_POST"),
        ("gathered as early as the CPU asks", not step.limit_all_gathers),
        ("inputs of units cast", step.cast_forward_inputs),
        ("inputs of the root as they come", not step.cast_root_forward_inputs),
        (f"left whole: {listed(step.ignored)}", step.ignored),
    )
    return f"{blocks} on {local_device(step.device.type)}, {step.sharding}{parts}" + "".join(
        f"; {t}" for t, on in extras if on
    )


def entry_points(step: RegisterEntryPoints) -> str:
    """The methods, and how each call of them runs."""
    ways = {
        "units": "around each call the units gather as around forward",
        "wrapper": "inside the wrapper's forward",
        "forward": "patched as forward is",
    }
    return f"{', '.join(step.names)}: {ways[step.through]}{', all ranks in step' * step.in_step}"


def copied(step: WrapDDP) -> str:
    """Return where the copies lie, and how their gradients are averaged."""
    where = f" on {local_device(step.device.type)}" if step.device else ""
    parts = (
        ("buffers broadcast", step.broadcast_buffers),
        ("unused parameters searched", step.find_unused_parameters),
        ("gradients are views of the buckets", step.gradient_as_bucket_view),
        ("static graph", step.static_graph),
    )
    extras = "".join(f", {text}" for text, on in parts if on)
    return f"the model{where}, buckets of {step.bucket_cap_mb:g} MiB{extras}{_hook(step.hook)}"


def _hook(hook: DDPCommHook | None) -> str:
    if hook is None:
        return ""
    inside = f"{hook.wrapper}({hook.hook})" if hook.wrapper else hook.hook
    options = hook.options
    rank = f" of rank {options.matrix_approximation_rank} from step {options.start_powerSGD_iter}" if options else ""
    return f", gradients through {inside}{rank}"
