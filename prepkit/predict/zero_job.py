"""What the formulas of ZeRO need: the numbers in DeepSpeed's config, as the plan's one call hands it over."""

from __future__ import annotations

import json
from math import prod
from typing import Any

from attrs import frozen

from prepkit.plan import Plan
from prepkit.predict.optimizers import SECTIONS
from prepkit.predict.owner import OptimizerOf
from prepkit.render_names import itemsize
from prepkit.steps import ConvertOptimizer, InitialiseDeepSpeed

REDUCE_BUCKET = 500_000_000
"""Default ``reduce_bucket_size``, in elements."""
PERSISTENT = 100_000
"""Default ``stage3_param_persistence_threshold``: parameters of at most so many elements are never partitioned away."""
REUSE = 1_000_000_000
"""Default ``stage3_max_live_parameters`` and ``stage3_max_reuse_distance``, in elements."""

OTHERWISE = ("zero_hpz_partition_size", "mics_shard_size", "zero_quantized_weights", "zero_quantized_gradients")
"""Settings of ``zero_optimization`` that change what is held or sent, and that no formula here knows."""


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
    """At stage 1 with float32 gradients that is another optimizer (``BF16_Optimizer``), which sends its padding too."""
    sent_size: int
    """Bytes of one element of a gradient on its way."""
    bucket: int
    overlaps: bool
    """Whether there are two reduce buckets, which take turns."""
    persistent: int
    reuse: int
    """Elements below which a model stays gathered from forward to backward."""
    numels: tuple[tuple[int, bool], ...]
    """Elements of every parameter, and whether it is trained, in the order of the model."""
    groups: tuple[int, ...]
    """Elements that each optimizer group steps."""
    offload_state: bool
    offload_params: bool
    unknown: tuple[str, ...] = ()
    """Settings that no formula knows; then nothing is predicted."""


def zero_of(plan: Plan) -> Zero | None:
    """What the plan's call of ``deepspeed.initialize`` says; None where there is none."""
    step = next((p.step for p in plan.steps if isinstance(p.step, InitialiseDeepSpeed)), None)
    if step is None:
        return None
    said = {setting.path: json.loads(setting.value) for setting in step.settings}

    def look(name: str, default: Any) -> Any:
        return said.get(("zero_optimization", name), default)

    size = itemsize(step.dtype) if step.dtype else itemsize(plan.layout[0].dtype)
    sent = said.get(("communication_data_type",))
    grads = said.get(("data_types", "grad_accum_dtype"))
    places = {kind: look_offload(said, kind) for kind in ("optimizer", "param")}
    odd = [name for name in OTHERWISE if look(name, None) not in (None, False, 0, 1, -1)]
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
        reuse=min(int(look("stage3_max_live_parameters", REUSE)), int(look("stage3_max_reuse_distance", REUSE))),
        numels=tuple((prod(one.shape), one.requires_grad) for one in plan.layout),
        groups=_groups(plan, step),
        offload_state=places["optimizer"] == "cpu",
        offload_params=places["param"] == "cpu",
        unknown=tuple(odd),
    )


NAMES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
"""DeepSpeed's words for dtypes to their bytes."""


def look_offload(said: dict[tuple[str, ...], Any], kind: str) -> str:
    """Where ``offload_optimizer`` or ``offload_param`` puts its tensors."""
    return str(said.get(("zero_optimization", f"offload_{kind}", "device"), "none"))


def _groups(plan: Plan, step: InitialiseDeepSpeed) -> tuple[int, ...]:
    held = {one.name: prod(one.shape) for one in plan.layout if one.requires_grad}
    seen = plan.facts.optimizer
    if step.optimizer == "given" and seen is not None:
        found = [sum(held.get(name, 0) for name in group.slots if name) for group in seen.groups]
        return tuple(numel for numel in found if numel)
    return (sum(held.values()),)


def optimizer_of(plan: Plan, usual: OptimizerOf | None) -> OptimizerOf | None:
    """The optimizer that steps in the end: DeepSpeed's form of the given one, or that of its config."""
    for planned in plan.steps:
        match planned.step:
            case ConvertOptimizer(algorithm=name):
                return OptimizerOf(name=name, module="deepspeed", groups=usual.groups if usual else ((),))
            case InitialiseDeepSpeed(optimizer="section", settings=settings):
                kind = next((json.loads(s.value) for s in settings if s.path == ("optimizer", "type")), "")
                return OptimizerOf(name=SECTIONS.get(str(kind).lower(), str(kind)), module="deepspeed", groups=((),))
            case _:
                pass
    return usual
