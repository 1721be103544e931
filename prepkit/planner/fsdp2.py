"""Steps of a model in shards of its parameters and in parts of its layers."""

from __future__ import annotations

from prepkit.config import FSDP2, OffloadToCPU, TPPlanFromModel
from prepkit.facts import ModelFacts
from prepkit.plan import because
from prepkit.planner import fp8, pieces, weights
from prepkit.planner.pieces import Piece, entry_points
from prepkit.planner.weights import prepare_loaders
from prepkit.resolve.engines import engine_of
from prepkit.resolve.resolved import Resolved
from prepkit.resolve.units import full_precision_units, scalars
from prepkit.steps import AverageGradients, Axis, BuildMesh, ParallelizeModules, ShardUnits, Unit


def plan_fsdp2(resolved: Resolved) -> Piece:
    """Steps of the ``FSDP2`` engine (behaviour P2-1 … P2-15, M2-1 … M2-17)."""
    moves = weights.gives_values(resolved) or not resolved.arrives_sharded  # parameters become other objects
    return (
        pieces.start_group(resolved)
        + weights.check_files(resolved)  # while nothing has been changed
        + weights.stash(resolved)  # before the optimizer lets go of the parameters, which stay themselves
        + mesh(resolved)
        + (pieces.release_optimizer(resolved) if moves else ())  # or the old ones keep the whole model in memory
        + (pieces.contiguous(resolved) if moves else ())  # fully_shard refuses the others
        + pieces.upcast(resolved)  # sharding freezes each parameter's dtype
        + parallelize(resolved)  # what is sharded, compiled and recomputed is a layer's part
        + fp8.convert(resolved)  # a float8 weight keeps its dtype, a sharded layer cannot be replaced any more
        + fp8.autocast(resolved)  # the root's forward; sharding adds hooks around it
        + pieces.checkpoint(resolved)  # inside the unit, so that recomputation re-gathers
        + pieces.compile_blocks(resolved)  # a block is compiled as it will run: checkpointed, unsharded
        + pieces.compile_model(resolved)
        + shard_units(resolved)  # has no way back: after everything that can still fail
        + entry_points(resolved)  # torch patches them on units only
        + weights.fill(resolved)  # each rank's shards alone; before the optimizer's state takes their device
        + (pieces.rebind_optimizer(resolved) if moves else ())
        + pieces.create_optimizer(resolved)
        + pieces.grad_scaler(resolved)
        + fp8.precompute(resolved)  # watches the optimizer that is there by now
        + average_whole(resolved)  # of the objects that the parameters are by now
        + prepare_loaders(resolved)
    )


def mesh(resolved: Resolved) -> Piece:
    """The device mesh that the units are sharded over."""
    reason = "parameters are sharded over all ranks"
    replicas, shards, tensor = (resolved.axis_size(name) for name in ("replicate", "shard", "tensor"))
    if replicas > 1:
        reason = f"{replicas} copies of the model, each sharded over {shards} ranks"
    elif tensor > 1:
        reason = f"parameters are sharded over {shards} ranks"
    if tensor > 1:
        reason += f", and their layers cut over {tensor} neighbours"
    return because(BuildMesh(device=resolved.compute_device, axes=resolved.planned_mesh), reason, "M2-5", "PC-8")


def shard_units(resolved: Resolved) -> Piece:
    """One unit per selected module, leaves first; the root takes what is left. Units that stand are kept."""
    engine, model = engine_of(resolved.cfg, FSDP2), resolved.facts.model
    dtypes = resolved.compute_dtypes
    param: str | None = dtypes.param if dtypes else None
    reduce: str | None = dtypes.reduce if dtypes else None
    if model.units:  # they may say the same in other words, such as no reduction dtype
        param, reduce = model.units[0].param_dtype, model.units[0].reduce_dtype
    offload = engine.offload
    step = ShardUnits(
        units=_already_sharded(model) or _selected(resolved, engine),
        param_dtype=param,
        reduce_dtype=reduce,
        offload=isinstance(offload, OffloadToCPU),
        pin_memory=isinstance(offload, OffloadToCPU) and offload.pin_memory and resolved.compute_device != "cpu",
        axes=resolved.data_axes or (),
        ignored=resolved.unsharded_params,
        cast_forward_inputs=model.units[-1].cast_forward_inputs if model.units else engine.cast_forward_inputs,
        reduce_unused=engine.reduce_unused or any(unit.reduce_unused for unit in model.units),
        already_sharded=resolved.arrives_sharded,
    )
    if step.already_sharded:
        return because(step, "the model arrives sharded so, and is left as it is", "M2-1")
    gathered = "each is gathered alone" if len(step.units) > 1 else "the whole model is gathered at once"
    rows = ("M2-6", "M2-7", "SS-14") if step.ignored else ()
    reason = f"leaves first, the root takes what is left; {gathered}{_exceptions(resolved, step)}"
    reason += pieces.loss_inside(resolved)
    return because(step, reason, "M2-10", "M2-12", "H-17", *rows)


