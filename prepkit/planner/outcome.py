"""What a plan leads to: the layout of every parameter, and who owns what is counted, clipped and kept."""

from __future__ import annotations

from typing import assert_never, get_args

from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FP16,
    FSDP1,
    FSDP2,
    MSAMP,
    XLA,
    AsStored,
    Config,
    DeepSpeed,
    Mixed,
    NoClip,
    Single,
    TensorParallel,
)
from prepkit.facts import Facts, ParamFact
from prepkit.plan import Owners
from prepkit.plan.flat_layout import FlatPart
from prepkit.plan.layout import ParamLayout, Placement
from prepkit.planner.pieces import trains
from prepkit.resolve.deepspeed.precision import low_dtype
from prepkit.resolve.deepspeed.working import work_out
from prepkit.resolve.flat_params import flat_parts
from prepkit.resolve.fp8 import convertible
from prepkit.resolve.fsdp1 import flat_units
from prepkit.resolve.fsdp2 import left_whole, unit_paths
from prepkit.resolve.modules import unit_of
from prepkit.resolve.precision import low_precision, stored_dtypes
from prepkit.resolve.tensor_parallel import Held, held, is_cut
from prepkit.steps import Axis


def layout(cfg: Config, facts: Facts, mesh: tuple[Axis, ...]) -> tuple[ParamLayout, ...]:
    """One layout per parameter, in the order of the facts.

    torch ``_fsdp_param.py`` cuts dim 0 over the shard axis, ``_flat_param.py`` each unit end to end.
    """
    if isinstance(cfg.engine, DeepSpeed):
        return _deepspeed_layout(cfg, facts, mesh)
    stored = stored_dtypes(cfg, facts)
    flat: dict[str, FlatPart] = {}
    match cfg.engine:
        case FSDP2():
            owner = unit_of(unit_paths(cfg.engine, facts.model), facts.model)
        case FSDP1():
            owner = unit_of(flat_units(cfg, facts.model), facts.model)
            flat = flat_parts(cfg, facts)
        case Single() | DDP() | TensorParallel() | XLA():
            owner = {}
        case _:
            assert_never(cfg.engine)
    cuts = held(cfg, facts.model) if is_cut(cfg, facts.model, facts.env) else {}
    lies = {param.name: _placements(cfg, mesh, param, cuts.get(param.name)) for param in facts.model.params}
    if isinstance(cfg.engine, FSDP2):
        lies |= dict.fromkeys(left_whole(facts.model), ())
    scaled = _scaled(cfg, facts)
    return tuple(
        ParamLayout(
            name=param.name,
            shape=param.shape,
            dtype="float16" if param.name in scaled else stored[param.name],
            cls="ScalingParameter" if param.name in scaled else "DTensor" if lies[param.name] else param.cls,
            placements=lies[param.name],
            unit=owner.get(param.name, ""),
            requires_grad=param.requires_grad,
            flat=flat.get(param.name),
        )
        for param in facts.model.params
    )


_CAST = ("float64", "float32", "bfloat16", "float16")
"""What ``Module.bfloat16()`` and ``Module.half()`` cast."""


def _deepspeed_layout(cfg: Config, facts: Facts, mesh: tuple[Axis, ...]) -> tuple[ParamLayout, ...]:
    """Every floating parameter in the section's dtype; at ZeRO-3 an equal padded part of each on every rank."""
    low = low_dtype(cfg.precision)
    kinds: dict[str, Placement] = {"shard": "partition", "replicate": "replicate", "tensor": "split"}
    found = tuple(kinds[axis.name] for axis in mesh)
    placements = found if {"partition", "split"} & set(found) else ()
    scaled = _scaled(cfg, facts)
    return tuple(
        ParamLayout(
            name=param.name,
            shape=param.shape,
            dtype="float16" if param.name in scaled else low if low and param.dtype in _CAST else param.dtype,
            cls="ScalingParameter" if param.name in scaled else "Parameter",
            placements=placements,
            unit="",
            requires_grad=param.requires_grad,
        )
        for param in facts.model.params
    )


