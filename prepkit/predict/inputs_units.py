"""The units of a plan and what they hold, read from its layout and its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from prepkit.plan import Plan
from prepkit.plan.dtypes import itemsize
from prepkit.plan.layout import ParamLayout
from prepkit.predict.unit_contents import Content, Held, UnitOf
from prepkit.steps import Axis, CheckpointModules, CreateOptimizer, ParallelizeModules, ShardUnits, WrapFSDP1

Sharding = ShardUnits | WrapFSDP1
"""The step that shards."""


def units_of(plan: Plan, step: Sharding | None) -> tuple[tuple[Content, ...], tuple[UnitOf, ...]]:
    """What units hold, each content once, and the units that own parameters, as indices into it."""
    groups = _groups(plan)
    cuts = next((p.step.styles for p in plan.steps if isinstance(p.step, ParallelizeModules)), ())
    wide = {path for cut in cuts if cut.style == "rowwise" for path in cut.paths}
    for tie in plan.facts.model.ties:  # a gradient that is cut comes first, and the other one is cut to be added
        owners = {name.rpartition(".")[0] for name in tie}
        wide -= owners if owners - wide else set()
    found: dict[str, Counter[Held]] = {}
    ignored = set(step.ignored) if isinstance(step, ShardUnits) else set()
    for layout in plan.layout:
        if layout.name not in ignored:
            found.setdefault(layout.unit, Counter())[_held(layout, groups, plan.mesh, wide)] += 1
    indices: dict[Content, int] = {}
    units: list[UnitOf] = []
    for path, (after, stays, full) in _treated(step, found).items():
        if path in found:  # a unit whose parameters are all in smaller units gathers nothing
            content = Content(tuple(found[path].items()), full)
            units.append(UnitOf(path, indices.setdefault(content, len(indices)), after, stays))
    return tuple(indices), tuple(units)


def _treated(step: Sharding | None, found: Iterable[str]) -> dict[str, tuple[bool | int, bool, bool]]:
    """Path to what becomes of a unit after forward, whether it stays between micro-batches, and is in full precision.

    FSDP1 keeps its root until backward, and under ``SHARD_GRAD_OP`` every unit until gradients are averaged
    (torch ``_post_forward_reshard``, ``_should_free_in_backward``).
    """
    match step:
        case ShardUnits(units=units):
            return {one.path: (one.reshard_after_forward, False, False) for one in units}
        case WrapFSDP1(units=flat, sharding=sharding):
            frees = sharding in ("FULL_SHARD", "HYBRID_SHARD")
            return {one.path: (frees and bool(one.path), not frees, one.full_precision) for one in flat}
        case _:
            return dict.fromkeys(found, (False, False, False))


def tensor_cuts(layout: ParamLayout, mesh: tuple[Axis, ...]) -> Iterator[tuple[int, int]]:
    """The dimension of a parameter that the tensor axis cuts, and over how many ranks; nothing for the others."""
    dims = {"shard(0)": 0, "shard(1)": 1}
    for placement, axis in zip(layout.placements, mesh, strict=False):
        if axis.name == "tensor" and placement in dims:
            yield dims[placement], axis.size


def _held(layout: ParamLayout, groups: dict[str, int], mesh: tuple[Axis, ...], wide: set[str]) -> Held:
    trains = layout.requires_grad
    floating = "float" in layout.dtype
    group = groups.get(layout.name) if trains else None
    start = layout.flat.start if layout.flat else None
    shape, widens = list(layout.shape), 1
    for dim, parts in tensor_cuts(layout, mesh):
        shape[dim] = -(-shape[dim] // parts)
        if dim == 0 and layout.name.rpartition(".")[0] in wide:  # a linear layer is cut in dim 1
            widens = parts
    return Held(tuple(shape), itemsize(layout.dtype), floating, trains, group, widens, start)


def _groups(plan: Plan) -> dict[str, int]:
    """Parameter name to the optimizer group that steps it."""
    created = next((p.step for p in plan.steps if isinstance(p.step, CreateOptimizer)), None)
    if created is not None:
        return dict.fromkeys(created.names, 0)
    seen = plan.facts.optimizer
    return {name: i for i, group in enumerate(seen.groups) for name in group.slots if name} if seen else {}


def splits(step: object, units: tuple[UnitOf, ...]) -> bool:
    """Whether a checkpointed module holds a unit that is smaller than itself."""
    paths = set(step.paths) if isinstance(step, CheckpointModules) else set()
    return any(below(unit.path, paths) for unit in units)


def below(path: str, paths: set[str]) -> bool:
    """Whether one of the paths is that of a module around it."""
    return any(one in paths for one in above(path))


def above(path: str) -> Iterator[str]:
    """The paths of the modules around it, innermost first; the root, ``""``, comes last."""
    while path:
        path = path.rpartition(".")[0]
        yield path
