"""Rank 0's values are stashed on the host while the model is parallelized and sharded, before ``send_weights`` runs.

In the middle of the steps every rank must look alike: sharding a model that has values on rank 0 and none on the
others would give rank 0 other objects, and the device memory for a whole model. So before it, every parameter that has
values changes places with an empty one on meta; the values wait in ``target.stashed`` in the memory of the host, where
rank 0 holds one model and every other rank whatever values it brought along, until the step that sends each of them.

``swap_tensors`` exchanges what two objects *are*: the parameter object stays the one that modules, ties and optimizer
hold, and becomes the empty tensor; a second object becomes the stashed values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter

from prepkit.applying.handlers import problems
from prepkit.applying.handlers.named_tensors import named_tensors
from prepkit.court import refused
from prepkit.interpreter import Handler
from prepkit.objects import names
from prepkit.objects.target import Stashed, Target
from prepkit.plan.broadcast import ROOT
from prepkit.ranks.world import world
from prepkit.steps import StashTensors


def stash_ready(step: StashTensors, target: Target) -> problems.Problems:
    """Every name must be there. That rank 0 has values is asked when all are there, or the others would wait for it."""
    return problems.absent("tensor", (*step.params, *step.buffers), named_tensors(target))


def stash_do(step: StashTensors, target: Target) -> tuple[str, ...]:
    """Exchanges every parameter's content with one on meta: ties stay tied, an optimizer keeps what it holds.

    Waits for the other ranks. Returns the names of what had values. Raises ``RunRefused`` on rank 0, and what the first
    to fail has said on the others; also where a graph or a weak reference holds a parameter.
    """
    tensors, params = named_tensors(target), names.named_parameters(target.model)
    if world().rank == ROOT:
        require_values([name for name in (*step.params, *step.buffers) if tensors[name].is_meta])
    try:
        for name in step.params:
            if not params[name].is_meta:
                _stash(name, params[name], target)
        target.together()
        return tuple(target.stashed)
    except BaseException:
        stash_undo(step, target, ())
        raise


def stash_undo(step: StashTensors, target: Target, memo: tuple[str, ...]) -> str | None:
    """Gives every parameter its values again, but for those that were sent and are freed."""
    del step
    sent = [name for name in memo if name not in target.stashed]
    while target.stashed:
        _, stashed = target.stashed.popitem()
        if stashed.held.is_meta:
            continue  # a failure came before the exchange
        stashed.held.data = stashed.held.data.to(stashed.device)
        _swap(stashed.param, stashed.held)
    return f"{problems.listed(sent)}: sent, and freed on this rank" if sent else None


def _stash(name: str, param: Parameter, target: Target) -> None:
    """One parameter. It is noted in the target first, so that an interruption in between can be taken back."""
    twin = Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
    vars(twin).update(vars(param))  # what an author has noted on a parameter stays to be read
    target.stashed[name] = Stashed(param=param, held=twin, device=param.device)
    try:
        _swap(param, twin)  # from here on ``twin`` is what the parameter was
    except RuntimeError as error:
        what = f"held by more than the model and its optimizer ({error})"
        raise refused("weights.held-elsewhere", name, what) from error
    twin.data = twin.data.to("cpu")


def _swap(first: Tensor, second: Tensor) -> None:
    torch.utils.swap_tensors(first, second)  # type: ignore[no-untyped-call]  # torch has no types here


def require_values(empty: list[str]) -> None:
    """Raises ``RunRefused`` where there are any names of tensors without values."""
    if empty:
        fix = "Build its model outside torch.device('meta'), or plan with weights=LoadWeights(path) or InitWeights()."
        raise refused("plan.no-weights", problems.listed(empty), f"rank {ROOT} has no values of it to send", fix)


STASH: Handler[StashTensors, Target, tuple[str, ...]] = Handler(ready=stash_ready, do=stash_do, undo=stash_undo)
