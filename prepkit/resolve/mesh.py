"""How the ranks are laid out: the axes of the device mesh, and who reads the same data."""

from __future__ import annotations

from typing import assert_never

from prepkit.config import (
    DDP,
    FSDP1,
    FSDP2,
    XLA,
    Config,
    DeepSpeed,
    Mesh,
    Single,
    TensorParallel,
)
from prepkit.facts import Env
from prepkit.resolve.deepspeed.data import stage, tensor_parallel
from prepkit.steps import Axis


def axes(cfg: Config, env: Env) -> tuple[Axis, ...] | None:
    """Axes of the device mesh with their sizes; None where they do not multiply to the world size.

    DDP has one axis, ``replicate``, and TensorParallel one, ``tensor``. FSDP2 has ``shard``, with ``replicate`` before
    it and ``tensor`` behind it where they exceed 1. FSDP1 likewise, without ``tensor``; under ``NO_SHARD`` as DDP.
    XLA is as DDP. DeepSpeed has ``shard`` at ZeRO-3, else ``replicate``, and ``tensor`` behind it where it splits
    the model.
    """
    match cfg.engine:
        case Single():
            return ()
        case XLA():
            return (Axis(name="replicate", size=env.world_size),)
        case DDP():
            mesh = cfg.mesh or Mesh(replicate=-1, shard=1)
        case FSDP2():
            mesh = cfg.mesh or Mesh()
        case FSDP1():
            mesh = cfg.mesh or _hybrid_default(cfg.engine, env)
        case TensorParallel():
            mesh = cfg.mesh or Mesh(shard=1, tensor=-1)
        case DeepSpeed():
            return _deepspeed_axes(cfg.engine, env.world_size)
        case _:
            assert_never(cfg.engine)
    sizes = _resolve((mesh.replicate, mesh.shard, mesh.tensor), env.world_size)
    if sizes is None:
        return None
    replicate, shard, tensor = sizes
    if isinstance(cfg.engine, DDP) or (isinstance(cfg.engine, FSDP1) and cfg.engine.sharding == "NO_SHARD"):
        return (Axis(name="replicate", size=replicate),)
    if isinstance(cfg.engine, TensorParallel):
        return (Axis(name="tensor", size=tensor),)
    copies = (Axis(name="replicate", size=replicate),) if replicate > 1 else ()
    cuts = (Axis(name="tensor", size=tensor),) if tensor > 1 else ()
    return (*copies, Axis(name="shard", size=shard), *cuts)


def size_of(name: str, found: tuple[Axis, ...]) -> int:
    """Size of the axis with this name; 1 where there is none."""
    return next((axis.size for axis in found if axis.name == name), 1)


def readers(cfg: Config, env: Env) -> int:
    """Number of parts that the data is divided into: ranks that differ in their tensor coordinate only share one."""
    return env.world_size // size_of("tensor", axes(cfg, env) or ())


def _deepspeed_axes(engine: DeepSpeed, world: int) -> tuple[Axis, ...] | None:
    split = tensor_parallel(engine)
    if world % split:
        return None
    data = Axis(name="shard" if stage(engine) == 3 else "replicate", size=world // split)
    return (data, Axis(name="tensor", size=split)) if split > 1 else (data,)


def _hybrid_default(engine: FSDP1, env: Env) -> Mesh:
    """Torch's own default: hybrid strategies shard inside a node, where its size is known; NO_SHARD never shards."""
    if engine.sharding == "NO_SHARD":
        return Mesh(replicate=-1, shard=1)
    if engine.sharding.startswith("HYBRID") and env.per_node and env.world_size % env.per_node == 0:
        return Mesh(replicate=-1, shard=env.per_node)
    return Mesh()


def _resolve(sizes: tuple[int, int, int], world: int) -> tuple[int, int, int] | None:
    fixed = 1
    for size in sizes:
        fixed *= size if size != -1 else 1
    free = sizes.count(-1)
    if any(size < 1 and size != -1 for size in sizes) or free > 1 or (world % fixed if free else fixed != world):
        return None
    replicate, shard, tensor = (world // fixed if size == -1 else size for size in sizes)
    return replicate, shard, tensor
