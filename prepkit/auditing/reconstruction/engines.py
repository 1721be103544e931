"""Wrappers and units as the engine of a config, with the dtypes they compute in and what else they were asked for."""

from __future__ import annotations

import json
from typing import Any, cast

from attrs import evolve, frozen

from prepkit.auditing.reconstruction.reasons import Reasons
from prepkit.auditing.reconstruction.selection import selection
from prepkit.config import (
    BF16,
    DDP,
    FP16,
    FSDP1,
    FSDP2,
    CommHook,
    CompressHook,
    Config,
    DeepSpeed,
    DType,
    Engine,
    Mesh,
    OffloadToCPU,
    PowerSGDHook,
    Precision,
    Single,
    TensorParallel,
    Wrap,
    WrapRoot,
)
from prepkit.facts import ModelFacts, UnitFact
from prepkit.facts.preparation import AutocastOptions, DDPOptions, FlatUnitOptions, HowPrepared, NamedValues
from prepkit.facts.run import RunFacts
from prepkit.findings.text import count
from prepkit.formats.importers.deepspeed import read_deepspeed
from prepkit.formats.importers.source import Source
from prepkit.resolve.deepspeed.data import said
from prepkit.resolve.modules import packed_params, select
from prepkit.resolve.precision import LOW
from prepkit.resolve.units import every_batch_norm, ignored_params, scalars, sharded_units


@frozen(kw_only=True)
class StandingEngine:
    """The part of a config that wrappers and units say."""

    engine: Engine
    precision: Precision
    mesh: Mesh | None = None
    rest: Config | None = None
    """What the engine's own config says beside it: clipping, accumulation."""


def prepared(facts: RunFacts, how: HowPrepared, reasons: Reasons, *, trains: bool) -> StandingEngine:
    """The engine that stands there. Where several do, the outermost one, with a reason."""
    standing = {
        "a DeepSpeed engine": bool(how.deepspeed),
        "DDP": how.ddp is not None,
        "FSDP1": bool(how.flat_units),
        "FSDP2": bool(facts.model.units),
    }
    names = [name for name, there in standing.items() if there]
    if len(names) > 1:
        reasons.add("model", f"{' and '.join(names)} stand in one model", "Prepare the model with one of them.")
    _others(facts, how, reasons)
    if how.deepspeed:
        return _deepspeed(how)
    if how.ddp is not None:
        return StandingEngine(engine=_ddp(how, how.ddp, facts.world_size, reasons), precision=_autocast(how))
    if facts.model.units:
        return _fsdp2(facts, how, reasons)
    if how.flat_units:
        return _fsdp1(facts, how, reasons)
    if how.tensor_parallel:
        return StandingEngine(engine=TensorParallel(), precision=_autocast(how))
    if facts.world_size > 1 and trains:
        reasons.add("model", f"{facts.world_size} ranks train, and no wrapper averages their gradients", _ALONE)
    if facts.world_size > 1:
        return StandingEngine(engine=DDP(), precision=_autocast(how))  # which wraps nothing for inference
    return StandingEngine(engine=Single(), precision=_autocast(how))


def _others(facts: RunFacts, how: HowPrepared, reasons: Reasons) -> None:
    """What stands where no config puts it: around a part, in another order, or cut in a way that is not known."""
    if facts.ddp and how.ddp is None:
        reasons.add(f"model.{facts.ddp[0].path}", "DDP stands around a part of the model", "Wrap the whole model.")
    for place in facts.wrapped:
        words = [word for word in place.wrappers if word in ("checkpointed", "fsdp1")]
        if words[:2] == ["checkpointed", "fsdp1"]:
            what = "the unit is recomputed from outside, and gathered once more for it"
            reasons.add(f"model.{place.path}", what, "Checkpoint first, then wrap in FullyShardedDataParallel.")
            break
    known = {module.path for module in how.tensor_parallel}
    data = 0 if not facts.model.units else 2 if any(unit.copies > 1 for unit in facts.model.units) else 1
    cut = [param.name for param in facts.model.params if len(param.placements) > data]
    if strange := [name for name in cut if name.rpartition(".")[0] not in known]:
        what = f"{count(len(strange), 'parameter')} cut over ranks without the hooks of torch's styles"
        reasons.add(f"model.{strange[0]}", what, "Cut layers with parallelize_module.")


def _autocast(how: HowPrepared) -> Precision:
    return of_autocast(how.autocast, how.model)


