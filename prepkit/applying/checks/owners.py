"""Who counts, clips, scales, ticks and keeps master weights: what the plan says of it against what stands there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prepkit.config import ClipNorm
from prepkit.objects.names import known_bases
from prepkit.objects.state import LiveModel
from prepkit.plan import Owners, Plan
from prepkit.plan.attestation import Check, each, same

NOBODY = "nobody"


def checks(plan: Plan, live: LiveModel) -> Iterator[Check]:
    """One check per owner. prepkit's own driver does what no engine, scaler or scheduler of another does."""
    owners, target = plan.owners, live.target
    engine = target.model if "DeepSpeedEngine" in known_bases(type(target.model)) else None
    yield same("owners", "loss scaling", owners.loss_scaling, _scaling(target.scaler, engine))
    yield same("owners", "accumulation", owners.accumulation, "prepkit" if engine is None else "DeepSpeed")
    yield same("owners", "scheduler", owners.scheduler, _scheduler(target.scheduler, engine))
    if engine is not None:
        yield from _engine(owners, engine)
    yield each("owners", "master weights", list(_low(plan, live)) if engine is None else list(_copies(plan, engine)))


def _scaling(scaler: Any, engine: Any) -> str:
    if engine is not None and engine.fp16_enabled():
        return "DeepSpeed"
    return "prepkit" if scaler is not None and scaler.is_enabled() else NOBODY


def _scheduler(scheduler: Any, engine: Any) -> str:
    if engine is not None and engine.lr_scheduler is not None:
        return "DeepSpeed"
    return "prepkit" if scheduler is not None else NOBODY


def _engine(owners: Owners, engine: Any) -> Iterator[Check]:
    """What DeepSpeed itself counts and clips."""
    yield same("owners", "micro-batches of a window", owners.accumulation_steps, engine.gradient_accumulation_steps())
    most = owners.clip.max_norm if isinstance(owners.clip, ClipNorm) and owners.clipping == "DeepSpeed" else 0.0
    yield same("owners", "DeepSpeed clips to", float(most), float(engine.gradient_clipping() or 0.0))


def _low(plan: Plan, live: LiveModel) -> Iterator[str]:
    """Trained parameters in 16 bits although the plan says that they are their own float32 master weights."""
    if not plan.owners.master_weights.startswith("the parameters themselves, stored in float32"):
        return
    for layout in plan.layout:
        param = live.params.get(layout.name)
        if layout.requires_grad and param is not None and str(param.dtype) in ("torch.bfloat16", "torch.float16"):
            yield f"{layout.name} is trained in {str(param.dtype).removeprefix('torch.')}"


def _copies(plan: Plan, engine: Any) -> Iterator[str]:
    """What is missing of the float32 copies that DeepSpeed was to make."""
    if not plan.owners.master_weights.startswith("DeepSpeed's float32 copies"):
        return
    kept = (
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
        "fp32_groups_flat",
        "fp32_groups",
    )
    groups = [group for name in kept for group in getattr(engine.optimizer, name, None) or ()]
    parts = [part for group in groups for part in (group if isinstance(group, list) else [group])]  # unfused: one each
    if not groups:
        yield f"{type(engine.optimizer).__name__} keeps none"
    yield from (f"a group of them is {part.dtype}" for part in parts if str(part.dtype) != "torch.float32")
