"""What the formulas need of a plan: shapes by unit, the mesh, dtypes and the optimizer. Read from the plan's own steps.

Read once, they can be evolved (another mesh, another offload) without going through the model again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from math import prod

from attrs import define, evolve

from prepkit.config import Intent
from prepkit.plan import Plan
from prepkit.plan.layout import ParamLayout, itemsize
from prepkit.predict.not_predicted import left_out, narrower
from prepkit.predict.optimizers import OptimizerInputs
from prepkit.predict.unit_contents import (
    ParamKind,
    ShardingStep,
    UnitContent,
    UnitInstance,
    above,
    below,
    created_groups,
    splits,
    tensor_cuts,
    units_of,
    whole_of,
)
from prepkit.predict.zero import Zero, optimizer_of, zero_of
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
    """Everything that a formula reads of a plan: its mesh, its units, its dtypes and its optimizer. Sizes in bytes."""

    engine: str
    """Name of the engine's class."""
    world_size: int
    mesh: tuple[Axis, ...]
    contents: tuple[UnitContent, ...]
    """What units hold, each distinct content once."""
    units: tuple[UnitInstance, ...]
    buffers: int
    """Bytes of the module buffers, which every rank holds whole."""
    trains: bool
    """Whether the plan is for training."""
    optimizer: OptimizerInputs | None
    accumulation: int
    """Micro-batches per optimizer step."""
    torch: str
    """torch version; empty: not known."""
    average_each: bool
    """Whether gradients are averaged after every micro-batch, and not in the last one of a step."""
    deepspeed: str
    """DeepSpeed's version; empty: not known."""
    device: str
    """Device type to compute on."""
    per_node: int | None
    """Ranks of a node; None: not known."""
    gathered_size: int | None
    """Bytes of one gathered element; None: as stored."""
    reduced_size: int | None
    """Bytes of one element in the reduction; None: as gathered."""
    autocast_size: int | None
    """Bytes of one element of the weights' copies under autocast; None: no autocast."""
    offload: bool
    """Whether shards, gradients and optimizer state are on the host between uses."""
    wraps: WrapDDP | None
    """Options of the DDP wrapper; None: there is none."""
    left_out: tuple[str, ...]
    """What takes bytes and is in no number, one phrase each."""
    uneven: bool
    """Whether tensor parallelism cuts a parameter into parts of different sizes; then the largest one counts."""
    whole: tuple[tuple[ParamKind, int], ...]
    """Parameters that FSDP2 does not shard though it does the others: each kind with how many there are of it."""
    loaded: int
    """Bytes of the whole model as stored."""
    sent: bool
    """Whether rank 0 alone needs the values, and sends them to all."""
    narrower: bool
    """Whether some weights are gathered in fewer bytes than ``gathered_size``."""
    original: bool
    """Whether parameters in a flat one are still there, as views."""
    zero: Zero | None
    """DeepSpeed's numbers; None: it does not hold the model."""
    upcast_frozen: int
    """Bytes that frozen parameters take more than they came with."""
    splits_units: bool
    """Whether a checkpointed module holds a smaller unit, which is then gathered once more to recompute it."""

    @cached_property
    def counted(self) -> Counter[int]:
        """Index of a content to the number of units that have it."""
        return Counter(unit.content for unit in self.units)

    def params(self) -> Iterator[tuple[ParamKind, int]]:
        """Each kind of parameter of each content, with the number of such parameters in the whole model."""
        for index, units in self.counted.items():
            yield from ((param, count * units) for param, count in self.contents[index].params)

    def over(self, world_size: int) -> Inputs:
        """The same over so many ranks, where that changes no shape: its mesh is still the old one."""
        zero = self.zero and evolve(self.zero, ranks=self.zero.ranks * world_size // self.world_size)
        return evolve(self, world_size=world_size, zero=zero)

    @property
    def averagings(self) -> int:
        """How often gradients are averaged per optimizer step."""
        return self.accumulation if self.average_each else 1

    def axis(self, name: str) -> int:
        """Size of a mesh axis; 1 where there is none of that name."""
        return next((axis.size for axis in self.mesh if axis.name == name), 1)

    def total(self, *, trained: bool = False) -> int:
        """Bytes of all parameters as stored, or of the trained ones."""
        return sum(self.contents[index].bytes(trained=trained) * units for index, units in self.counted.items())


def inputs_of(plan: Plan) -> Inputs:
    """Return what the formulas need of this plan. Linear in the number of parameters."""
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
        average_each=plan.config.average_each,
        torch=plan.facts.env.torch,
        deepspeed=dict(plan.facts.env.libraries).get("deepspeed", ""),
        device=plan.config.device or plan.facts.env.device,
        per_node=plan.facts.env.per_node,
        gathered_size=_size(sharding.param_dtype if sharding else None),
        reduced_size=_size(sharding.reduce_dtype if sharding else None),
        autocast_size=_size(cast.dtype if isinstance(cast, AutocastForward) else None),
        offload=sharding is not None and sharding.offload,
        wraps=wrap if isinstance(wrap, WrapDDP) else None,
        left_out=left_out(plan),
        uneven=any(
            layout.shape[dim] % ranks for layout in plan.layout for dim, ranks in tensor_cuts(layout, plan.mesh)
        ),
        whole=whole_of(plan, sharding),
        loaded=sum(map(stored_bytes, plan.layout)),
        sent=SendTensors in steps,
        narrower=narrower(plan),
        original=not isinstance(sharding, WrapFSDP1) or sharding.use_orig_params,
        upcast_frozen=_upcast_frozen(plan),
        splits_units=splits(steps.get(CheckpointModules), units),
    )


