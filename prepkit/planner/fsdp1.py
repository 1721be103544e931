"""Parameters are laid end to end per unit, and cut evenly."""

from __future__ import annotations

from prepkit.config import FSDP1
from prepkit.plan import because
from prepkit.planner import fp8, pieces, weights
from prepkit.planner.pieces import Piece, entry_points
from prepkit.planner.weights import prepare_loaders
from prepkit.resolve.engines import engine_of
from prepkit.resolve.resolved import Resolved
from prepkit.resolve.units import full_precision_units, ignored_modules
from prepkit.rules.mesh import strategy
from prepkit.steps import BuildMesh, FlatUnit, LocalDevice, WrapFSDP1


def plan_fsdp1(resolved: Resolved) -> Piece:
    """Steps of the ``FSDP1`` engine (behaviour F1-1 … F1-51). Inference is sharded as training is (EV-2)."""
    return (
        pieces.start_group(resolved)
        + weights.check_files(resolved)  # while nothing has been changed
        + weights.stash(resolved)  # before the optimizer lets go of the parameters, which stay themselves
        + mesh(resolved)
        + pieces.release_optimizer(resolved)  # flattening replaces the parameters' data under the optimizer
        + pieces.upcast(resolved)  # a flat parameter has one dtype, and freezes it
        + fp8.convert(resolved)  # before anything is wrapped around the layers that it replaces
        + pieces.autocast(resolved)  # patches the user's model, not the wrapper
        + pieces.checkpoint(resolved)  # inside the unit, so that recomputation re-gathers
        + pieces.compile_blocks(resolved)  # a block is compiled as it will run: checkpointed, unsharded
        + wrap(resolved)  # has no way back: after everything that can still fail
        + weights.fill(resolved)  # each rank's shards alone; before the optimizer's state takes their device
        + fp8.autocast(resolved)  # around the wrapper, whose forward is what the user calls
        + pieces.compile_model(resolved)  # outermost: torch splits the graph at the units
        + entry_points(resolved)  # of the wrapper
        + pieces.rebind_flat(resolved)
        + pieces.create_optimizer(resolved)
        + pieces.grad_scaler(resolved, sharded=True)  # one verdict on overflow for all shards
        + prepare_loaders(resolved)
    )


def mesh(resolved: Resolved) -> Piece:
    """The device mesh that flat parameters are cut over."""
    axes = resolved.planned_mesh
    reason = "flat parameters are cut over all ranks"
    if len(axes) > 1:
        reason = f"{axes[0].size} copies of the model, each cut over {axes[1].size} ranks"
    elif axes[0].name == "replicate":
        reason = "every rank holds the whole model"
    return because(BuildMesh(device=resolved.compute_device, axes=axes), reason, "PC-8", "F1-40")


def wrap(resolved: Resolved) -> Piece:
    """One wrapper per selected module and per batch norm, leaves first; the root takes what is left."""
    engine, facts = engine_of(resolved.cfg, FSDP1), resolved.facts
    dtypes = resolved.compute_dtypes
    norms = full_precision_units(resolved.cfg, facts.model)
    inner = tuple(FlatUnit(path=path, full_precision=path in norms) for path in resolved.units)
    alone = resolved.planned_mesh[-1].size == 1  # torch would switch by itself, and warn once per unit
    copies = len(resolved.planned_mesh) > 1  # a hybrid strategy on one node has one copy, and averages over itself
    step = WrapFSDP1(
        units=(*inner, FlatUnit(path="")),
        sharding="NO_SHARD" if alone else engine.sharding if copies else strategy(engine, hybrid=False).sharding,
        device=LocalDevice(type=resolved.compute_device),
        param_dtype=dtypes.param if dtypes else None,
        reduce_dtype=dtypes.reduce if dtypes else None,
        buffer_dtype=engine.buffer_dtype if dtypes else None,
        offload=engine.offload,
        backward_prefetch=None if engine.backward_prefetch == "NO_PREFETCH" else engine.backward_prefetch,
        forward_prefetch=engine.forward_prefetch,
        limit_all_gathers=engine.limit_all_gathers,
        use_orig_params=engine.use_orig_params,
        sync_module_states=engine.sync_module_states and not weights.gives_values(resolved),  # there is nothing to send
        ignored=ignored_modules(engine, facts.model),
        cast_forward_inputs=engine.cast_forward_inputs,
        cast_root_forward_inputs=engine.cast_root_forward_inputs,
        allocates=weights.gives_values(resolved),
    )
    gathered = "each is gathered alone" if inner else "the whole model is gathered at once"
    units = f"{gathered}; batch norms stay in float32" if norms else gathered
    reason = f"leaves first, the root takes what is left; {units}"
    return because(step, reason, "F1-3", "F1-5", "F1-7", "F1-8", "F1-51")
