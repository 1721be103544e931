"""What the formulas of ZeRO need: the numbers in DeepSpeed's config, as the plan's one call hands it over."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from typing import Any

from attrs import frozen

from prepkit.plan import Plan
from prepkit.plan.dtypes import itemsize
from prepkit.predict.optimizers import SECTIONS, OptimizerOf
from prepkit.steps import ConvertOptimizer, InitializeDeepSpeed, MarkLeafModules

REDUCE_BUCKET = 500_000_000
"""Default ``reduce_bucket_size``, in elements."""
PERSISTENT = 100_000
"""Default ``stage3_param_persistence_threshold``: parameters of at most so many elements are never partitioned away."""
REUSE = 1_000_000_000
"""Default ``stage3_max_live_parameters`` and ``stage3_max_reuse_distance``, in elements."""

SUB_GROUP = 1_000_000_000
"""Default ``sub_group_size``: so many elements of a rank's part are stepped at once at stage 3."""

OTHERWISE = (
    "zero_hpz_partition_size",
    "mics_shard_size",
    "zero_quantized_weights",
    "zero_quantized_gradients",
    "zenflow",
    "parameter_alignment",
    "round_robin_gradients",
    "stage3_model_persistence_threshold",
    "offload_optimizer.ratio",
    "offload_optimizer.super_offload",
)
"""Settings of ``zero_optimization`` that change what is held or sent, and that no formula here knows."""
USUALLY = ("reduce_scatter", "use_multi_rank_bucket_allreduce", "contiguous_gradients")
"""Those that do so when they are false."""
LOW = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states", "fp16.fp16_master_weights_and_grads")
"""Those that keep master weights, or their state, in 16 bits."""


@frozen(kw_only=True)
class Zero:
    """Sizes in bytes of one element, or in elements, as DeepSpeed's config has them."""

    stage: int
    ranks: int
    """Ranks that share the states."""
    size: int
    """Bytes of one element of the parameters."""
    grad_size: int
    """Bytes of one element of the accumulated gradients."""
    bfloat16: bool
    sent_size: int
    """Bytes of one element of a gradient on its way."""
    bucket: int
    overlaps: bool
    """Whether there are two reduce buckets, which take turns."""
    persistent: int
    live: int
    """Elements that may be gathered ahead of their use."""
    reuse: int
    """Elements of the modules that run next within which a parameter that is used again stays gathered."""
    sub_group: int
    """Elements of a part that are stepped at once at stage 3."""
    numels: tuple[tuple[int, bool], ...]
    """Elements of every parameter, and whether it is trained, in the order of the model."""
    module: int
    """Elements of the largest module's own parameters; of all inside where it is gathered whole."""
    groups: tuple[tuple[int, ...], ...]
    """Elements of the parameters that each optimizer group steps, in its order."""
    offload_state: bool
    offload_params: bool
    pins_state: bool = True
    """Whether what is offloaded of the optimizer is page-locked, as it is unless told."""
    at_once: bool = False
    """Whether gradients in bfloat16 are added to the float32 ones as they come, not after backward."""
    unknown: tuple[str, ...] = ()
    """Settings that no formula knows; then nothing is predicted."""

    @property
    def high(self) -> bool:
        """Whether DeepSpeed takes its ``BF16_Optimizer``, which adds up gradients of all parameters in float32."""
        return self.stage == 1 and self.bfloat16 and self.grad_size == 4 and not self.offload_state

    @property
    def compact(self) -> bool:
        """Whether a rank adds up its part of the gradients in a float32 buffer, not whole gradients as they came."""
        return self.grad_size == 4 and self.size != 4

    @property
    def largest(self) -> int:
        """Elements of the largest trained parameter."""
        return max((numel for some in self.groups for numel in some), default=0)

    @property
    def stepped(self) -> int:
        """Elements that are trained, without padding."""
        return sum(sum(some) for some in self.groups)


