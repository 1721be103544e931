"""Averaging for parameters that stay whole where others are sharded."""

from __future__ import annotations

from prepkit.applying.handlers import problems
from prepkit.interpreter import Handler
from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.objects.whole_gradients import WholeGradients
from prepkit.steps import AverageGradients


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
