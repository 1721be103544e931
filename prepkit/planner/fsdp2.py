"""Parameters, gradients and optimizer state are sharded per parameter."""

from __future__ import annotations

from prepkit.config import FSDP2, Config, OffloadToCPU
from prepkit.facts import Facts, ModelFacts
from prepkit.plan import because
from prepkit.planner import fp8, pieces, weights
from prepkit.planner.pieces import Piece
from prepkit.planner.tensor_parallel import parallelize
from prepkit.resolve.fsdp2 import arrives_sharded, left_whole, unit_paths
from prepkit.resolve.mesh import axes, size_of
from prepkit.resolve.precision import dtypes
from prepkit.steps import Axis, BuildMesh, ShardUnits, Unit


def plan_fsdp2(cfg: Config, facts: Facts) -> Piece:
    """Steps of the ``FSDP2`` engine (behaviour P2-1 … P2-15, M2-1 … M2-17)."""
    moves = weights.fills(cfg) or not arrives_sharded(cfg, facts.model)  # parameters become other objects
    return (
        pieces.start_group(cfg, facts)
        + weights.check_files(cfg, facts)  # while nothing has been changed
        + weights.set_aside(cfg, facts)  # before the optimizer lets go of the parameters, which stay themselves
        + mesh(cfg, facts)
        + (pieces.release_optimizer(facts) if moves else ())  # or the old ones keep the whole model in memory
        + pieces.upcast(cfg, facts)  # sharding freezes each parameter's dtype
        + parallelize(cfg, facts)  # what is sharded, compiled and recomputed is a layer's part
        + fp8.convert(cfg, facts)  # a float8 weight keeps its dtype, a sharded layer cannot be replaced any more
        + fp8.autocast(cfg, facts)  # the root's forward; sharding adds hooks around it
        + pieces.checkpoint(cfg, facts)  # inside the unit, so that recomputation re-gathers
        + pieces.compile_blocks(cfg, facts)  # a block is compiled as it will run: checkpointed, unsharded
        + pieces.compile_model(cfg)
        + shard_units(cfg, facts)  # has no way back: after everything that can still fail
        + weights.fill(cfg, facts)  # each rank's shards alone; before the optimizer's state takes their device
        + (pieces.rebind_optimizer(facts) if moves else ())
        + pieces.create_optimizer(cfg, facts)
        + pieces.grad_scaler(cfg, facts)
        + fp8.precompute(cfg, facts)  # watches the optimizer that is there by now
        + pieces.shard_loaders(cfg, facts)
    )


def _axes(cfg: Config, facts: Facts) -> tuple[Axis, ...]:
    found = axes(cfg, facts.env)
    assert found is not None, "the mesh rules refuse a mesh that does not multiply to the world size"
    return found


def mesh(cfg: Config, facts: Facts) -> Piece:
    """The device mesh that the units are sharded over."""
    reason = "parameters are sharded over all ranks"
    found = _axes(cfg, facts)
    copies, shards, parts = (size_of(name, found) for name in ("replicate", "shard", "tensor"))
    if copies > 1:
        reason = f"{copies} copies of the model, each sharded over {shards} ranks"
    elif parts > 1:
        reason = f"parameters are sharded over {shards} ranks"
    if parts > 1:
        reason += f", and their layers cut over {parts} neighbours"
    return because(BuildMesh(device=pieces.device(cfg, facts), axes=found), reason, "M2-5", "PC-8")


def shard_units(cfg: Config, facts: Facts) -> Piece:
    """One unit per selected module, leaves first; the root takes what is left. Units that stand are kept."""
    engine = cfg.engine
    assert isinstance(engine, FSDP2), "the planner table gives this planner FSDP2 configs only"
    param, reduce, _ = dtypes(cfg)
    if stands := facts.model.units:  # they may say the same in other words, such as no reduction dtype
        param, reduce = stands[0].param_dtype, stands[0].reduce_dtype
    offload = engine.offload
    step = ShardUnits(
        units=_standing(facts.model) or _selected(cfg, engine, facts.model),
        param_dtype=param,
        reduce_dtype=reduce,
        offload=isinstance(offload, OffloadToCPU),
        pin_memory=isinstance(offload, OffloadToCPU) and offload.pin_memory and pieces.device(cfg, facts) != "cpu",
        axes=pieces.data_axes(cfg, facts) or (),
        ignored=left_whole(facts.model),
        already_sharded=arrives_sharded(cfg, facts.model),
    )
    if step.already_sharded:
        return because(step, "the model arrives sharded so, and is left as it is", "M2-1")
    gathered = "each is gathered alone" if len(step.units) > 1 else "the whole model is gathered at once"
    packed = "; packed weights stay whole" if step.ignored else ""
    rows = ("M2-6", "M2-7", "SS-14") if step.ignored else ()
    return because(
        step, f"leaves first, the root takes what is left; {gathered}{packed}", "M2-10", "M2-12", "H-17", *rows
    )


def _selected(cfg: Config, engine: FSDP2, model: ModelFacts) -> tuple[Unit, ...]:
    inner = (Unit(path=path, reshard_after_forward=engine.reshard_after_forward) for path in unit_paths(engine, model))
    # Only the root casts its output: a block's output feeds the next block, which computes in bfloat16 again.
    return (*inner, Unit(path="", reshard_after_forward=False, output_dtype=dtypes(cfg)[2]))


def _standing(model: ModelFacts) -> tuple[Unit, ...]:
    return tuple(
        Unit(path=one.path, reshard_after_forward=one.reshard_after_forward, output_dtype=one.output_dtype)
        for one in model.units
    )
