"""What the formulas need of a plan: shapes by unit, the mesh, dtypes and the optimizer. Read from the plan's own steps.

Taken once, a job can be evolved (another mesh, another offload) without going through the model again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from math import prod

from attrs import define, frozen

from prepkit.config import Intent
from prepkit.layout import ParamLayout
from prepkit.plan import Plan
from prepkit.predict.owner import OptimizerOf
from prepkit.predict.unknown import narrower, unknown
from prepkit.predict.zero_job import Zero, optimizer_of, zero_of
from prepkit.render_names import itemsize
from prepkit.steps import (
    AutocastForward,
    Axis,
    CheckpointModules,
    CreateOptimizer,
    ParallelizeModules,
    SendTensors,
    ShardUnits,
    WrapDDP,
    WrapFSDP1,
)


@frozen
class Held:
    """One kind of parameter of a unit."""

    shape: tuple[int, ...]
    """Global shape; of a layer that is cut, that of one part."""
    size: int
    """Bytes of one element as stored."""
    floating: bool
    trains: bool
    group: int | None
    """Index of the optimizer group that steps it; None: nobody does."""
    widens: int = 1
    """Times as many elements as it has that its gradient has before it is sharded: torch gives an embedding that is
    cut by its rows a gradient of all rows."""
    start: int | None = None
    """Its first element in the flat parameter of its unit; None: it is in none."""

    @property
    def numel(self) -> int:
        """Elements, before anything is sharded."""
        return prod(self.shape)


@frozen
class Content:
    """What a unit holds: equal parameters together, with their number."""

    held: tuple[tuple[Held, int], ...]
    full: bool = False
    """Whether it is gathered and reduced in float32, whatever the others are."""

    def numel(self) -> int:
        """Elements of all."""
        return sum(one.numel * times for one, times in self.held)

    def bytes(self, *, trained: bool = False) -> int:
        """Bytes of all as stored, or of the trained ones."""
        return sum(one.numel * one.size * times for one, times in self.held if one.trains or not trained)

    def trains(self) -> bool:
        """Whether anything in it is trained."""
        return any(one.trains for one, _ in self.held)


@frozen
class UnitOf:
    """One unit that owns parameters."""

    path: str
    content: int
    """Index into ``Job.contents``."""
    reshard: bool | int
    """What becomes of the gathered parameters after forward."""
    stays: bool = False
    """Whether it stays gathered from one micro-batch to the next, until gradients are averaged."""


@define(kw_only=True, frozen=True, slots=False)
class Job:
    """Everything that a formula reads. Sizes are in bytes."""

    engine: str
    """Name of the engine's class."""
    world_size: int
    mesh: tuple[Axis, ...]
    contents: tuple[Content, ...]
    units: tuple[UnitOf, ...]
    buffers: int
    """Bytes of the module buffers, which every rank holds whole."""
    trains: bool
    optimizer: OptimizerOf | None
    accumulation: int
    torch: str
    """torch version; empty: not known."""
    device: str = "cpu"
    """Device type to compute on."""
    per_node: int | None = None
    gathered_size: int | None = None
    """Bytes of one gathered element; None: as stored."""
    reduced_size: int | None = None
    """Bytes of one element in the reduction; None: as gathered."""
    autocast_size: int | None = None
    """Bytes of one element of the weights' copies under autocast; None: no autocast."""
    offload: bool = False
    wraps: WrapDDP | None = None
    """Options of the DDP wrapper; None: there is none."""
    unknown: tuple[str, ...] = ()
    """What is there beside the numbers, one phrase each."""
    uneven: bool = False
    """Whether a layer is cut into parts of different sizes; then the largest part stands for all."""
    loaded: int = 0
    """Bytes of the whole model as stored."""
    sent: bool = False
    """Whether rank 0 alone needs the values, and sends them to all."""
    narrower: bool = False
    """Whether some weights are gathered in fewer bytes than ``gathered_size``."""
    original: bool = True
    """Whether parameters in a flat one are still there, as views."""
    zero: Zero | None = None
    """DeepSpeed's numbers; None: it does not hold the model."""
    upcast_frozen: int = 0
    """Bytes that frozen parameters take more than they came with."""
    splits_units: bool = False
    """Whether a checkpointed module holds a smaller unit, which is then gathered once more to recompute it."""

    @cached_property
    def counted(self) -> Counter[int]:
        """Content to the number of units that have it."""
        return Counter(unit.content for unit in self.units)

    def axis(self, name: str) -> int:
        """Size of a mesh axis; 1 where there is none of that name."""
        return next((axis.size for axis in self.mesh if axis.name == name), 1)

    def total(self, *, trained: bool = False) -> int:
        """Bytes of all parameters as stored, or of the trained ones."""
        return sum(self.contents[index].bytes(trained=trained) * times for index, times in self.counted.items())


