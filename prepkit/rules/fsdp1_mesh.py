"""The axes of the mesh against the sharding strategy of FSDP1."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import FSDP1, Config, Mesh, Sharding
from prepkit.facts import Facts
from prepkit.resolve.mesh import size_of
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


def is_hybrid(engine: FSDP1) -> bool:
    """Whether the strategy shards inside copies of the model."""
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
    if is_hybrid(cfg.engine) and (len(mesh_axes) < 2 or mesh_axes[1].size == 1):
        shown = " x ".join(f"{axis.name}={axis.size}" for axis in mesh_axes)
        what = f"{sharding} needs copies of at least 2 shards each, but the mesh is {shown}"
        alone = len(mesh_axes) == 2
        what += ": torch would neither shard nor average, and every rank would train a copy of its own." * alone
        options = " or ".join(f"Mesh(replicate={m.replicate}, shard={m.shard})" for m in _hybrids(world)[:3])
        fix = f"Write mesh={options}." if options else 'Write sharding="FULL_SHARD".'
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
    if not isinstance(cfg.engine, FSDP1) or not any(_axes(Resolved(cfg=cfg, facts=facts))):
        return cfg
    if not is_hybrid(cfg.engine):
        return evolve(cfg, mesh=None)
    if options := _hybrids(facts.env.world_size):
        return evolve(cfg, mesh=options[0])
    return evolve(cfg, mesh=None, engine=evolve(cfg.engine, sharding="FULL_SHARD"))


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
)
"""One rule: torch takes the first axis of any mesh, and trains copies apart where there is one shard."""
