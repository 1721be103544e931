"""What a handler may do other than the plan says, to be planted in its place (``planted``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from prepkit import steps as s
from prepkit.interpreter import Handler
from prepkit.objects import names
from prepkit.objects.target import Stashed, Target
from tests.support.fragile_model import Tiny

FaultyDo = Callable[[Any, Target, Handler[Any, Target, Any]], Any]
"""In the place of a handler's ``do``; gets step, target and the real handler."""


def nothing(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    """Does not act."""
    return {} if isinstance(step, s.MoveModel) else ()


def changed(**fields: Any) -> FaultyDo:
    """Does a step with other values than the plan's."""
    return lambda step, target, real: real.do(evolve(step, **fields), target)


def afterwards(act: Callable[[Target], None]) -> FaultyDo:
    """Does the step, and something that nobody asked for."""

    def do(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
        memo = real.do(step, target)
        act(target)
        return memo

    return do


def untie(target: Target) -> None:
    head: Any = target.model.get_submodule("head")
    head.weight = Parameter(head.weight.detach().clone())


def freeze(target: Target) -> None:
    target.model.get_parameter("layers.1.inner.weight").requires_grad = False


def uninitialize(target: Target) -> None:
    held: Any = target.model
    held.passing = torch.full_like(held.passing, 7.7)


def leave_on_meta(target: Target) -> None:
    held: Any = target.model
    held.passing = held.passing.to("meta")


def lose_buffer(target: Target) -> None:
    del target.model._buffers["passing"]


def cast_buffer(target: Target) -> None:
    held: Any = target.model
    held.kept = held.kept.half()


def compile_twin(step: Any, target: Target, real: Handler[Any, Target, Any]) -> None:
    """As ``torch.compile(module)`` whose result is dropped, bound to a copy of the block."""
    for path in step.paths:
        module = names.named_slots(target.model)[path]
        twin = copy.deepcopy(module)
        twin.compile(backend="eager")
        module._compiled_call_impl = twin._compiled_call_impl


def upcast_but_one(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    return real.do(evolve(step, names=step.names[1:]), target)


def average_but_one(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    return real.do(evolve(step, names=step.names[1:]), target)


def transpose(target: Target) -> None:
    outer = target.model.get_parameter("layers.1.outer.weight")
    outer.data = outer.data.t().contiguous().t()


def ungrouped(target: Target) -> None:
    assert target.whole_gradients is not None
    target.whole_gradients.groups = ()


def shard_but_one(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    return real.do(evolve(step, units=step.units[1:]), target)


def unhook(target: Target) -> None:
    block = names.named_slots(target.model)["layers.0"]
    block._forward_pre_hooks.clear()


def replace_block(target: Target) -> None:
    model: Any = target.model
    model.layers[0] = Tiny().layers[0]


def bind_old(step: Any, target: Target, real: Handler[Any, Target, Any]) -> tuple[()]:
    """The optimizer gets detached copies, as one has that was not rebound."""
    assert target.optimizer is not None
    held = names.named_parameters(target.model)
    for group, slots in zip(target.optimizer.param_groups, step.slots, strict=True):
        group["params"] = [Parameter(_whole(held[name]).clone()) for name in slots]
    target.released.clear()
    return ()


def _whole(param: Parameter) -> torch.Tensor:
    return param.detach().to_local() if isinstance(param, DTensor) else param.detach()


def lose_state(target: Target) -> None:
    assert target.optimizer is not None
    target.optimizer.state.clear()


def whole_state(target: Target) -> None:
    assert target.optimizer is not None
    for param, state in target.optimizer.state.items():
        state["exp_avg"] = torch.zeros(param.shape)


def long_state(target: Target) -> None:
    assert target.optimizer is not None
    for param, state in target.optimizer.state.items():
        state["exp_avg"] = torch.zeros(param.numel() + 1)


def create_over_clones(step: Any, target: Target, real: Handler[Any, Target, Any]) -> None:
    real.do(step, target)
    assert target.optimizer is not None
    (group,) = target.optimizer.param_groups
    group["params"] = [Parameter(param.detach().clone()) for param in group["params"]]


def another_optimizer(target: Target) -> None:
    assert target.optimizer is not None
    other = copy.copy(target.optimizer)
    other.param_groups = [dict(group) for group in other.param_groups]  # shared ones would follow the scheduler
    target.optimizer = other


def drop_slot(target: Target) -> None:
    assert target.optimizer is not None
    target.optimizer.param_groups[0]["params"].pop()


def unwrap_checkpoint(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    return real.do(evolve(step, paths=step.paths[:-1]), target)


def same_rank(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    memo = real.do(step, target)
    target.loaders[step.index].source.batches.part = 0
    return memo


def unwrapped_loader(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    memo = real.do(step, target)
    target.loaders[step.index] = target.loaders[step.index].source.loader
    return memo


def own_buffer(target: Target) -> None:
    held: Any = target.model
    held.kept = held.kept + dist.get_rank()


def parallelize_but_one(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    return real.do(evolve(step, styles=step.styles[1:]), target)


def unhook_layer(target: Target) -> None:
    layer = names.named_slots(target.model)["layers.1.inner"]
    layer._forward_pre_hooks.clear()


def zero_one(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    stage = ("zero_optimization", "stage")
    settings = tuple(evolve(one, value="1") if one.path == stage else one for one in step.settings)
    return real.do(evolve(step, settings=settings), target)


def read_but_one(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    return real.do(evolve(step, sources=step.sources[1:]), target)


def read_but_a_part(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    return real.do(evolve(step, sources=tuple(one for one in step.sources if one.key != "rest")), target)


def exchange_parts(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    """The second part of a tensor is read into the place of the first, which is smaller."""
    (top,) = (one for one in step.sources if one.key == "top")
    sources = tuple(evolve(one, chunk=top.chunk) if one.key == "rest" else one for one in step.sources)
    return real.do(evolve(step, sources=sources), target)


def exchange_sources(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    """Two tensors of different sizes are read into each other's place."""
    small = next(one for one in step.sources if one.name == "layers.0.scale")
    large = next(one for one in step.sources if one.name == "layers.0.outer.weight")
    others = tuple(one for one in step.sources if one not in (small, large))
    crossed = (evolve(small, name=large.name), evolve(large, name=small.name))
    return real.do(evolve(step, sources=(*others, *crossed)), target)


def write_passing(target: Target) -> None:
    held: Any = target.model
    held.passing.add_(1)


def stash_but_one(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    return real.do(evolve(step, params=step.params[1:]), target)


def send_but_one(step: Any, target: Target, real: Handler[Any, Target, Any]) -> Any:
    return real.do(evolve(step, tensors=step.tensors[1:]), target)


def write_kept(target: Target) -> None:
    """On all ranks alike, so that they are equal."""
    held: Any = target.model
    held.kept.add_(1)


def forget_values(target: Target) -> None:
    """A part that no later step fills."""
    target.unfilled.add("a part")


def keep_stashed(target: Target) -> None:
    target.stashed["embed.weight"] = Stashed(
        param=target.model.get_parameter("embed.weight"), held=Parameter(torch.ones(1)), device=torch.device("cpu")
    )
