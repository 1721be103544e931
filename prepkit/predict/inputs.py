"""What the formulas need of a plan: shapes by unit, the mesh, dtypes and the optimizer. Read from the plan's own steps.

Taken once, a job can be evolved (another mesh, another offload) without going through the model again.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from math import prod

from attrs import define, evolve

from prepkit.config import Intent
from prepkit.plan import Plan
from prepkit.plan.dtypes import itemsize
from prepkit.predict.inputs_units import Sharding, above, below, splits, tensor_cuts, units_of
from prepkit.predict.not_predicted import narrower, unknown
from prepkit.predict.optimizers import OptimizerOf
from prepkit.predict.unit_contents import Content, UnitOf
from prepkit.predict.zero_inputs import Zero, optimizer_of, zero_of
from prepkit.steps import (
    AutocastForward,
    Axis,
    CheckpointModules,
    CreateOptimizer,
    SendTensors,
    ShardUnits,
    WrapDDP,
    WrapFSDP1,
)


@define(kw_only=True, frozen=True, slots=False)
class Inputs:
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
    deepspeed: str = ""
    """DeepSpeed's version; empty: not known."""
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
    ignored: int = 0
    """Bytes of the parameters that are not sharded though the others are."""
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

    def over(self, world_size: int) -> Inputs:
        """The same over so many ranks, where that changes no shape: its mesh is still the old one."""
        zero = self.zero and evolve(self.zero, ranks=self.zero.ranks * world_size // self.world_size)
        return evolve(self, world_size=world_size, zero=zero)

    def axis(self, name: str) -> int:
        """Size of a mesh axis; 1 where there is none of that name."""
        return next((axis.size for axis in self.mesh if axis.name == name), 1)

    def total(self, *, trained: bool = False) -> int:
        """Bytes of all parameters as stored, or of the trained ones."""
        return sum(self.contents[index].bytes(trained=trained) * times for index, times in self.counted.items())


def job_of(plan: Plan) -> Inputs:
    """The job of a plan. Linear in the number of parameters."""
    steps = {type(planned.step): planned.step for planned in plan.steps}
    shard, wrap, cast = (steps.get(kind) for kind in (ShardUnits, WrapDDP, AutocastForward))
    flat = steps.get(WrapFSDP1)
    sharding = shard if isinstance(shard, ShardUnits) else flat if isinstance(flat, WrapFSDP1) else None
    contents, units = units_of(plan, sharding)
    return Inputs(
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
        deepspeed=dict(plan.facts.env.libraries).get("deepspeed", ""),
        device=plan.config.device or plan.facts.env.device,
        per_node=plan.facts.env.per_node,
        gathered_size=_size(sharding.param_dtype if sharding else None),
        reduced_size=_size(sharding.reduce_dtype if sharding else None),
        autocast_size=_size(cast.dtype if isinstance(cast, AutocastForward) else None),
        offload=sharding is not None and sharding.offload,
        wraps=wrap if isinstance(wrap, WrapDDP) else None,
        unknown=unknown(plan),
        uneven=any(one.shape[dim] % parts for one in plan.layout for dim, parts in tensor_cuts(one, plan.mesh)),
        ignored=sum(
            prod(one.shape) * itemsize(one.dtype)
            for one in plan.layout
            if isinstance(shard, ShardUnits) and one.name in shard.ignored
        ),
        loaded=sum(prod(one.shape) * itemsize(one.dtype) for one in plan.layout),
        sent=SendTensors in steps,
        narrower=narrower(plan),
        original=not isinstance(sharding, WrapFSDP1) or sharding.use_orig_params,
        upcast_frozen=_upcast_frozen(plan),
        splits_units=splits(steps.get(CheckpointModules), units),
    )


def _buffers(plan: Plan, step: Sharding | None) -> int:
    """Bytes of all buffers once the units have cast theirs (torch ``_get_buffers_and_dtypes_for_computation``)."""
    own = {unit.path: unit.full_precision for unit in step.units} if isinstance(step, WrapFSDP1) else {}
    ignored = set(step.ignored) if isinstance(step, WrapFSDP1) else set()
    total = 0
    for buffer in plan.facts.model.buffers:
        dtype = buffer.dtype
        if own and "float" in dtype and not below(buffer.name, ignored):
            full = next((own[path] for path in above(buffer.name) if path in own), False)
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


def _optimizer(plan: Plan) -> OptimizerOf | None:
    for planned in plan.steps:
        if isinstance(planned.step, CreateOptimizer):
            options = tuple((o.name, o.value) for o in planned.step.options if not isinstance(o.value, tuple))
            return OptimizerOf(name=planned.step.algorithm, module="torch.optim", groups=(options,))
    seen = plan.facts.optimizer
    if seen is None:
        return None
    return OptimizerOf(name=seen.name, module=seen.module, groups=tuple(group.options for group in seen.groups))
