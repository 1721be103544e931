"""Models that arrive sharded: at random, and as a config would have sharded them."""

from __future__ import annotations

from attrs import evolve
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from prepkit.config import FP8, FSDP2, BroadcastWeights, CheckpointBlocks, Config, OffloadToCPU
from prepkit.facts import Facts, ModelFacts, UnitFact
from prepkit.resolve.modules import select
from prepkit.resolve.resolved import Resolved
from prepkit.testing.tiny import arrived


def sharded_models(model: ModelFacts) -> SearchStrategy[ModelFacts]:
    """The model cut over a few ranks, with or without a root, whatever config and environment say."""
    roots = st.builds(
        UnitFact,
        path=st.just(""),
        ranks=st.sampled_from((1, 2, 8)),
        copies=st.integers(1, 2),
        reshard_after_forward=st.booleans(),
        param_dtype=st.sampled_from((None, "bfloat16")),
        reduce_dtype=st.sampled_from((None, "float32")),
        offload=st.booleans(),
    )
    paths = st.sets(st.sampled_from(("embed", "norm", "head"))).map(lambda drawn: tuple(sorted(drawn)))
    sharded = st.builds(lambda root, paths: arrived(model, paths=paths, root=root), roots, paths)
    return sharded | sharded.map(lambda model: evolve(model, units=model.units[:-1]))


def can_arrive(cfg: Config, facts: Facts) -> bool:
    """Return whether a model that was sharded as this legal config says can be prepared with it."""
    resolved = Resolved(cfg=cfg, facts=facts)
    return (
        isinstance(cfg.engine, FSDP2)
        and not cfg.engine.ignored
        and not isinstance(cfg.checkpointing, CheckpointBlocks)
        and not isinstance(cfg.precision, FP8)
        and not isinstance(cfg.weights, BroadcastWeights)
        and not resolved.master_weights
        and resolved.axis_size("tensor") == 1
    )


def sharded_for(cfg: Config, facts: Facts) -> Facts:
    """The facts with the model as FSDP2 would have left it."""
    assert isinstance(cfg.engine, FSDP2), "can_arrive has asked"
    resolved = Resolved(cfg=cfg, facts=facts)
    dtypes = resolved.compute_dtypes
    root = UnitFact(
        path="",
        ranks=resolved.axis_size("shard"),
        copies=resolved.axis_size("replicate"),
        reshard_after_forward=False,
        param_dtype=dtypes.param if dtypes else None,
        reduce_dtype=dtypes.reduce if dtypes else None,
        output_dtype=dtypes.output if dtypes else None,
        offload=isinstance(cfg.engine.offload, OffloadToCPU),
    )
    return evolve(facts, model=arrived(facts.model, paths=select(cfg.engine.wrap, facts.model), root=root))