def zero_of(plan: Plan) -> Zero | None:
    """What the plan's call of ``deepspeed.initialize`` says; None where there is none."""
    step = next((p.step for p in plan.steps if isinstance(p.step, InitializeDeepSpeed)), None)
    if step is None:
        return None
    said = {setting.path: json.loads(setting.value) for setting in step.settings}

    def look(name: str, default: Any) -> Any:
        return said.get(("zero_optimization", name), default)

    def deep(path: str, default: Any) -> Any:
        return said.get(("zero_optimization", *path.split(".")), default)

    size = itemsize(step.dtype) if step.dtype else itemsize(plan.layout[0].dtype)
    sent = said.get(("communication_data_type",))
    grads = said.get(("data_types", "grad_accum_dtype"))
    places = {kind: look_offload(said, kind) for kind in ("optimizer", "param")}
    odd = [name for name in OTHERWISE if deep(name, None) not in (None, False, 0, 1, 1.0, -1)]
    odd += [f"{name}=false" for name in USUALLY if look(name, default=True) is False]
    odd += [name for name in LOW if said.get(tuple(name.split(".")), False)]
    odd += [f"offload to {place}" for place in places.values() if place not in ("none", "cpu")]
    odd += ["ZeRO stage 0"] * (step.stage == 0) + ["dtypes that differ"] * (len({one.dtype for one in plan.layout}) > 1)
    odd += ["DeepSpeed's own tensor parallelism"] * any("split" in one.placements for one in plan.layout)
    return Zero(
        stage=step.stage,
        ranks=step.data_parallel,
        size=size,
        bfloat16=step.dtype == "bfloat16",
        grad_size=NAMES.get(str(grads), size),
        sent_size=NAMES.get(str(sent), size),
        bucket=int(look("reduce_bucket_size", REDUCE_BUCKET)),
        overlaps=bool(look("overlap_comm", step.stage == 3)),
        persistent=int(look("stage3_param_persistence_threshold", PERSISTENT)),
        live=int(look("stage3_max_live_parameters", REUSE)),
        reuse=int(look("stage3_max_reuse_distance", REUSE)),
        sub_group=int(look("sub_group_size", SUB_GROUP)) or SUB_GROUP,
        numels=tuple((prod(one.shape), one.requires_grad) for one in plan.layout),
        module=_module(plan),
        groups=_groups(plan, step),
        offload_state=places["optimizer"] == "cpu",
        offload_params=places["param"] == "cpu",
        pins_state=deep("offload_optimizer.pin_memory", default=True) is not False,
        at_once=bool(said.get(("bf16", "immediate_grad_update"), False)),
        unknown=tuple(odd),
    )


NAMES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
"""DeepSpeed's words for dtypes to their bytes."""


def look_offload(said: dict[tuple[str, ...], Any], kind: str) -> str:
    """Where ``offload_optimizer`` or ``offload_param`` puts its tensors."""
    return str(said.get(("zero_optimization", f"offload_{kind}", "device"), "none"))


def _module(plan: Plan) -> int:
    leaves = next((set(p.step.paths) for p in plan.steps if isinstance(p.step, MarkLeafModules)), set())
    found: Counter[str] = Counter()
    for one in plan.layout:
        owner = one.name.rpartition(".")[0]
        above = [owner[:end] for end, mark in enumerate(owner) if mark == "."]
        found[next((path for path in (*above, owner) if path in leaves), owner)] += prod(one.shape)
    return max(found.values(), default=0)


def _groups(plan: Plan, step: InitializeDeepSpeed) -> tuple[tuple[int, ...], ...]:
    """A group that trains nothing, and a parameter without elements, leave no trace."""
    held = {one.name: prod(one.shape) for one in plan.layout if one.requires_grad}
    seen = plan.facts.optimizer
    if step.optimizer != "given" or seen is None:
        return (tuple(numel for numel in held.values() if numel),)
    found = [tuple(held[name] for name in group.slots if name and held.get(name)) for group in seen.groups]
    return tuple(some for some in found if some)


def optimizer_of(plan: Plan, usual: OptimizerOf | None) -> OptimizerOf | None:
    """The optimizer that steps in the end: DeepSpeed's form of the given one, or that of its config."""
    for planned in plan.steps:
        match planned.step:
            case ConvertOptimizer(algorithm=name):
                return OptimizerOf(name=name, module="deepspeed", groups=usual.groups if usual else ((),))
            case InitializeDeepSpeed(optimizer="section", settings=settings):
                kind = next((json.loads(s.value) for s in settings if s.path == ("optimizer", "type")), "")
                return OptimizerOf(name=SECTIONS.get(str(kind).lower(), str(kind)), module="deepspeed", groups=((),))
            case _:
                pass
    return usual
