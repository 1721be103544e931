"""Changes of a config that make a rank hold less: the candidates of ``budget``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import assert_never

from attrs import evolve, frozen

from prepkit.config import (
    BF16,
    DDP,
    FSDP1,
    FSDP2,
    XLA,
    AsStored,
    Config,
    DeepSpeed,
    Engine,
    KeepOnDevice,
    Mesh,
    OffloadToCPU,
    Single,
    TensorParallel,
    WrapBlocks,
)
from prepkit.plan import Plan
from prepkit.predict.zero_inputs import REDUCE_BUCKET, zero_of
from prepkit.resolve.deepspeed.data import stage as stage_of
from prepkit.resolve.deepspeed.edit import offloaded, offloads, restaged, with_zero
from prepkit.resolve.mesh import size_of
from prepkit.rules.fsdp1_mesh import strategy


@frozen
class Move:
    """One change of a config that may make a rank hold less."""

    about: str
    """The field; two moves about one field exclude each other."""
    change: Callable[[Config], Config | None]
    """None: does not apply."""
    caveat: str = ""
    series: str = ""
    """Moves of one series go further and further: of those that fit beside the same others the first one is meant."""


def moves(plan: Plan) -> Iterator[Move]:
    """Every change that might help; those about the same field exclude each other.

    A DeepSpeed plan stays one: its stage, its offloads and its bucket are changed, not its engine.
    """
    if isinstance(plan.config.engine, DeepSpeed):
        yield from zero_moves(plan)
        return
    for mesh in _meshes(plan):
        yield Move("mesh", lambda cfg, mesh=mesh: _sharded(cfg, mesh))  # type: ignore[misc]
    yield Move("offload", _offloaded)
    yield Move("wrap", _wrapped)
    yield Move("reshard", _resharded)
    yield Move("view", _viewed)
    yield from _narrowed()
    yield Move("accumulation", _at_once, "the same global batch needs larger micro-batches or more ranks")


def zero_moves(plan: Plan) -> Iterator[Move]:
    """Higher stages; optimizer state, and at stage 3 parameters, in host memory; a smaller reduce bucket.

    Halves of the bucket down to a hundredth of DeepSpeed's default: smaller ones send a model in thousands of calls.
    """
    for stage in (1, 2, 3):
        yield Move("stage", lambda cfg, stage=stage: _staged(cfg, stage))  # type: ignore[misc]
    yield Move("offload optimizer", lambda cfg: _away(cfg, "optimizer"))
    yield Move("offload param", lambda cfg: _away(cfg, "param"))
    zero = zero_of(plan)
    size = zero.bucket // 2 if zero else 0
    while size >= REDUCE_BUCKET // 100:
        yield Move("bucket", lambda cfg, size=size: _bucketed(cfg, size), series="bucket")  # type: ignore[misc]
        size //= 2
    yield from _narrowed()


def _narrowed() -> Iterator[Move]:
    yield Move("precision", _halved, "computes in bfloat16")
    yield Move("precision", _reduced, "gradients are averaged in bfloat16")


def _staged(cfg: Config, stage: int) -> Config | None:
    engine = cfg.engine
    if not isinstance(engine, DeepSpeed) or stage <= stage_of(engine):
        return None
    return evolve(cfg, engine=restaged(engine, stage))


def _away(cfg: Config, kind: str) -> Config | None:
    engine = cfg.engine
    if not isinstance(engine, DeepSpeed) or offloads(engine, kind):
        return None
    least = 3 if kind == "param" else 1
    return evolve(cfg, engine=offloaded(engine, kind)) if stage_of(engine) >= least else None


def _bucketed(cfg: Config, size: int) -> Config | None:
    engine = cfg.engine
    if not isinstance(engine, DeepSpeed):
        return None
    return evolve(cfg, engine=with_zero(engine, "reduce_bucket_size", size))


def _meshes(plan: Plan) -> Iterator[Mesh | None]:
    """More shards per copy, the layers cut as they are; where they are cut over all ranks, over fewer."""
    world, now, parts = plan.world_size, size_of("shard", plan.mesh), size_of("tensor", plan.mesh)
    if isinstance(plan.config.engine, TensorParallel):
        yield from (Mesh(shard=size, tensor=world // size) for size in range(2, world) if world % size == 0)
        return
    ranks = world // parts
    for size in range(now + 1, ranks + 1):
        if ranks % size == 0:
            yield None if size == world else Mesh(replicate=ranks // size, shard=size, tensor=parts)


def _sharded(cfg: Config, mesh: Mesh | None) -> Config | None:
    """More shards per copy; from an engine that shards nothing, FSDP2."""
    match cfg.engine:
        case FSDP1(sharding="NO_SHARD") if mesh is None:
            engine: Engine = evolve(cfg.engine, sharding="FULL_SHARD")
        case FSDP1(sharding="NO_SHARD"):
            engine = evolve(cfg.engine, sharding="HYBRID_SHARD")
        case FSDP1():
            engine = strategy(cfg.engine, hybrid=mesh is not None)
        case FSDP2():
            engine = cfg.engine
        case Single() | DDP() | TensorParallel() | XLA() | DeepSpeed():
            engine = FSDP2()
        case _:
            assert_never(cfg.engine)
    return evolve(cfg, engine=engine, mesh=mesh)


def _offloaded(cfg: Config) -> Config | None:
    match cfg.engine:
        case FSDP1(offload=False):
            return evolve(cfg, engine=evolve(cfg.engine, offload=True))
        case FSDP2(offload=KeepOnDevice()):
            return evolve(cfg, engine=evolve(cfg.engine, offload=OffloadToCPU()))
        case Single() | DDP() | FSDP1() | FSDP2() | TensorParallel() | XLA() | DeepSpeed():
            return None
        case _:
            assert_never(cfg.engine)


def _wrapped(cfg: Config) -> Config | None:
    engine = cfg.engine
    return evolve(cfg, engine=evolve(engine, wrap=WrapBlocks())) if isinstance(engine, FSDP1 | FSDP2) else None


def _resharded(cfg: Config) -> Config | None:
    match cfg.engine:
        case FSDP1(sharding="SHARD_GRAD_OP"):
            return evolve(cfg, engine=evolve(cfg.engine, sharding="FULL_SHARD"))
        case FSDP1(sharding="HYBRID_SHARD_ZERO2"):
            return evolve(cfg, engine=evolve(cfg.engine, sharding="HYBRID_SHARD"))
        case FSDP2():
            return evolve(cfg, engine=evolve(cfg.engine, reshard_after_forward=True))
        case Single() | DDP() | FSDP1() | TensorParallel() | XLA() | DeepSpeed():
            return None
        case _:
            assert_never(cfg.engine)


def _viewed(cfg: Config) -> Config | None:
    engine = cfg.engine
    return evolve(cfg, engine=evolve(engine, gradient_as_bucket_view=True)) if isinstance(engine, DDP) else None


def _halved(cfg: Config) -> Config | None:
    return evolve(cfg, precision=BF16()) if isinstance(cfg.precision, AsStored) else None


def _reduced(cfg: Config) -> Config | None:
    precision = cfg.precision
    if not isinstance(precision, BF16) or not isinstance(cfg.engine, FSDP1 | FSDP2 | DeepSpeed):
        return None
    return evolve(cfg, precision=evolve(precision, reduce_dtype="bfloat16"))


def _at_once(cfg: Config) -> Config | None:
    accumulates = cfg.accumulation not in (None, 1) or cfg.global_batch is not None
    if not accumulates or not isinstance(cfg.engine, FSDP1 | FSDP2):
        return None
    return evolve(cfg, accumulation=1, global_batch=None)
