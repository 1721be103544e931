"""Sizes of the device mesh against the engine, the sharding and the world size."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt, log2, prod

from attrs import evolve

from prepkit.config import DDP, FSDP1, FSDP2, Config, Mesh, Sharding, Single, TensorParallel
from prepkit.config.engines import AXES
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.findings.text import count
from prepkit.resolve.mesh import size_of
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule, under

# --- FSDP1 -----------------------------------------------------------------------------------------------------------


def is_hybrid(engine: FSDP1) -> bool:
    """Return whether the strategy shards inside copies of the model."""
    return engine.sharding.startswith("HYBRID")


def strategy(engine: FSDP1, *, hybrid: bool) -> FSDP1:
    """The engine with the strategy that frees as much, and shards inside copies of the model or over all ranks."""
    pairs: tuple[tuple[Sharding, Sharding], ...] = (
        ("FULL_SHARD", "HYBRID_SHARD"),
        ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"),
    )
    pair = next((pair for pair in pairs if engine.sharding in pair), None)
    return evolve(engine, sharding=pair[hybrid]) if pair else engine


def _hybrids(world: int) -> tuple[Mesh, ...]:
    return tuple(Mesh(replicate=world // size, shard=size) for size in range(2, world) if world % size == 0)


def _axes(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    mesh_axes = resolved.mesh
    if not isinstance(cfg.engine, FSDP1) or mesh_axes is None or size_of("tensor", mesh_axes) > 1:  # another rule's
        return
    sharding, mesh, world = cfg.engine.sharding, cfg.mesh, resolved.facts.env.world_size
    per_node = resolved.facts.env.per_node if is_hybrid(cfg.engine) and mesh is None else world
    if is_hybrid(cfg.engine) and mesh is None and per_node and world <= per_node:
        return  # torch shards over the one node, and averages over a group of one
    if is_hybrid(cfg.engine) and (len(mesh_axes) < 2 or mesh_axes[1].size == 1):
        shown = " x ".join(f"{axis.name}={axis.size}" for axis in mesh_axes)
        what = f"{sharding} needs copies of at least 2 shards each, but the mesh is {shown}"
        alone = len(mesh_axes) == 2
        what += ": torch would neither shard nor average, and every rank would train a copy of its own." * alone
        options = " or ".join(f"Mesh(replicate={m.replicate}, shard={m.shard})" for m in _hybrids(world)[:3])
        fix = f"Write mesh={options}." if options else 'Write sharding="FULL_SHARD".'
        if per_node is None:
            fix = f"Say how many processes a node has, --per-node 8 on the command line, or w{fix[1:]}"
        yield Hit("config.mesh" if mesh else "config.engine.sharding", what + "." * (not alone), fix)
    elif (
        mesh is not None
        and sharding == "NO_SHARD"
        and (mesh.shard > 1 or (mesh.shard == -1 and mesh_axes[0].size < world))
    ):
        what = f"shard={mesh.shard}, but under NO_SHARD every rank holds the whole model."
        yield Hit("config.mesh.shard", what, 'Leave mesh out, or write sharding="FULL_SHARD".')
    elif not is_hybrid(cfg.engine) and len(mesh_axes) == 2:
        what = f"replicate={mesh_axes[0].size}, but {sharding} cuts the model over all ranks once."
        yield Hit("config.mesh.replicate", what, 'Leave mesh out, or write sharding="HYBRID_SHARD".')


def mend_axes(cfg: Config, facts: Facts) -> Config:
    """The config with a mesh, or a strategy, that suit each other."""
    if not any(_axes(Resolved(cfg=cfg, facts=facts))):
        return cfg
    assert isinstance(cfg.engine, FSDP1), "the rule asks no other"
    if not is_hybrid(cfg.engine):
        return evolve(cfg, mesh=None)
    if options := _hybrids(facts.env.world_size):
        return evolve(cfg, mesh=options[0])
    return evolve(cfg, mesh=None, engine=evolve(cfg.engine, sharding="FULL_SHARD"))


# --- resharding to fewer ranks ---------------------------------------------------------------------------------------


def _reshard(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    if not isinstance(cfg.engine, FSDP2) or isinstance(cfg.engine.reshard_after_forward, bool):
        return
    size, shards = cfg.engine.reshard_after_forward, resolved.axis_size("shard") if resolved.mesh else None
    if shards is None or (1 < size < shards and shards % size == 0):
        return
    where = "config.engine.reshard_after_forward"
    if size == 1:
        yield Hit(where, "1 as a number keeps everything gathered.", "Write reshard_after_forward=False.")
    elif size == shards:
        yield Hit(where, f"{size} is the shard size itself.", "Write reshard_after_forward=True.")
    else:
        legal = [str(number) for number in range(2, shards) if shards % number == 0]
        fix = f"Write True, False or {' or '.join(legal[:4])}." if legal else "Write True or False."
        yield Hit(where, f"{size} does not divide the shard size {shards}.", fix)


def mend_reshard(cfg: Config, facts: Facts) -> Config:
    """The config with a ``reshard_after_forward`` that its mesh allows."""
    if not any(_reshard(Resolved(cfg=cfg, facts=facts))):
        return cfg
    assert isinstance(cfg.engine, FSDP2), "the rule asks no other"
    return evolve(cfg, engine=evolve(cfg.engine, reshard_after_forward=cfg.engine.reshard_after_forward != 1))


def nearest(mesh: Mesh, world: int) -> tuple[Mesh, ...]:
    """Meshes over exactly ``world`` ranks in which something is sharded, those nearest to the given sizes first.

    The tensor size stays 1 where it is 1.
    """

    def distance(other: Mesh) -> float:
        return sum(abs(log2(getattr(other, name) / size)) for name, size in _sizes(mesh) if size > 0)

    low = [size for size in range(1, isqrt(world) + 1) if world % size == 0]
    sizes = sorted({*low, *(world // size for size in low)})
    meshes = [
        Mesh(replicate=copies, shard=world // cuts // copies, tensor=cuts)
        for cuts in (sizes if mesh.tensor != 1 else [1])
        for copies in sizes
        if world // cuts % copies == 0 and (copies * cuts == 1 or copies * cuts < world)
    ]
    meshes.sort(key=lambda other: (distance(other), other.tensor, other.replicate))
    return tuple(meshes)


def _sizes(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    return tuple((axis.name, getattr(mesh, axis.name)) for axis in AXES)


def _shown(mesh: Mesh) -> str:
    usual = ("replicate", "shard")  # are always said
    return f"Mesh({', '.join(f'{name}={size}' for name, size in _sizes(mesh) if name in usual or size != 1)})"


def _default(cfg: Config, facts: Facts) -> Config:
    return mend_axes(mend_reshard(evolve(cfg, mesh=None), facts), facts)


def _nearest(cfg: Config, facts: Facts) -> Config:
    if cfg.mesh is None or not isinstance(cfg.engine, FSDP2) or cfg.mesh.tensor != 1:
        return _default(cfg, facts)  # another tensor size would be one that the layers may not allow
    legal = nearest(cfg.mesh, facts.env.world_size)
    return mend_reshard(evolve(cfg, mesh=legal[0] if legal else None), facts)


def _proper(mesh: Mesh) -> bool:
    """Return whether the two rules about single sizes hold, so that it makes sense to multiply."""
    return all(size >= 1 or size == -1 for _, size in _sizes(mesh)) and len(_rests(mesh)) < 2


def _rests(mesh: Mesh) -> tuple[str, ...]:
    return tuple(name for name, size in _sizes(mesh) if size == -1)


def _below_one(resolved: Resolved) -> Iterator[Hit]:
    if resolved.cfg.mesh is None:
        return
    for name, size in _sizes(resolved.cfg.mesh):
        if size < 1 and size != -1:
            yield Hit(f"config.mesh.{name}", f"{name}={size} is no number of ranks.")


def _two_rests(resolved: Resolved) -> Iterator[Hit]:
    if resolved.cfg.mesh is not None and len(names := _rests(resolved.cfg.mesh)) > 1:
        asked = " and ".join(f"{name}=-1" for name in names)
        yield Hit("config.mesh", f"{asked} {'both' if len(names) == 2 else 'all'} ask for the rest of the ranks.")


def _product(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    mesh, world = cfg.mesh, resolved.facts.env.world_size
    if mesh is None or resolved.one_process or not _proper(mesh) or world < 1:
        return
    if resolved.mesh is not None:
        return
    if _rests(mesh):
        fixed = [f"{name}={size}" for name, size in _sizes(mesh) if size > 1]
        what = f"{' x '.join(fixed)} {'does' if len(fixed) == 1 else 'do'} not divide the world size {world}."
    else:
        product = prod(size for _, size in _sizes(mesh))
        said = " x ".join(f"{name} {size}" for name, size in _sizes(mesh) if name != "tensor" or size != 1)
        what = f"{said} = {product}, but the world size is {world}."
    match cfg.engine:
        case DDP():
            fix = "Leave mesh out: DDP replicates over all ranks."
        case TensorParallel():
            fix = "Leave mesh out: TensorParallel cuts layers over all ranks."
        case _:
            shown = " or ".join(map(_shown, nearest(mesh, world)[:3]))
            fix = f"Write mesh={shown}, or start as many processes as the mesh has places."
    yield Hit("config.mesh", what, fix)


def _single_mesh(resolved: Resolved) -> Iterator[Hit]:
    mesh = resolved.cfg.mesh
    if mesh is not None and max(size for _, size in _sizes(mesh)) > 1:
        asked = " x ".join(str(size) for name, size in _sizes(mesh) if name != "tensor" or size != 1)
        yield Hit("config.mesh", f"Single() uses one rank, but the mesh asks for {asked}.")


def _ddp_shards(resolved: Resolved) -> Iterator[Hit]:
    mesh, world = resolved.cfg.mesh, resolved.facts.env.world_size
    if mesh is None or not _proper(mesh):
        return
    shard, rest = mesh.shard, mesh.replicate * mesh.tensor
    if shard == -1 and world % rest == 0:
        shard = world // rest
    if shard > 1:
        said = f"shard={shard}" if mesh.shard != -1 else f"shard=-1 means {shard} of {world} ranks"
        yield Hit("config.mesh.shard", f"{said}, but under DDP every rank holds the whole model.")


def _whole_cuts(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    does = resolved.engine_traits.refuses_tensor_axis
    if does and cfg.mesh is not None and cfg.mesh.tensor not in (0, 1):
        name = type(cfg.engine).__name__
        what = f"tensor={cfg.mesh.tensor}, but {name} {does} whole parameters and refuses the parts of a layer."
        yield Hit("config.mesh.tensor", what)


def _tensor_alone(resolved: Resolved) -> Iterator[Hit]:
    cfg = resolved.cfg
    mesh, world = cfg.mesh, resolved.facts.env.world_size
    if mesh is None or not _proper(mesh) or resolved.mesh is None:
        return
    left = world // (resolved.mesh or ())[0].size
    if left > 1:
        what = f"{left} groups of {world // left} ranks, but TensorParallel() is one group of all {world}."
        yield Hit("config.mesh", what)


def _nothing_sharded(resolved: Resolved) -> Iterator[Hit]:
    if not resolved.mesh or resolved.axis_size("shard") > 1:
        return
    replicas, tensor = resolved.axis_size("replicate"), resolved.axis_size("tensor")
    if replicas > 1 and tensor == 1:
        yield Hit("config.mesh.shard", f"{replicas} copies of one shard each: every rank holds the whole model.")
    elif replicas > 1:
        what = f"{replicas} copies of one shard each: beside the tensor ranks nothing is sharded."
        yield Hit("config.mesh.shard", what, f"Write mesh=Mesh(shard={replicas}, tensor={tensor}).")


def _nothing_left(resolved: Resolved) -> Iterator[Hit]:
    world, axes = resolved.facts.env.world_size, resolved.mesh or ()
    if len(axes) > 1 and resolved.axis_size("tensor") == world:
        what = f"tensor={axes[-1].size} takes every rank, and FSDP2 has nothing left to shard over."
        yield Hit("config.mesh.tensor", what)


def _shard_copies(cfg: Config, facts: Facts) -> Config:
    """The copies share one model between them; the tensor size stays, so that the data is divided as before."""
    resolved = Resolved(cfg=cfg, facts=facts)
    if resolved.axis_size("tensor") == 1:
        return _default(cfg, facts)
    mesh = Mesh(shard=resolved.axis_size("replicate"), tensor=resolved.axis_size("tensor"))
    return mend_reshard(evolve(cfg, mesh=mesh), facts)


def _many_singles(resolved: Resolved) -> Iterator[Hit]:
    if resolved.facts.env.world_size > 1:
        world = resolved.facts.env.world_size
        yield Hit("env.world_size", f"{world} processes run, and Single() would train a copy in each that never talk.")


def _ddp_alone(resolved: Resolved) -> Iterator[Hit]:
    if resolved.facts.env.world_size == 1:
        yield Hit("config.engine", f"DDP() over {count(1, 'rank')} has nobody to average with and keeps its buckets.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="fsdp1.mesh",
        summary="The mesh of FSDP1 has the axes that its sharding strategy uses.",
        check=_axes,
        fix="Leave mesh out, or write another sharding strategy.",
        overridable=False,
        source=("pain 22", "F1-40", "torch _init_core_state"),
        repair=mend_axes,
    ),
    Rule(
        id="reshard.not-a-factor",
        summary="A number in reshard_after_forward divides the shard size, and is neither 1 nor the size itself.",
        check=_reshard,
        fix="Write True, False or a number between 1 and the shard size that divides it.",
        source=("torch _get_post_forward_mesh_info", "G-12"),
        repair=mend_reshard,
    ),
    Rule(
        id="mesh.size-below-one",
        summary="Every size of the mesh is at least 1, or -1 for the rest.",
        check=_below_one,
        fix="Write a number of ranks, or -1 for the rest.",
        overridable=False,
        source=("PC-2", "pain 22"),
        repair=_default,
    ),
    Rule(
        id="mesh.two-rests",
        summary="At most one size of the mesh is -1.",
        check=_two_rests,
        fix="Write a number for one of them, such as Mesh(replicate=1, shard=-1).",
        overridable=False,
        source=("PC-2",),
        repair=_default,
    ),
    Rule(
        id="mesh.not-world-size",
        summary="The sizes of the mesh multiply to the world size.",
        check=_product,
        fix="Write sizes that multiply to the world size.",
        overridable=False,
        source=("PC-8", "G-64", "pain 22"),
        repair=_nearest,
    ),
    Rule(
        id="mesh.single-has-none",
        summary="Single() comes without a mesh of more than one rank.",
        check=under(Single, _single_mesh),
        fix="Leave mesh out, or write engine=DDP() or engine=FSDP2().",
        source=("PC-10",),
        repair=_default,
    ),
    Rule(
        id="mesh.ddp-does-not-shard",
        summary="Under DDP the shard size is 1.",
        check=under(DDP, _ddp_shards),
        fix="Leave mesh out, or write engine=FSDP2() to shard.",
        overridable=False,
        source=("PC-10", "pain 22"),
        repair=_default,
    ),
    Rule(
        id="mesh.tensor-needs-dtensors",
        summary="Under DDP, FSDP1 and XLA no layer is cut over ranks.",
        check=_whole_cuts,
        fix="Write engine=TensorParallel(), or engine=FSDP2() with the same tensor size.",
        overridable=False,
        source=("DDP-2", "PC-5", "PC-10"),
        repair=_default,
    ),
    Rule(
        id="mesh.tensor-alone",
        summary="Under TensorParallel all ranks share one axis.",
        check=under(TensorParallel, _tensor_alone),
        fix="Leave mesh out, or write engine=FSDP2() for shards or copies beside the tensor ranks.",
        overridable=False,
        source=("PC-5", "PC-10", "pain 22"),
        repair=_default,
    ),
    Rule(
        id="mesh.nothing-sharded",
        summary="Under FSDP2 something is sharded beside copies of the model and cuts of its layers.",
        check=under(FSDP2, _nothing_sharded),
        fix="Write engine=DDP() without a mesh for whole copies, or leave mesh out to shard over all ranks.",
        source=("PC-9", "PC-5", "pain 22"),
        repair=_shard_copies,
    ),
    Rule(
        id="mesh.tensor-takes-all",
        summary="Under FSDP2 the tensor ranks leave an axis to shard over.",
        check=under(FSDP2, _nothing_left),
        fix="Write engine=TensorParallel() without a mesh, or a smaller tensor size.",
        source=("PC-9", "pain 22"),
    ),
    Rule(
        id="mesh.single-many-ranks",
        summary="Single() runs in one process.",
        check=under(Single, _many_singles),
        fix="Write engine=DDP() or engine=FSDP2(), or start one process.",
        source=("G-2", "ST-5", "pain 36"),
    ),
    Rule(
        id="mesh.ddp-alone",
        summary="DDP runs in more than one process.",
        check=under(DDP, _ddp_alone),
        fix="Write engine=Single(), or start more processes.",
        severity=Severity.WARNING,
        source=("G-3",),
    ),
)
