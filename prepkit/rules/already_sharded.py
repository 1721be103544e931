"""A model that ``fully_shard`` has made units of already: FSDP2 leaves it as it is, so the config has to agree."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.config import (
    FP8,
    FSDP2,
    BroadcastWeights,
    CheckpointBlocks,
    OffloadToCPU,
)
from prepkit.config.precision import as_typed
from prepkit.facts import ModelFacts, UnitFact
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.resolve.engines import engine_of
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Check, Hit, Rule


def _all(*checks: Check) -> Check:
    """Return what the checks find, one after the other, where the model arrives sharded."""

    def check(resolved: Resolved) -> Iterator[Hit]:
        if resolved.arrives_sharded:
            for inner in checks:
                yield from inner(resolved)

    return check


def _holding(model: ModelFacts) -> tuple[UnitFact, ...]:
    return tuple(unit for unit in model.units if unit.ranks)


def _called(unit: UnitFact) -> str:
    return f"`{unit.path}`" if unit.path else "the root"


# --- what stands ---------------------------------------------------------------------------------------------------


def _no_root(resolved: Resolved) -> Iterator[Hit]:
    names = [unit.path for unit in resolved.facts.model.units]
    if "" not in names:
        what = f"{some(names)} {'is a unit' if len(names) == 1 else 'are units'}, and the model itself is none."
        yield Hit("model", what, "Call fully_shard(model) after its modules.")


def _placed_otherwise(resolved: Resolved) -> Iterator[Hit]:
    copies = max((unit.copies for unit in resolved.facts.model.units), default=1)
    placed = ("replicate", "shard(0)") if copies > 1 else ("shard(0)",)
    odd = [param for param in resolved.facts.model.params if param.cls == "DTensor" and param.placements != placed]
    if odd:
        lie, names = ", ".join(odd[0].placements), some([param.name for param in odd])
        what = f"{count(len(odd), 'parameter')} lie otherwise than cut in dimension 0 over one axis: {lie} ({names})."
        fix = "Call fully_shard without shard_placement_fn, on whole layers, over a mesh without axes of size 1."
        yield Hit(at(odd[0].name), what, fix)


def _two_policies(resolved: Resolved) -> Iterator[Hit]:
    first, *others = resolved.facts.model.units
    for unit in others:
        if (unit.param_dtype, unit.reduce_dtype) != (first.param_dtype, first.reduce_dtype):
            what = f"{_called(first)} is gathered in {first.param_dtype} and reduced in {first.reduce_dtype}, "
            what += f"{_called(unit)} in {unit.param_dtype} and {unit.reduce_dtype}; a plan has one of each."
            yield Hit(at(unit.path), what, "Give every fully_shard the same MixedPrecisionPolicy dtypes.")
            return


# --- against the config --------------------------------------------------------------------------------------------


def _mesh(resolved: Resolved) -> Iterator[Hit]:
    facts = resolved.facts
    asked = (resolved.axis_size("replicate"), resolved.axis_size("shard")) if resolved.mesh else None
    for unit in _holding(facts.model):
        if (unit.copies, unit.ranks) != asked:
            says = f"makes {_lying(*asked)}" if asked else f"does not fit {count(facts.env.world_size, 'rank')}"
            what = f"{_called(unit)} stands as {_lying(unit.copies, unit.ranks)}, and the mesh of the config {says}."
            yield Hit("config.mesh", what, f"Write mesh=Mesh(replicate={unit.copies}, shard={unit.ranks}).")
            return


def _lying(copies: int, ranks: int) -> str:
    return f"{copies} {'copy' if copies == 1 else 'copies'} over {count(ranks, 'rank')}"


def _precision(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    root = resolved.facts.model.units[-1]
    dtypes = resolved.compute_dtypes
    param, reduce, output = (dtypes.param, dtypes.reduce, dtypes.output) if dtypes else (None, None, None)
    stands = (root.param_dtype, root.reduce_dtype or root.param_dtype, root.output_dtype or root.param_dtype)
    if stands[0] != param or (param and stands != (param, reduce, output)):
        cast = f"gathered in {stands[0]}, reduced in {stands[1]} and returned in {stands[2]}"
        what = (
            f"precision={as_typed(cfg.precision)} is asked for, and the units are {cast if stands[0] else 'not cast'}."
        )
        yield Hit("config.precision", what, f"Write precision={_typed(stands)}.")
    engine = engine_of(cfg, FSDP2)
    if param and root.cast_forward_inputs != engine.cast_forward_inputs:
        does = "cast" if root.cast_forward_inputs else "do not cast"
        what = f"The units {does} their inputs, and the config says otherwise."
        yield Hit("config.engine.cast_forward_inputs", what, f"Write cast_forward_inputs={root.cast_forward_inputs}.")


def _typed(stands: tuple[str | None, str | None, str | None]) -> str:
    kind = {"bfloat16": "BF16", "float16": "FP16"}.get(stands[0] or "", "None")
    names = zip(("reduce_dtype", "output_dtype"), stands[1:], strict=True)
    given = [f'{name}="{dtype}"' for name, dtype in names if dtype != "float32"]
    return f"{kind}({', '.join(given)})" if kind != "None" else kind


def _offload(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    engine = engine_of(cfg, FSDP2)
    asked = isinstance(engine.offload, OffloadToCPU)
    if any(unit.offload != asked for unit in _holding(resolved.facts.model)):
        where = "on the device" if asked else "in host memory"
        what = f"offload={engine.offload} is asked for, and the shards are {where}."
        fix = f"Write offload={None if asked else 'OffloadToCPU()'}."
        yield Hit("config.engine.offload", what, fix)


# --- what the config asks for and comes too late ---------------------------------------------------------------------


def _wrappers(resolved: Resolved) -> Iterator[Hit]:
    if isinstance(resolved.cfg.checkpointing, CheckpointBlocks):
        what = "A checkpointed block becomes a unit together with its wrapper, and the blocks are units already."
        yield Hit("config.checkpointing", what)


def _values(resolved: Resolved) -> Iterator[Hit]:
    if params := resolved.master_weights:
        what = f"{count(len(params), 'trained parameter')} sharded in 16 bits ({some([p.name for p in params])})"
        fix = "Call model.float() before it is sharded, or write master_weights=False."
        yield Hit(at(params[0].name), f"{what}; float32 master weights are made before that.", fix)
    if isinstance(resolved.cfg.weights, BroadcastWeights):
        yield Hit("config.weights", "Rank 0 is to send the whole model, and of a sharded one it holds a part.")


def _layers(resolved: Resolved) -> Iterator[Hit]:
    if isinstance(resolved.cfg.precision, FP8):
        yield Hit("config.precision", "float8 is made of whole layers, and these are sharded already.")
    if resolved.axis_size("tensor") > 1:
        yield Hit("config.mesh.tensor", "Layers are cut before they are sharded, and these are sharded already.")


# --- what the config asks for and stands otherwise -------------------------------------------------------------------


def _kept(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    engine = engine_of(cfg, FSDP2)
    paths, asked = resolved.units, engine.reshard_after_forward
    if set(paths) != set(resolved.selected[engine.wrap]):
        what = f"{engine.wrap} would select other units than those that stand: {some(paths) or 'the root alone'}."
        yield Hit("config.engine.wrap", what)
    cut = {p.name for p in resolved.facts.model.params if p.cls == "DTensor"}
    if names := [p.name for p in resolved.facts.model.params if p.name in cut & resolved.ignored_params]:
        yield Hit("config.engine.ignored", f"{some(names)} {'is' if len(names) == 1 else 'are'} sharded already.")
    odd = [unit for unit in _holding(resolved.facts.model) if unit.path and unit.reshard_after_forward != asked]
    if odd:
        what = f"{asked} is asked for; {count(len(odd), 'unit')} ({some([unit.path for unit in odd])}) stand otherwise."
        yield Hit("config.engine.reshard_after_forward", what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="sharded.not-to-plan",
        summary="A model that arrives sharded by fully_shard is sharded whole, in dimension 0, with one policy.",
        check=_all(_no_root, _placed_otherwise, _two_policies),
        fix="Pass the model before it is sharded.",
        overridable=False,
        source=("M2-1", "DDP-2"),
    ),
    Rule(
        id="sharded.differs",
        summary="A model that arrives sharded lies and computes as the config says.",
        check=_all(_mesh, _precision, _offload),
        fix="Write what stands, or pass the model before it is sharded.",
        overridable=False,
        source=("M2-1", "M2-4"),
    ),
    Rule(
        id="sharded.too-late",
        summary="Nothing is asked for that has to be done before a model is sharded.",
        check=_all(_wrappers, _values, _layers),
        fix="Pass the model before it is sharded, or leave this out.",
        overridable=False,
        source=("M2-1", "P2-5", "M2-16"),
    ),
    Rule(
        id="sharded.kept",
        summary="A model that arrives sharded has the units that the config would make.",
        check=_all(_kept),
        fix="What stands is kept; write the same into config.engine, or pass the model before it is sharded.",
        severity=Severity.WARNING,
        source=("M2-1", "M2-10"),
    ),
)
"""Reporting order: what stands there, then what the config says of it."""