def stored_bytes(layout: ParamLayout) -> int:
    """Bytes of a whole parameter in its stored dtype."""
    return prod(layout.shape) * itemsize(layout.dtype)


def _buffers(plan: Plan, step: ShardingStep | None) -> int:
    """Bytes of all buffers once the units have cast theirs (torch ``_get_buffers_and_dtypes_for_computation``)."""
    own = {unit.path: unit.full_precision for unit in step.units} if isinstance(step, WrapFSDP1) else {}
    ignored = set(step.ignored) if isinstance(step, WrapFSDP1) else set()
    total = 0
    for buffer in plan.facts.model.buffers:
        dtype = buffer.dtype
        if isinstance(step, WrapFSDP1) and "float" in dtype and not below(buffer.name, ignored):
            full = next((own[path] for path in above(buffer.name) if path in own), False)
            dtype = "float32" if full else step.buffer_dtype or dtype
        total += prod(buffer.shape) * itemsize(dtype)
    return total


def _upcast_frozen(plan: Plan) -> int:
    came = {param.name: param.dtype for param in plan.facts.model.params}
    return sum(
        prod(layout.shape) * (itemsize(layout.dtype) - itemsize(came[layout.name]))
        for layout in plan.layout
        if not layout.requires_grad and layout.dtype != came[layout.name]
    )


def _size(dtype: str | None) -> int | None:
    return itemsize(dtype) if dtype else None


def _optimizer(plan: Plan) -> OptimizerInputs | None:
    created = [planned.step for planned in plan.steps if isinstance(planned.step, CreateOptimizer)]
    if created:
        groups = [(step.algorithm, options) for step in created for _, options in created_groups(step)]
        return OptimizerInputs(
            name=" + ".join(step.algorithm for step in created),
            module="torch.optim",
            groups=tuple(tuple((o.name, o.value) for o in own if not isinstance(o.value, tuple)) for _, own in groups),
            classes=tuple(("torch.optim", name) for name, _ in groups),
        )
    seen = plan.facts.optimizer
    if seen is None:
        return None
    return OptimizerInputs(
        name=seen.name,
        module=seen.module,
        groups=tuple(group.options for group in seen.groups),
        classes=tuple((member.module, member.name) for member in seen.class_of_group) if seen.members else (),
    )
