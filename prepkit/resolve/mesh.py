"""How the ranks are laid out: the axes of the device mesh, and who reads the same data."""

from __future__ import annotations

from math import prod

from prepkit.config import FSDP1, Config, DeepSpeed, Mesh
from prepkit.config.engines import AXES
from prepkit.facts import Env
from prepkit.resolve.deepspeed.data import stage, tensor_parallel
from prepkit.resolve.engines import traits
from prepkit.steps import Axis


def axes(cfg: Config, env: Env) -> tuple[Axis, ...] | None:
    """Axes of the device mesh with their sizes; None where they do not multiply to the world size.

    Each engine has its main axis, also with size 1, and those of its other axes that exceed 1, in the order of ``AXES``
    (``resolve/engines.py``). FSDP1 is as DDP under ``NO_SHARD``. DeepSpeed has ``shard`` at ZeRO-3, else ``replicate``,
    and ``tensor`` behind it where its own config splits the model.
    """
    if isinstance(cfg.engine, DeepSpeed):
        return _deepspeed_axes(cfg.engine, env.world_size)
    engine = traits(cfg)
    main, others = engine.main_axis, engine.other_axes
    if isinstance(cfg.engine, FSDP1) and cfg.engine.sharding == "NO_SHARD":
        main, others = "replicate", ()
    if main is None:
        return ()
    given = cfg.mesh if engine.reads_mesh else None
    sizes = _sizes(given or _hybrid_default(cfg, env) or _all_on(main), env.world_size)
    if sizes is None:
        return None
    names = (axis.name for axis in AXES)
    return tuple(
        Axis(name=name, size=sizes[name]) for name in names if name == main or (name in others and sizes[name] > 1)
    )


def size_of(name: str, mesh: tuple[Axis, ...]) -> int:
    """Size of the axis with this name; 1 where there is none."""
    return next((axis.size for axis in mesh if axis.name == name), 1)


def _deepspeed_axes(engine: DeepSpeed, world: int) -> tuple[Axis, ...] | None:
    split = tensor_parallel(engine)
    if world % split:
        return None
    data = Axis(name="shard" if stage(engine) == 3 else "replicate", size=world // split)
    return (data, Axis(name="tensor", size=split)) if split > 1 else (data,)


def _hybrid_default(cfg: Config, env: Env) -> Mesh | None:
    """Torch's own default for FSDP1: hybrid strategies shard inside a node, where its size is known."""
    hybrid = isinstance(cfg.engine, FSDP1) and cfg.engine.sharding.startswith("HYBRID")
    if hybrid and env.per_node and env.world_size % env.per_node == 0:
        return Mesh(replicate=-1, shard=env.per_node)
    return None


def _all_on(main: str) -> Mesh:
    """The mesh whose main axis takes all ranks."""
    return Mesh(**{axis.name: -1 if axis.name == main else 1 for axis in AXES})


def _sizes(mesh: Mesh, world: int) -> dict[str, int] | None:
    """Name of each axis to its size, with -1 worked out; None where they do not multiply to the world size."""
    sizes = {axis.name: int(getattr(mesh, axis.name)) for axis in AXES}
    fixed = prod(size for size in sizes.values() if size != -1)
    free = list(sizes.values()).count(-1)
    if any(size < 1 and size != -1 for size in sizes.values()) or free > 1:
        return None
    if world % fixed if free else fixed != world:
        return None
    return {name: world // fixed if size == -1 else size for name, size in sizes.items()}