def job_of(plan: Plan) -> Job:
    """The job of a plan. Linear in the number of parameters."""
    steps = {type(planned.step): planned.step for planned in plan.steps}
    shard, wrap, cast = (steps.get(kind) for kind in (ShardUnits, WrapDDP, AutocastForward))
    flat = steps.get(WrapFSDP1)
    sharding = shard if isinstance(shard, ShardUnits) else flat if isinstance(flat, WrapFSDP1) else None
    contents, units = _units(plan, sharding)
    return Job(
        engine=type(plan.config.engine).__name__,
        world_size=plan.world_size,
        mesh=plan.mesh,
        contents=contents,
        units=units,
        buffers=_buffers(plan, sharding),
        trains=plan.config.intent is Intent.TRAINING,
        optimizer=optimizer_of(plan, _optimizer(plan)),
        zero=zero_of(plan),
        accumulation=plan.owners.accumulation_steps,
        torch=plan.facts.env.torch,
        device=plan.config.device or plan.facts.env.device,
        per_node=plan.facts.env.per_node,
        gathered_size=_size(sharding.param_dtype if sharding else None),
        reduced_size=_size(sharding.reduce_dtype if sharding else None),
        autocast_size=_size(cast.dtype if isinstance(cast, AutocastForward) else None),
        offload=sharding is not None and sharding.offload,
        wraps=wrap if isinstance(wrap, WrapDDP) else None,
        unknown=unknown(plan),
        uneven=any(one.shape[dim] % parts for one in plan.layout for dim, parts in tensor_cuts(one, plan.mesh)),
        loaded=sum(prod(one.shape) * itemsize(one.dtype) for one in plan.layout),
        sent=SendTensors in steps,
        narrower=narrower(plan),
        original=not isinstance(sharding, WrapFSDP1) or sharding.use_orig_params,
        upcast_frozen=_upcast_frozen(plan),
        splits_units=_splits(steps.get(CheckpointModules), units),
    )


Sharding = ShardUnits | WrapFSDP1


def _buffers(plan: Plan, step: Sharding | None) -> int:
    """Bytes of all buffers once the units have cast theirs (torch ``_get_buffers_and_dtypes_for_computation``)."""
    own = {unit.path: unit.full_precision for unit in step.units} if isinstance(step, WrapFSDP1) else {}
    ignored = set(step.ignored) if isinstance(step, WrapFSDP1) else set()
    total = 0
    for buffer in plan.facts.model.buffers:
        dtype = buffer.dtype
        if own and "float" in dtype and not _below(buffer.name, ignored):
            full = next((own[path] for path in _above(buffer.name) if path in own), False)
            dtype = "float32" if full else (isinstance(step, WrapFSDP1) and step.buffer_dtype) or dtype
        total += prod(buffer.shape) * itemsize(dtype)
    return total


def _upcast_frozen(plan: Plan) -> int:
    came = {param.name: param.dtype for param in plan.facts.model.params}
    return sum(
        prod(one.shape) * (itemsize(one.dtype) - itemsize(came[one.name]))
        for one in plan.layout
        if not one.requires_grad and one.dtype != came[one.name]
    )


def _size(dtype: str | None) -> int | None:
    return itemsize(dtype) if dtype else None


def _units(plan: Plan, step: Sharding | None) -> tuple[tuple[Content, ...], tuple[UnitOf, ...]]:
    groups = _groups(plan)
    cuts = next((p.step.cuts for p in plan.steps if isinstance(p.step, ParallelizeModules)), ())
    wide = {path for cut in cuts if cut.style == "rowwise" for path in cut.paths}
    for tie in plan.facts.model.ties:  # a gradient that is cut comes first, and the other one is cut to be added
        owners = {name.rpartition(".")[0] for name in tie}
        wide -= owners if owners - wide else set()
    found: dict[str, Counter[Held]] = {}
    for layout in plan.layout:
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


def _optimizer(plan: Plan) -> OptimizerOf | None:
    for planned in plan.steps:
        if isinstance(planned.step, CreateOptimizer):
            options = tuple((o.name, o.value) for o in planned.step.options if not isinstance(o.value, tuple))
            return OptimizerOf(name=planned.step.algorithm, module="torch.optim", groups=(options,))
    seen = plan.facts.optimizer
    if seen is None:
        return None
    return OptimizerOf(name=seen.name, module=seen.module, groups=tuple(group.options for group in seen.groups))


def _splits(step: object, units: tuple[UnitOf, ...]) -> bool:
    paths = set(step.paths) if isinstance(step, CheckpointModules) else set()
    return any(_below(unit.path, paths) for unit in units)


def _below(path: str, paths: set[str]) -> bool:
    return any(one in paths for one in _above(path))


def _above(path: str) -> Iterator[str]:
    """The paths of the modules around it, innermost first; the root, ``""``, comes last."""
    while path:
        path = path.rpartition(".")[0]
        yield path
