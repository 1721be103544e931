"""Parameters are laid end to end per unit, and cut evenly."""

from __future__ import annotations

from prepkit.config import BF16, FP8, FP16, FSDP1, AsStored, Config
from prepkit.facts import Facts
from prepkit.plan import because
from prepkit.planner import fp8, pieces
from prepkit.planner.pieces import Piece
from prepkit.resolve.fsdp1 import batch_norms, flat_units, ignored_modules
from prepkit.resolve.mesh import axes
from prepkit.steps import Axis, BuildMesh, FlatUnit, LocalDevice, WrapFSDP1


def plan_fsdp1(cfg: Config, facts: Facts) -> Piece:
    """Steps of the ``FSDP1`` engine (behaviour F1-1 … F1-51). Inference is sharded as training is (EV-2)."""
    return (
        pieces.start_group(cfg, facts)
        + mesh(cfg, facts)
        + pieces.release_optimizer(facts)  # flattening replaces the parameters' data under the optimizer
        + pieces.upcast(cfg, facts)  # a flat parameter has one dtype, and freezes it
        + fp8.convert(cfg, facts)  # before anything is wrapped around the layers that it replaces
        + pieces.autocast(cfg, facts)  # patches the user's model, not the wrapper
        + pieces.checkpoint(cfg, facts)  # inside the unit, so that recomputation re-gathers
        + pieces.compile_blocks(cfg, facts)  # a block is compiled as it will run: checkpointed, unsharded
        + wrap(cfg, facts)  # has no way back: after everything that can still fail
        + fp8.autocast(cfg, facts)  # around the wrapper, whose forward is what the user calls
        + pieces.compile_model(cfg)  # outermost: torch splits the graph at the units
        + pieces.rebind_flat(cfg, facts)
        + pieces.create_optimizer(cfg, facts)
        + pieces.grad_scaler(cfg, facts, sharded=True)  # one verdict on overflow for all shards
        + pieces.shard_loaders(cfg, facts)
    )


def _axes(cfg: Config, facts: Facts) -> tuple[Axis, ...]:
    found = axes(cfg, facts.env)
    assert found is not None, "the mesh rules refuse a mesh that does not multiply to the world size"
    return found


def mesh(cfg: Config, facts: Facts) -> Piece:
    """The device mesh that flat parameters are cut over."""
    found = _axes(cfg, facts)
    reason = "flat parameters are cut over all ranks"
    if len(found) > 1:
        reason = f"{found[0].size} copies of the model, each cut over {found[1].size} ranks"
    elif found[0].name == "replicate":
        reason = "every rank holds the whole model"
    return because(BuildMesh(device=pieces.device(cfg, facts), axes=found), reason, "PC-8", "F1-40")


def wrap(cfg: Config, facts: Facts) -> Piece:
    """One wrapper per selected module and per batch norm, leaves first; the root takes what is left."""
    engine = cfg.engine
    assert isinstance(engine, FSDP1), "the planner table gives this planner FSDP1 configs only"
    match cfg.precision:
        case AsStored():
            param = reduce = buffer = None
        case BF16(reduce_dtype=reduce) | FP16(reduce_dtype=reduce) | FP8(reduce_dtype=reduce):
            param = "float16" if isinstance(cfg.precision, FP16) else "bfloat16"
            buffer = engine.buffer_dtype
    norms = batch_norms(facts.model) if param else frozenset()
    inner = tuple(FlatUnit(path=path, full_precision=path in norms) for path in flat_units(cfg, facts.model))
    alone = _axes(cfg, facts)[-1].size == 1  # torch would switch by itself, and warn once per unit
    step = WrapFSDP1(
        units=(*inner, FlatUnit(path="")),
        sharding="NO_SHARD" if alone else engine.sharding,
        device=LocalDevice(type=pieces.device(cfg, facts)),
        param_dtype=param,
        reduce_dtype=reduce,
        buffer_dtype=buffer,
        offload=engine.offload,
        backward_prefetch=engine.backward_prefetch,
        forward_prefetch=engine.forward_prefetch,
        limit_all_gathers=engine.limit_all_gathers,
        use_orig_params=engine.use_orig_params,
        sync_module_states=engine.sync_module_states,
        ignored=ignored_modules(engine, facts.model),
    )
    gathered = "each is gathered alone" if inner else "the whole model is gathered at once"
    said = f"{gathered}; batch norms stay in float32" if norms else gathered
    reason = f"leaves first, the root takes what is left; {said}"
    return because(step, reason, "F1-3", "F1-5", "F1-7", "F1-8", "F1-51")
