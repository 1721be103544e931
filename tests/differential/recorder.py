"""Doubles of the functions that prepare a model: each writes down what it is given, and then calls the real one."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.deepspeed_cpu import lean

Calls = list[tuple[str, dict[str, Any]]]
WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "module")
"""Names under which wrappers keep what they wrap."""


def plain(name: str) -> str:
    """A dotted name without the wrappers in it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


@contextmanager
def recorded(model: nn.Module) -> Iterator[Calls]:
    """All calls while the block runs; what they are given first is told by its path in ``model``."""
    paths = {id(module): path for path, module in model.named_modules()}
    calls: Calls = []

    def where(target: Any) -> str:
        if isinstance(target, list | tuple):
            return "+".join(where(one) for one in target)
        target = getattr(target, "__self__", target)  # Module.compile hands a bound method on
        while isinstance(target, nn.Module) and id(target) not in paths:
            inner = next((getattr(target, name) for name in WRAPPERS if hasattr(target, name)), None)
            if inner is None:
                return paths.get(id(getattr(target, "embed", None)), type(target).__name__).removesuffix("embed")
            target = inner
        return paths.get(id(target), type(target).__name__)

    def double(name: str, real: Callable[..., Any], first: int) -> Callable[..., Any]:
        signature = inspect.signature(real)

        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            target, *rest = list(bound.arguments.items())[first:]
            if name == "compile" and not isinstance(getattr(target[1], "__self__", target[1]), nn.Module):
                return real(*args, **kwargs)  # a library compiles a function of its own
            given = {key: value for key, value in rest if key != "kwargs"} | bound.arguments.get("kwargs", {})
            calls.append((f"{name}[{where(target[1])}]", given))
            return real(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for cls in (DistributedDataParallel, FullyShardedDataParallel, CheckpointWrapper):
            stack.enter_context(patch.object(cls, "__init__", double(cls.__name__, cls.__init__, 1)))
        shard = double("fully_shard", fully_shard, 0)
        stack.enter_context(patch("torch.distributed.fsdp.fully_shard", shard))
        stack.enter_context(patch("prepkit.applying.handlers.fsdp2.fully_shard", shard))
        stack.enter_context(patch.object(torch, "compile", double("compile", torch.compile, 0)))
        yield calls


@contextmanager
def initialised() -> Iterator[Calls]:
    """The same of ``deepspeed.initialize``, which gets its model by keyword, and its config under two names."""
    lean()
    import deepspeed

    from prepkit.objects.deepspeed import forget_groups

    forget_groups()  # those of an earlier run in this process
    calls: Calls = []
    real = deepspeed.initialize
    signature = inspect.signature(real)

    def call(**kwargs: Any) -> Any:
        bound = signature.bind(**kwargs)
        bound.apply_defaults()
        given = copy.deepcopy({"config": bound.arguments.pop("config") or bound.arguments.pop("config_params")})
        bound.arguments.pop("config_params", None)
        calls.append(("deepspeed.initialize", bound.arguments | given))
        return real(**kwargs)

    with patch.object(deepspeed, "initialize", call):
        yield calls