def _deepspeed_owners(cfg: Config, facts: Facts) -> Owners:
    stepper = work_out(cfg, facts).scheduler
    mine = "prepkit" if facts.scheduler is not None else "nobody"
    return Owners(
        accumulation="DeepSpeed",
        accumulation_steps=cfg.accumulation,
        clipping="nobody" if isinstance(cfg.clip, NoClip) else "DeepSpeed",
        clip=cfg.clip,
        scheduler=mine if stepper == "outside" else "DeepSpeed",
        scheduler_ticks=cfg.scheduler_ticks,
        master_weights=_deepspeed_masters(cfg),
        loss_scaling="DeepSpeed" if isinstance(cfg.precision, FP16) and trains(cfg) else "nobody",
    )


def _deepspeed_masters(cfg: Config) -> str:
    low = low_dtype(cfg.precision)
    if not trains(cfg):
        return "none: nothing is trained"
    if isinstance(cfg.precision, FP8) and isinstance(cfg.precision.backend, MSAMP):
        return "none: MS-AMP keeps scaled float16 weights"
    if low is None:
        return "the parameters themselves, as they are stored"
    if isinstance(cfg.precision, Mixed) and not cfg.precision.master_weights:
        return f"none: everything is stepped in {low}"
    return f"DeepSpeed's float32 copies, made from the {low} parameters"


def _placements(cfg: Config, mesh: tuple[Axis, ...], param: ParamFact, cut: Held | None) -> tuple[Placement, ...]:
    """One word per axis, or none for a plain parameter."""
    if isinstance(cfg.engine, TensorParallel):
        if cut is not None:
            return (cut,)
        return tuple(word for word in get_args(Placement) if (word,) == param.placements)  # of one that arrived cut
    if not isinstance(cfg.engine, FSDP2):
        return ()
    words: dict[str, Placement] = {
        "replicate": "replicate",
        "shard": "strided(0)" if cut == "shard(0)" else "shard(0)",  # the tensor axis cuts first
        "tensor": cut or "off-mesh",
    }
    return tuple(words[axis.name] for axis in mesh)


def _scaled(cfg: Config, facts: Facts) -> set[str]:
    """Weights that MS-AMP turns into scaled float16 (msamp ``FP8Linear``)."""
    if not isinstance(cfg.precision, FP8) or not isinstance(cfg.precision.backend, MSAMP):
        return set()
    return {f"{path}.weight" for path in convertible(cfg, facts.model)}


def owners(cfg: Config, facts: Facts) -> Owners:
    """Who does what between two optimizer steps. prepkit owns all of it for the engines of torch itself."""
    if isinstance(cfg.engine, DeepSpeed):
        return _deepspeed_owners(cfg, facts)
    return Owners(
        accumulation="prepkit",
        accumulation_steps=cfg.accumulation,
        clipping="nobody" if isinstance(cfg.clip, NoClip) else "prepkit",
        clip=cfg.clip,
        scheduler="prepkit" if facts.scheduler is not None else "nobody",
        scheduler_ticks=cfg.scheduler_ticks,
        master_weights=_master_weights(cfg, facts),
        loss_scaling="prepkit" if isinstance(cfg.precision, FP16) and trains(cfg) else "nobody",
    )


def _master_weights(cfg: Config, facts: Facts) -> str:
    low = low_precision(facts)
    if not trains(cfg):
        return "none: nothing is trained"
    match cfg.precision:
        case FP8(backend=MSAMP()):
            return "none: MS-AMP keeps scaled float16 weights"
        case BF16(master_weights=True) | FP16(master_weights=True) | FP8(master_weights=True):
            return "the parameters themselves, stored in float32"
        case BF16() | FP16() | FP8() | AsStored():
            if low:
                return f"none: {len(low)} trainable parameters are stepped in {low[0].dtype}"
            return "the parameters themselves, as they are stored"
        case _:
            assert_never(cfg.precision)
