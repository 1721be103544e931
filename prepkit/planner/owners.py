"""Who owns what between two optimizer steps: what is counted, clipped, ticked, scaled and kept."""

from __future__ import annotations

from prepkit.config import FP8, MSAMP, DeepSpeed, Mixed, NoClip
from prepkit.config.precision import PRECISIONS
from prepkit.plan import Owners
from prepkit.resolve.resolved import Resolved


def owners(resolved: Resolved) -> Owners:
    """Prepkit owns all of it for the engines of torch itself; DeepSpeed does its own."""
    cfg, facts = resolved.cfg, resolved.facts
    zero = isinstance(cfg.engine, DeepSpeed)
    owner = "DeepSpeed" if zero else "prepkit"
    ticks = "prepkit" if facts.scheduler is not None else "nobody"
    if zero and resolved.deepspeed.scheduler != "outside":
        ticks = "DeepSpeed"
    scales = PRECISIONS[type(cfg.precision)].scales_loss and resolved.trains
    return Owners(
        accumulation=owner,
        accumulation_steps=resolved.accumulation,
        global_batch=resolved.samples_per_step,
        clipping="nobody" if isinstance(cfg.clip, NoClip) else owner,
        clip=cfg.clip,
        scheduler=ticks,
        scheduler_ticks=cfg.scheduler_ticks,
        master_weights=_master_weights(resolved),
        loss_scaling=owner if scales else "nobody",
    )


def _master_weights(resolved: Resolved) -> str:
    """Where the float32 values are that small updates are added to, or why there are none."""
    precision, dtypes = resolved.cfg.precision, resolved.compute_dtypes
    if not resolved.trains:
        return "none: nothing is trained"
    if isinstance(precision, FP8) and isinstance(precision.backend, MSAMP):
        return "none: MS-AMP keeps scaled float16 weights"
    keeps = isinstance(precision, Mixed) and precision.master_weights
    if isinstance(resolved.cfg.engine, DeepSpeed) and dtypes is not None:
        if keeps:
            return f"DeepSpeed's float32 copies, made from the {dtypes.param} parameters"
        return f"none: everything is stepped in {dtypes.param}"
    if keeps:
        return "the parameters themselves, stored in float32"
    low = resolved.low_precision_params
    if low and not isinstance(resolved.cfg.engine, DeepSpeed):
        return f"none: {len(low)} trainable parameters are stepped in {low[0].dtype}"
    return "the parameters themselves, as they are stored"
