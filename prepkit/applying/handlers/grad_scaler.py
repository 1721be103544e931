"""The gradient scaler of float16 training."""

from __future__ import annotations

from typing import Any

from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from prepkit.applying.handlers import problems
from prepkit.interpreter import Handler
from prepkit.objects.target import Target
from prepkit.ranks import launcher
from prepkit.steps import CreateGradScaler


def scaler_ready(step: CreateGradScaler, target: Target) -> problems.Problems:
    """The device must be there: without CUDA, torch would hand out a scaler that does nothing (ST-23)."""
    del target
    return launcher.device_problems(step.device)


def scaler_do(step: CreateGradScaler, target: Target) -> Any:
    """Creates torch's own scaler. Returns the one that it replaces."""
    before = target.scaler
    kind = ShardedGradScaler if step.sharded else GradScaler
    scaler = kind(
        device=step.device,
        init_scale=step.init_scale,
        growth_factor=step.growth_factor,
        backoff_factor=step.backoff_factor,
        growth_interval=step.growth_interval,
    )
    try:
        target.scaler = scaler
        return before
    except BaseException:
        scaler_undo(step, target, before)
        raise


def scaler_undo(step: CreateGradScaler, target: Target, memo: Any) -> None:
    """Forgets the scaler; nothing has been scaled with it yet."""
    del step
    target.scaler = memo


SCALER: Handler[CreateGradScaler, Target, Any] = Handler(ready=scaler_ready, do=scaler_do, undo=scaler_undo)