def _deepspeed(how: HowPrepared) -> StandingEngine:
    read = read_deepspeed(Source("engine.json", how.deepspeed)).config
    engine = DeepSpeed(config=json.dumps(said(read.engine)), leaf_modules=how.leaf_modules)
    return StandingEngine(engine=engine, precision=of_engine(read.precision, how), rest=read)


# --- DDP ---


def _ddp(how: HowPrepared, ddp: DDPOptions, world: int, reasons: Reasons) -> DDP:
    if ddp.ranks != world:
        reasons.add("ddp", f"it averages over {ddp.ranks} of {world} ranks", "Leave out process_group=.")
    if ddp.mixed:
        reasons.add("ddp", "it casts by itself (mixed_precision=)", "Run the forward under autocast.")
    return DDP(
        broadcast_buffers=ddp.broadcast_buffers,
        bucket_cap_mb=ddp.bucket_cap_mb,
        find_unused_parameters=ddp.find_unused_parameters,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        static_graph=ddp.static_graph,
        hook=_hook(ddp.hooks, reasons),
        sync_batchnorm=any(cls.name == "SyncBatchNorm" for cls in how.model.classes),
    )


def _hook(hooks: tuple[tuple[str, NamedValues], ...], reasons: Reasons) -> CommHook:
    match hooks:
        case ():
            return None
        case (("fp16_compress_hook", _),):
            return CompressHook(dtype="float16")
        case (("bf16_compress_hook", _),):
            return CompressHook(dtype="bfloat16")
        case ((name, options),) if name.endswith("powerSGD_hook"):
            return _powersgd(name, dict(options))
        case _:
            said = ", ".join(name for name, _ in hooks)
            reasons.add("ddp", f"its gradients travel through {said}", "Register one of torch's hooks, or none.")
            return None


def _powersgd(name: str, said: dict[str, object]) -> PowerSGDHook:
    words = {"fp16_compress_wrapper": "float16", "bf16_compress_wrapper": "bfloat16"}
    hook = PowerSGDHook(wrapper=words.get(name.partition(" ")[0], "none"))  # type: ignore[arg-type]  # one of the three
    given = {"matrix_approximation_rank": "rank", "start_powerSGD_iter": "start_iter", "random_seed": "random_seed"}
    kept = ("min_compression_rate", "use_error_feedback", "warm_start", "orthogonalization_epsilon")
    given |= {key: key for key in (*kept, "batch_tensors_with_same_shape")}
    changes: dict[str, Any] = {ours: said[theirs] for theirs, ours in given.items() if theirs in said}
    return evolve(hook, **changes)


# --- units ---


def _mesh(ranks: int, copies: int, tensor: int, world: int, reasons: Reasons) -> Mesh | None:
    if ranks * copies * tensor != world:
        what = f"units lie over {ranks} x {copies} ranks{f' x {tensor}' if tensor > 1 else ''}, and {world} run"
        reasons.add("model", what, "Shard over a mesh of all ranks.")
    return None if copies == 1 and tensor == 1 else Mesh(replicate=copies, shard=ranks, tensor=tensor)


