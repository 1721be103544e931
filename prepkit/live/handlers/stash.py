"""Values that rank 0 holds are set aside while the model is cut and sharded, before they are sent."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from prepkit.live.handlers import messages
from prepkit.live.handlers.weights import tensors
from prepkit.live.interpreter import Handler
from prepkit.live.model import names
from prepkit.live.model.target import Stashed, Target
from prepkit.plan.broadcast import ROOT
from prepkit.steps import StashTensors


class NoValues(RuntimeError):
    """Rank 0 was to send tensors that it has no values of; names them."""


def aside_ready(step: StashTensors, target: Target) -> tuple[str, ...]:
    """Every name must be there. That rank 0 has values is asked when all are there, or the others would wait for it."""
    there = tensors(target)
    return messages.absent("tensor", (*step.params, *step.buffers), there)


def aside_do(step: StashTensors, target: Target) -> tuple[str, ...]:
    """Exchanges every parameter's content with one on meta: ties stay tied, an optimizer keeps what it holds.

    Waits for the other ranks. Returns the names of what had values. Raises ``NoValues`` on rank 0, and what the first
    to fail has said on the others; ``RuntimeError`` where a graph or a weak reference holds a parameter.
    """
    there, held = tensors(target), names.named_parameters(target.model)
    if own_rank() == ROOT:
        expect([name for name in (*step.params, *step.buffers) if there[name].is_meta])
    try:
        for name in step.params:
            if not held[name].is_meta:
                _set_aside(name, held[name], target)
        target.together()
        return tuple(target.stashed)
    except BaseException:
        aside_undo(step, target, ())
        raise


def aside_undo(step: StashTensors, target: Target, memo: tuple[str, ...]) -> str | None:
    """Gives every parameter its values again, but for those that were sent and are freed."""
    del step
    gone = [name for name in memo if name not in target.stashed]
    while target.stashed:
        _, one = target.stashed.popitem()
        if one.held.is_meta:
            continue  # a failure came before the exchange
        one.held.data = one.held.data.to(one.device)
        _swap(one.param, one.held)
    return f"{messages.listed(gone)}: sent, and freed on this rank" if gone else None


def _set_aside(name: str, param: Parameter, target: Target) -> None:
    bare = Parameter(torch.empty_like(param, device="meta", requires_grad=False), requires_grad=param.requires_grad)
    vars(bare).update(vars(param))  # what an author has noted on a parameter stays to be read
    target.stashed[name] = Stashed(param=param, held=bare, device=param.device)
    try:
        _swap(param, bare)  # from here on ``bare`` is what the parameter was
    except RuntimeError as error:
        raise RuntimeError(
            f"{name}: held by more than the model and its optimizer; let go of the losses, outputs and references from "
            f"before apply ({error})"
        ) from error
    bare.data = bare.data.to("cpu")


def _swap(one: Tensor, other: Tensor) -> None:
    torch.utils.swap_tensors(one, other)  # type: ignore[no-untyped-call]  # torch has no types here


def own_rank() -> int:
    """That of the process; where there is no group it is the one that has the values."""
    return dist.get_rank() if dist.is_initialized() else ROOT


def expect(empty: list[str]) -> None:
    """Raises ``NoValues`` where there are any names of tensors without values."""
    if empty:
        raise NoValues(
            f"rank {ROOT} has no values of {messages.listed(empty)}, which it is to send; build its model outside "
            "torch.device('meta'), or plan with weights=LoadWeights(path) or InitWeights()"
        )


ASIDE: Handler[StashTensors, Target, tuple[str, ...]] = Handler(ready=aside_ready, do=aside_do, undo=aside_undo)
