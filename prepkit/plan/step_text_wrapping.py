"""What the steps do that cut, shard and wrap, in one line each."""

from __future__ import annotations

from prepkit.findings.text import count, listed, local_device
from prepkit.steps import DDPCommHook, ParallelizeModules, RegisterEntryPoints, ShardUnits, Unit, WrapDDP, WrapFSDP1


def parallelized(step: ParallelizeModules) -> str:
    """Which modules are cut, how, and over how many ranks."""
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
    """Where the copies lie, and how their gradients are averaged."""
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