def _fsdp2(facts: RunFacts, how: HowPrepared, reasons: Reasons) -> StandingEngine:
    units, world = facts.model.units, facts.world_size
    paths = frozenset(unit.path for unit in units if unit.path)
    if units[-1].path:
        reasons.add("model", "the root is no unit; what no unit holds stays whole", "Call fully_shard on the root too.")
    root = units[-1]
    norms = _full_precision(units, how.model)
    inner = tuple(unit for unit in units[:-1] if unit.path not in norms)
    holding = [unit for unit in units if unit.ranks]
    below = [unit for unit in holding if unit.path]
    for what, values in (
        ("the mesh of units", {(unit.ranks, unit.copies) for unit in holding}),
        ("whether shards are offloaded", {unit.offload for unit in holding}),
        ("whether units cast their inputs", {unit.cast_forward_inputs for unit in (root, *inner)}),
        ("whether units reduce zeros", {unit.reduce_unused for unit in holding}),
        ("what units do after forward", {unit.reshard_after_forward for unit in below}),
    ):
        reasons.same("model", what, frozenset(values))
    if root.reshard_after_forward is not False and not root.path:
        reasons.add(
            "model", "the root frees its parameters after forward", "Leave reshard_after_forward out at the root."
        )
    computes = of_units(root, inner, how.model, reasons)
    first = holding[0] if holding else root
    engine = FSDP2(
        reshard_after_forward=below[0].reshard_after_forward if below else True,
        offload=OffloadToCPU(pin_memory=how.pin_memory) if first.offload else None,
        ignored=_ignored(how, FSDP2(), paths, reasons),
        cast_forward_inputs=root.cast_forward_inputs,
        reduce_unused=first.reduce_unused,
    )
    mesh = _mesh(first.ranks or world // how.tensor_ranks, first.copies, how.tensor_ranks, world, reasons)
    return StandingEngine(
        engine=evolve(engine, wrap=_wrap(engine, computes, paths, how, reasons)), precision=computes, mesh=mesh
    )


def _fsdp1(facts: RunFacts, how: HowPrepared, reasons: Reasons) -> StandingEngine:
    units = how.flat_units
    paths = frozenset(unit.path for unit in units if unit.path)
    root = next((unit for unit in units if not unit.path), units[0])
    if root.path:
        reasons.add("model", "the root is no unit, and nobody averages what no unit holds", "Wrap the root too.")
    norms = _full_precision(units, how.model)
    inner = tuple(unit for unit in units if unit.path and unit.path not in norms)
    for name in (
        "sharding",
        "offload",
        "backward_prefetch",
        "forward_prefetch",
        "limit_all_gathers",
        "use_orig_params",
    ):
        reasons.same("model", f"{name} of units", {getattr(unit, name) for unit in units})
    reasons.same("model", "whether units cast their inputs", {unit.cast_forward_inputs for unit in inner})
    reasons.same("model", "the mesh of units", {(unit.ranks, unit.copies) for unit in units})
    computes = of_flat_units(root, inner, how, reasons)
    engine = FSDP1(
        # alone, torch switches to NO_SHARD by itself
        sharding=root.sharding if root.ranks * root.copies > 1 else "FULL_SHARD",  # type: ignore[arg-type]  # its names
        offload=root.offload,
        backward_prefetch=root.backward_prefetch or "NO_PREFETCH",  # type: ignore[arg-type]  # torch's own names
        forward_prefetch=root.forward_prefetch,
        limit_all_gathers=root.limit_all_gathers,
        use_orig_params=root.use_orig_params,
        ignored=_ignored(how, FSDP1(), paths, reasons),
        cast_forward_inputs=(inner[0] if inner else root).cast_forward_inputs,
        cast_root_forward_inputs=root.cast_root_forward_inputs,
        buffer_dtype=None if computes is None else root.buffer_dtype,  # type: ignore[arg-type]
    )
    wrap = _wrap(engine, computes, paths, how, reasons)
    mesh = _mesh(root.ranks, root.copies, 1, facts.world_size, reasons) if root.sharding != "NO_SHARD" else None
    return StandingEngine(engine=evolve(engine, wrap=wrap), precision=computes, mesh=mesh)


def _full_precision(units: tuple[UnitFact, ...] | tuple[FlatUnitOptions, ...], model: ModelFacts) -> frozenset[str]:
    """Batch norms that stay in float32 though the root computes in fewer bits."""
    norms = every_batch_norm(model)
    low = {unit.param_dtype for unit in units if unit.path not in norms} - {None, "float32"}
    return (
        frozenset(unit.path for unit in units if unit.path in norms and unit.param_dtype == "float32")
        if low
        else frozenset()
    )


def _wrap(
    engine: FSDP1 | FSDP2, computes: Precision, paths: frozenset[str], how: HowPrepared, reasons: Reasons
) -> Wrap:
    cfg = Config(engine=engine, precision=computes)
    found = selection(paths, how.model, lambda wrap: frozenset(sharded_units(cfg, how.model, select(wrap, how.model))))
    if found is None:
        fix = "Wrap every batch norm by itself, and nothing that is ignored."
        reasons.add("model", f"no selection of modules means these {len(paths)} units and no others", fix)
    return found or WrapRoot()


def _ignored(how: HowPrepared, engine: FSDP1 | FSDP2, units: frozenset[str], reasons: Reasons) -> tuple[str, ...]:
    """The outermost modules none of whose parameters any unit has taken."""
    model = how.model
    kept = set(packed_params(model)) | (set(scalars(model)) if isinstance(engine, FSDP2) else set())
    whole = set(how.unsharded) - kept
    if not whole:
        return ()
    holders: dict[str, bool] = {}
    aliases = {alias: group[0] for group in model.ties for alias in group}
    for name in (*(param.name for param in model.params), *aliases):
        path = name
        while path := path.rpartition(".")[0]:
            holders[path] = holders.get(path, path not in units) and aliases.get(name, name) in whole | kept
    able = [path for path, all_whole in holders.items() if all_whole]
    outermost = tuple(sorted(path for path in able if path.rpartition(".")[0] not in able))
    named = {param.name for param in model.params} & ignored_params(evolve(engine, ignored=outermost), model)
    if named - kept != whole:
        names = ", ".join(sorted(whole)[:3])
        reasons.add("model", f"units leave out parameters of modules that they shard: {names}", _LEFT_OUT)
    return outermost


_ALONE = "Wrap the model, or say Env.declare(world_size=1) where each rank trains for itself."
_LEFT_OUT = "Leave whole modules out of the units."


KINDS: dict[str, type[BF16 | FP16]] = {"bfloat16": BF16, "float16": FP16}


def _mixed(dtype: str, reduce: str | None, output: str | None, model: ModelFacts) -> Precision:
    low = any(param.requires_grad and param.dtype in LOW for param in model.params)
    return KINDS[dtype](
        reduce_dtype=cast("DType", reduce or dtype),
        output_dtype=cast("DType", output or dtype),
        master_weights=not low,
    )


def of_autocast(how: AutocastOptions | None, model: ModelFacts) -> Precision:
    """Of a model whose forward runs under autocast, or as it is. Gradients are reduced as parameters are stored."""
    if how is None or how.dtype not in KINDS:
        return None
    return _mixed(how.dtype, "float32", how.output_dtype, model)


def of_units(root: UnitFact, others: tuple[UnitFact, ...], model: ModelFacts, reasons: Reasons) -> Precision:
    """Of units of FSDP2; ``others`` without those that stay in float32."""
    reasons.same("model", "the dtype that units compute in", {unit.param_dtype for unit in (root, *others)})
    reasons.same("model", "the dtype that units reduce in", {unit.reduce_dtype for unit in (root, *others)})
    for unit in others:
        if unit.output_dtype not in (None, root.param_dtype):
            reasons.add(f"model.{unit.path}", f"the unit casts its output to {unit.output_dtype}", _OUTPUT)
            break
    return _of_dtypes(root.param_dtype, root.reduce_dtype, root.output_dtype, model, reasons)


def of_flat_units(
    root: FlatUnitOptions, others: tuple[FlatUnitOptions, ...], how: HowPrepared, reasons: Reasons
) -> Precision:
    """Of units of FSDP1; what the model returns is said by the autocast around it."""
    reasons.same("model", "the dtype that units compute in", {unit.param_dtype for unit in (root, *others)})
    reasons.same("model", "the dtype that units reduce in", {unit.reduce_dtype for unit in (root, *others)})
    output = how.autocast.output_dtype if how.autocast else None
    if root.param_dtype is None and how.autocast is not None:
        reasons.add("model", f"autocast computes in {how.autocast.dtype}, and units gather what is stored", _BOTH)
    return _of_dtypes(root.param_dtype, root.reduce_dtype, output, how.model, reasons)


def _of_dtypes(
    dtype: str | None, reduce: str | None, output: str | None, model: ModelFacts, reasons: Reasons
) -> Precision:
    if dtype in KINDS:
        return _mixed(str(dtype), reduce, output, model)
    if dtype not in (None, "float32"):
        reasons.add(
            "model", f"units compute in {dtype}", "Compute in bfloat16 or float16, or as parameters are stored."
        )
    stored = {param.dtype for param in model.params if param.requires_grad}
    for word, value in (("reduce in", reduce), ("return", output), ("compute in", dtype)):
        if value is not None and stored - {value}:
            what = f"units {word} {value} what is stored in {', '.join(sorted(stored - {value}))}"
            reasons.add("model", what, "Compute in 16 bits with precision=BF16(...), or cast nothing.")
    return None


def of_engine(precision: Precision, how: HowPrepared) -> Precision:
    """Return what a DeepSpeed JSON says, with the dtype in which the model returns."""
    if not isinstance(precision, BF16 | FP16):
        return precision
    own = "bfloat16" if isinstance(precision, BF16) else "float16"
    output = how.autocast.output_dtype if how.autocast else None
    return evolve(precision, output_dtype=cast("DType", output or own))


_OUTPUT = "Cast the output of the root alone: MixedPrecisionPolicy(output_dtype=...) there."
_BOTH = "Give the units MixedPrecision(param_dtype=...) too."
