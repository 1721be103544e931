"""What the formulas of ZeRO need: the numbers in DeepSpeed's config, as the plan's one call hands it over."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from typing import Any

from attrs import frozen

from prepkit.plan import Plan
from prepkit.plan.layout import itemsize
from prepkit.predict.optimizers import SECTIONS, OptimizerInputs
from prepkit.predict.unit_contents import created_groups
from prepkit.steps import ConvertOptimizer, CreateOptimizer, InitializeDeepSpeed, MarkLeafModules

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
    def bf16_optimizer(self) -> bool:
        """Whether DeepSpeed takes its ``BF16_Optimizer``, which adds up gradients of all parameters in float32."""
        return self.stage == 1 and self.bfloat16 and self.grad_size == 4 and not self.offload_state

    @property
    def compact(self) -> bool:
        """Whether a rank adds up its part of the gradients in a float32 buffer, not whole gradients as they came."""
        return self.grad_size == 4 and self.size != 4

    @property
    def largest(self) -> int:
        """Elements of the largest trained parameter."""
        return max((numel for numels in self.groups for numel in numels), default=0)

    @property
    def stepped(self) -> int:
        """Elements that are trained, without padding."""
        return sum(map(sum, self.groups))


Settings = dict[tuple[str, ...], Any]
"""Path of a setting in DeepSpeed's config to its value."""


def zero_of(plan: Plan) -> Zero | None:
    """Return what the plan's call of ``deepspeed.initialize`` says; None where there is none."""
    step = next((p.step for p in plan.steps if isinstance(p.step, InitializeDeepSpeed)), None)
    if step is None:
        return None
    settings: Settings = {setting.path: json.loads(setting.value) for setting in step.settings}

    def option(path: str, default: Any) -> Any:
        return _option(settings, path, default)

    size = itemsize(step.dtype) if step.dtype else itemsize(plan.layout[0].dtype)
    sent = settings.get(("communication_data_type",))
    grads = settings.get(("data_types", "grad_accum_dtype"))
    return Zero(
        stage=step.stage,
        ranks=step.data_parallel,
        size=size,
        bfloat16=step.dtype == "bfloat16",
        grad_size=itemsize(str(grads)) if grads else size,
        sent_size=itemsize(str(sent)) if sent else size,
        bucket=int(option("reduce_bucket_size", REDUCE_BUCKET)),
        overlaps=bool(option("overlap_comm", step.stage == 3)),
        persistent=int(option("stage3_param_persistence_threshold", PERSISTENT)),
        live=int(option("stage3_max_live_parameters", REUSE)),
        reuse=int(option("stage3_max_reuse_distance", REUSE)),
        sub_group=int(option("sub_group_size", SUB_GROUP)) or SUB_GROUP,
        numels=tuple((prod(layout.shape), layout.requires_grad) for layout in plan.layout),
        module=_largest_module(plan),
        groups=_groups(plan, step),
        offload_state=_offload_device(settings, "optimizer") == "cpu",
        offload_params=_offload_device(settings, "param") == "cpu",
        pins_state=option("offload_optimizer.pin_memory", default=True) is not False,
        at_once=bool(settings.get(("bf16", "immediate_grad_update"), False)),
        unknown=_unknown(plan, step, settings),
    )


def _option(settings: Settings, path: str, default: Any) -> Any:
    """A setting of ``zero_optimization``, by its dotted path."""
    return settings.get(("zero_optimization", *path.split(".")), default)


def _offload_device(settings: Settings, kind: str) -> str:
    """Return where ``offload_optimizer`` or ``offload_param`` puts its tensors: ``none``, ``cpu``, ``nvme``."""
    return str(_option(settings, f"offload_{kind}.device", "none"))


def _unknown(plan: Plan, step: InitializeDeepSpeed, settings: Settings) -> tuple[str, ...]:
    """Return what this call asks for and no formula knows, a few words each."""
    words = [name for name in OTHERWISE if _option(settings, name, None) not in (None, False, 0, 1, 1.0, -1)]
    words += [f"{name}=false" for name in USUALLY if _option(settings, name, default=True) is False]
    words += [name for name in LOW if settings.get(tuple(name.split(".")), False)]
    devices = (_offload_device(settings, kind) for kind in ("optimizer", "param"))
    words += [f"offload to {device}" for device in devices if device not in ("none", "cpu")]
    words += ["ZeRO stage 0"] * (step.stage == 0)
    words += ["dtypes that differ"] * (len({layout.dtype for layout in plan.layout}) > 1)
    words += ["DeepSpeed's own tensor parallelism"] * any("split" in layout.placements for layout in plan.layout)
    return tuple(words)


def _largest_module(plan: Plan) -> int:
    """Elements of the largest module: of its own parameters, or of all inside where it is marked as a leaf."""
    leaves = next((set(p.step.paths) for p in plan.steps if isinstance(p.step, MarkLeafModules)), set())
    numels: Counter[str] = Counter()
    for layout in plan.layout:
        module = layout.name.rpartition(".")[0]
        outer = [module[:end] for end, mark in enumerate(module) if mark == "."]
        numels[next((path for path in (*outer, module) if path in leaves), module)] += prod(layout.shape)
    return max(numels.values(), default=0)


def _groups(plan: Plan, step: InitializeDeepSpeed) -> tuple[tuple[int, ...], ...]:
    """Elements of the parameters of each optimizer group; empty parameters and groups without any are left out."""
    numels = {layout.name: prod(layout.shape) for layout in plan.layout if layout.requires_grad}
    optimizer = plan.facts.optimizer
    created = next((p.step for p in plan.steps if isinstance(p.step, CreateOptimizer)), None)
    if step.optimizer == "given" and created is not None:
        made = (tuple(numels[name] for name in names if numels.get(name)) for names, _ in created_groups(created))
        return tuple(group for group in made if group)
    if step.optimizer != "given" or optimizer is None:
        return (tuple(numel for numel in numels.values() if numel),)
    groups = (tuple(numels[name] for name in group.slots if name and numels.get(name)) for group in optimizer.groups)
    return tuple(group for group in groups if group)


def optimizer_of(plan: Plan, usual: OptimizerInputs | None) -> OptimizerInputs | None:
    """The optimizer that steps in the end: ``usual``, DeepSpeed's form of it, or that of DeepSpeed's own config."""
    for planned in plan.steps:
        match planned.step:
            case ConvertOptimizer(algorithm=name):
                return OptimizerInputs(name=name, module="deepspeed", groups=usual.groups if usual else ((),))
            case InitializeDeepSpeed(optimizer="section", settings=settings):
                kind = next((json.loads(entry.value) for entry in settings if entry.path == ("optimizer", "type")), "")
                return OptimizerInputs(
                    name=SECTIONS.get(str(kind).lower(), str(kind)), module="deepspeed", groups=((),)
                )
            case _:
                pass
    return usual
