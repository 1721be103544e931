"""Configs with facts for which no rule has an error, by construction: facts first, then a config that suits them."""

from __future__ import annotations

from attrs import evolve
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from prepkit import config as c
from prepkit.config import Config, Intent
from prepkit.facts import Facts
from prepkit.plan import Plan
from prepkit.resolve.mesh import axes, size_of
from prepkit.resolve.modules import select
from prepkit.resolve.resolved import Resolved
from prepkit.rules import RULES
from prepkit.testing.strategies.configs import bf16s, checkpointings, clips, origins
from prepkit.testing.strategies.deepspeed import (
    can_use_deepspeed,
    completed_for_deepspeed,
    facts_for_deepspeed,
    legal_deepspeeds,
)
from prepkit.testing.strategies.facts import facts as any_facts
from prepkit.testing.strategies.facts import fitting_wraps
from prepkit.testing.strategies.fp8 import facts_for_fp8, legal_fp8
from prepkit.testing.strategies.fsdp1 import legal_fsdp1, replaces_parameters, without_refused_accumulation
from prepkit.testing.strategies.optimizers import optimizers_for
from prepkit.testing.strategies.sharded import can_arrive, sharded_for
from prepkit.testing.strategies.suited import (
    backends_for,
    compiles_for,
    engine_options,
    engines_for,
    entry_points_for,
    loaders_for,
    meshes_for,
    precisions_for,
    tp_plans_for,
    weights_for,
)

_OFTEN = st.sampled_from((True, True, True, False))
_SELDOM = st.sampled_from((False, False, False, True))
_OVERRIDABLE = tuple(rule.id for rule in RULES if rule.overridable)


def plans() -> SearchStrategy[Plan]:
    """Plans of what ``legal`` draws."""
    from prepkit.planner import plan  # planner and testing are siblings: only this function needs it

    return legal().map(lambda drawn: plan(*drawn).unwrap())


@st.composite
def legal(draw: st.DrawFn, *, float8: bool | None = None) -> tuple[Config, Facts]:
    """Configs with facts, without an error finding; warnings may be there. ``float8``: wherever the model allows it."""
    facts = draw(any_facts(flawed=False))
    float8 = draw(st.sampled_from((False, False, True))) if float8 is None else float8
    zero = not float8 and draw(_SELDOM)
    facts = draw(facts_for_fp8(facts) if float8 else facts_for_deepspeed(facts)) if float8 or zero else facts
    cfg = draw(fitting(facts, float8=float8, zero=zero))
    return cfg, sharded_for(cfg, facts) if can_arrive(cfg, facts) and draw(_SELDOM) else facts


@st.composite
def fitting(draw: st.DrawFn, facts: Facts, *, float8: bool = False, zero: bool = False) -> Config:
    """Configs that are legal for these facts, whose modules are called as those of ``tiny_model``.

    ``float8``, ``zero``: with it, or with DeepSpeed, for facts that suit it.
    """
    device = draw(st.sampled_from((None, facts.env.device, *([] if float8 or zero else ["cpu"]))))
    precision = draw(bf16s(invalid=False) if float8 else precisions_for(facts, device))
    zero = zero and can_use_deepspeed(facts, precision)
    trains = facts.optimizer is not None or (any(p.requires_grad for p in facts.model.params) and draw(_OFTEN))
    intent = Intent.TRAINING if trains else Intent.INFERENCE
    kind = c.DeepSpeed if zero else draw(st.sampled_from(engines_for(facts, precision, intent, float8=float8)))
    mesh = draw(st.sampled_from(meshes_for(kind, facts.env.world_size, float8=float8)))
    tensor_ranks = 1 if zero else size_of("tensor", axes(Config(engine=kind(), mesh=mesh), facts.env) or ())
    if zero:
        engine: c.Engine = draw(legal_deepspeeds(facts, trains))
    elif kind is c.FSDP1:
        engine = draw(legal_fsdp1(facts, Config(precision=precision, mesh=mesh, device=device, intent=intent)))
    else:
        engine = draw(engine_options(kind, facts, mesh, device or facts.env.device))
    many_xla = isinstance(engine, c.XLA) and facts.env.world_size > 1
    blocks = [wrap for wrap in fitting_wraps(facts.model) if select(wrap, facts.model)]
    uncompiled = replaces_parameters(engine)
    compiled = draw(st.just(None) if uncompiled else compiles_for(facts.env, blocks, engine))
    wrapped: SearchStrategy[c.ActivationCheckpointing] = st.just(None)
    if blocks:
        how = checkpointings(st.sampled_from(blocks), invalid=False, compiled=compiled is not None)
        wrapped = how.map(lambda one: _some_block(one, facts))
    cfg = Config(
        engine=engine,
        mesh=mesh,
        tp_plan=draw(tp_plans_for(facts.model, tensor_ranks, asked=kind is c.TensorParallel or tensor_ranks > 1)),
        precision=precision,
        compile=compiled,
        checkpointing=draw(wrapped),
        intent=intent,
        weights=draw(st.just(None) if float8 else weights_for(facts, engine)),
        device=device,
        keep_device_map=draw(st.booleans()),
        backend=draw(backends_for(engine, device or facts.env.device)),
        timeout_s=draw(st.floats(1.0, 3600.0)),
        optimizer=draw(optimizers_for(facts, Config(engine=engine, mesh=mesh, precision=precision)))
        if trains and facts.optimizer is None and draw(_OFTEN)
        else None,
        accumulation=draw(st.integers(1, 8)),
        average_each=False if isinstance(engine, c.DeepSpeed | c.XLA) else draw(st.booleans()),
        clip=draw(clips(invalid=False)),
        scheduler_ticks=draw(st.integers(0, 4)),
        total_steps=draw(st.none() | st.integers(1, 4000)),
        loaders=draw(loaders_for(facts, zero=zero) if not many_xla else st.just(c.KeepLoaders())),
        entry_points=draw(entry_points_for(facts.model)),
        origins=draw(origins()),
        overrides=tuple(draw(st.lists(st.sampled_from(_OVERRIDABLE), max_size=2, unique=True))),
    )
    if isinstance(engine, c.FSDP1):
        cfg = without_refused_accumulation(cfg, facts)
    if isinstance(engine, c.DeepSpeed):
        cfg = completed_for_deepspeed(cfg, facts, draw)
    cfg = draw(legal_fp8(cfg, facts)) if float8 else cfg
    return _with_global_batch(cfg, facts, draw)


def _with_global_batch(cfg: c.Config, facts: Facts, draw: st.DrawFn) -> c.Config:
    """Sometimes the samples of the drawn window in the place of, or beside, its number of micro-batches."""
    whole = Resolved(cfg=cfg, facts=facts).batch.at_once
    if whole is None or isinstance(cfg.engine, c.DeepSpeed) or not draw(_OFTEN):
        return cfg
    written = cfg.accumulation if draw(st.booleans()) else None
    return evolve(cfg, global_batch=whole * (cfg.accumulation or 1), accumulation=written)


def _some_block(how: c.ActivationCheckpointing, facts: Facts) -> c.ActivationCheckpointing:
    """Every n-th block, where there are n of them."""
    if isinstance(how, c.CheckpointBlocks) and how.every > len(select(how.blocks, facts.model)):
        return evolve(how, every=1)
    return how
