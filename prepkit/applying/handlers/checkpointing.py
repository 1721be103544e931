"""Activation checkpointing: what a block's backward recomputes, what it keeps, and where that waits."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.nn import Module
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from prepkit.applying.handlers import problems
from prepkit.interpreter import Handler
from prepkit.objects import names
from prepkit.objects.deepspeed import replaced_linear
from prepkit.objects.recomputation import offloaded, overloads
from prepkit.objects.target import Target
from prepkit.steps import CheckpointModules


def options(step: CheckpointModules) -> dict[str, Any]:
    """Keyword arguments of torch's ``checkpoint_wrapper`` besides the module."""
    given: dict[str, Any] = {"preserve_rng_state": step.preserve_rng_state}
    if step.keep_ops:
        kept = [overload for name in step.keep_ops for overload in overloads(name)]
        given["context_fn"] = partial(create_selective_checkpoint_contexts, kept)
    if step.offload:
        given["checkpoint_fn"] = offloaded
    return given


def checkpoint_ready(step: CheckpointModules, target: Target) -> problems.Problems:
    """Every path must be a module inside the root that is not wrapped yet."""
    modules = names.named_slots(target.model)
    wrapped = (path for path in step.paths if isinstance(modules.get(path), CheckpointWrapper))
    met = problems.absent("module", step.paths, modules)
    met += problems.told("model.already-checkpointed", wrapped, "checkpointed already", problems.PLAIN)
    if "" in step.paths:
        what, fix = "cannot be checkpointed: its wrapper would have no parent", "Name modules inside it."
        met += problems.told("wrap.container", [""], what, fix)
    unknown = (name for name in step.keep_ops if not overloads(name))
    fix = "Import the library that defines it, or write it as torch.ops has it: aten.mm.default."
    met += problems.told("checkpoint.operator", unknown, "torch has no such operator", fix)
    if step.keep_ops and replaced_linear() and not any(hasattr(param, "ds_id") for param in target.model.parameters()):
        what = (
            "ZeRO-3 of an earlier run in this process has left a linear of its own in the place of torch's, and kept "
            "outputs would give wrong gradients"
        )
        met += problems.told("checkpoint.replaced-linear", ["torch.nn.functional.linear"], what)
    return met


def checkpoint_do(step: CheckpointModules, target: Target) -> None:
    """Puts a wrapper into every slot of every parent that holds the module."""
    modules = names.named_slots(target.model)
    done: list[str] = []
    try:
        for path in step.paths:
            inner = modules[path]
            wrapper = checkpoint_wrapper(inner, CheckpointImpl.NO_REENTRANT, **options(step))
            wrapper.training = inner.training
            done.append(path)
            _replace(target.model, inner, wrapper)
    except BaseException:
        _unwrap(target.model, tuple(done))
        raise


def checkpoint_undo(step: CheckpointModules, target: Target, memo: None) -> None:
    """Puts every module back into its slots."""
    del memo
    _unwrap(target.model, step.paths)


def _unwrap(model: Module, paths: tuple[str, ...]) -> None:
    modules = names.named_slots(model)
    for path in reversed(paths):
        if isinstance(wrapper := modules[path], CheckpointWrapper):
            _replace(model, wrapper, wrapper._checkpoint_wrapped_module)


def _replace(model: Module, old: Module, new: Module) -> None:
    slots = [(parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is old]
    for parent, name in slots:
        parent.register_module(name, new)


CHECKPOINT: Handler[CheckpointModules, Target, None] = Handler(
    ready=checkpoint_ready, do=checkpoint_do, undo=checkpoint_undo
)
