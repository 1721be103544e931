"""What is done to gradients between backward and step: averaged where parameters stay whole, scaled in float16."""

from __future__ import annotations

from typing import Any

from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from prepkit.applying.handlers import problems
from prepkit.interpreter import Handler
from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.objects.whole_gradients import WholeGradients
from prepkit.ranks import launcher
from prepkit.steps import AverageGradients, CreateGradScaler


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


def average_ready(step: AverageGradients, target: Target) -> problems.Problems:
    """Every name must be a parameter."""
    return problems.absent("parameter", step.names, names.named_parameters(target.model))


def average_do(step: AverageGradients, target: Target) -> WholeGradients:
    """Hands the parameters to whoever ends a window, and watches every optimizer that holds one of them."""
    if target.mesh is None:
        raise problems.no_mesh("average over")
    params = names.named_parameters(target.model)
    axes = step.axes or target.mesh.mesh_dim_names or ()
    groups = tuple(target.mesh[axis].get_group() for axis in axes if target.mesh[axis].size() > 1)
    whole = WholeGradients(tuple(params[name] for name in step.names), groups)
    whole.watch()
    target.whole_gradients = whole
    return whole


def average_undo(step: AverageGradients, target: Target, memo: WholeGradients) -> None:
    """Watches no longer."""
    del step
    memo.unwatch()
    target.whole_gradients = None


AVERAGE: Handler[AverageGradients, Target, WholeGradients] = Handler(
    ready=average_ready, do=average_do, undo=average_undo
)