def _exceptions(resolved: Resolved, step: ShardUnits) -> str:
    """Return what is not cast or not cut as everything else, in words."""
    packed, numbers = set(resolved.packed_params), set(scalars(resolved.facts.model))
    rest = set(step.ignored) - packed - numbers
    whole = (("packed weights", packed), ("single numbers", numbers), ("what is ignored", rest))
    kinds = [words for words, names in whole if names.intersection(step.ignored)]
    norms = any(unit.full_precision for unit in step.units)
    return ("; batch norms stay in float32" if norms else "") + (f"; {' and '.join(kinds)} stay whole" if kinds else "")


def average_whole(resolved: Resolved) -> Piece:
    """Gradients of what every rank holds whole: no reduction of a unit has them."""
    whole = set(resolved.unsharded_params) if resolved.trains and resolved.data_parallel_size > 1 else set()
    names = tuple(p.name for p in resolved.facts.model.params if p.requires_grad and p.name in whole)
    if not names:
        return ()
    step = AverageGradients(names=names, axes=resolved.data_axes or ())
    return because(step, "no unit reduces them, and the ranks would drift apart", "F1-49", "pain 9")


def _selected(resolved: Resolved, engine: FSDP2) -> tuple[Unit, ...]:
    norms = full_precision_units(resolved.cfg, resolved.facts.model)
    inner = (
        Unit(path=path, reshard_after_forward=engine.reshard_after_forward, full_precision=path in norms)
        for path in resolved.units
    )
    # Only the root casts its output: a block's output feeds the next block, which computes in bfloat16 again.
    output = resolved.compute_dtypes.output if resolved.compute_dtypes else None
    return (*inner, Unit(path="", reshard_after_forward=False, output_dtype=output))


def _already_sharded(model: ModelFacts) -> tuple[Unit, ...]:
    return tuple(
        Unit(path=unit.path, reshard_after_forward=unit.reshard_after_forward, output_dtype=unit.output_dtype)
        for unit in model.units
    )


def plan_tensor_parallel(resolved: Resolved) -> Piece:
    """Steps of the ``TensorParallel`` engine (behaviour TP-1 … TP-5, X-1)."""
    parallel = parallelize(resolved)
    return (
        pieces.start_group(resolved)
        + weights.check_files(resolved)  # while nothing has been changed
        + weights.stash(resolved)  # before the optimizer lets go of the parameters, which stay themselves
        + tensor_mesh(resolved)
        + (pieces.release_optimizer(resolved) if parallel else ())  # the old parameters would keep every layer whole
        + pieces.upcast(resolved)  # keeps each parameter the object that it is, so before it is replaced
        + parallel
        + weights.move(resolved)  # after the cut, so that no device ever has to hold the whole model
        + pieces.autocast(resolved)
        + pieces.checkpoint(resolved)  # around the layers' hooks, so that recomputing communicates again
        + pieces.compile_blocks(resolved)
        + entry_points(resolved)  # patched as the forward is by now
        + pieces.compile_model(resolved)
        + weights.fill(resolved)  # each rank's parts alone; before the optimizer's state takes their device
        + (pieces.rebind_optimizer(resolved) if parallel else pieces.move_state(resolved))
        + pieces.create_optimizer(resolved)
        + pieces.grad_scaler(resolved)
        + prepare_loaders(resolved)
    )


def tensor_mesh(resolved: Resolved) -> Piece:
    """The device mesh, of one axis."""
    axes = (Axis(name="tensor", size=resolved.tp.size),)
    reason = "every layer of the plan is cut over all ranks"
    return because(BuildMesh(device=resolved.compute_device, axes=axes), reason, "TP-1", "PC-8")


def parallelize(resolved: Resolved) -> Piece:
    """The layers that are cut; none where the model arrives parallel (TP-5), or the mesh has no tensor axis."""
    styles = resolved.tp.styles
    if not styles:
        return ()
    whose = (
        "the model's own plan" if isinstance(resolved.cfg.tp_plan, TPPlanFromModel) else "the rows of config.tp_plan"
    )
    step = ParallelizeModules(styles=styles, axis="tensor")
    return because(step, f"{whose}, over {resolved.tp.size} ranks", "TP-1", "X-1", "G-33")
