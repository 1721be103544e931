"""Batch norms whose statistics are taken over all ranks (torch ``SyncBatchNorm``)."""

from __future__ import annotations

from torch.nn import Module, SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from prepkit.applying.handlers import problems, swap_layers
from prepkit.interpreter import Handler
from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.steps import ConvertSyncBatchNorm

Memo = tuple[tuple[Module, Module], ...]
"""Each old module with the one that stands in its place."""


def convert_ready(step: ConvertSyncBatchNorm, target: Target) -> problems.Problems:
    """Every path must be a batch norm that is not synchronised yet."""
    modules = names.named_slots(target.model)
    other = (path for path in step.paths if path in modules and not _is_plain(modules[path]))
    missing = problems.absent("module", step.paths, modules)
    return missing + problems.told("plan.other-model", other, "no plain batch norm")


def convert_do(step: ConvertSyncBatchNorm, target: Target) -> Memo:
    """Replaces each one in every parent. Parameters and buffers stay the same objects, so an optimizer keeps them."""
    modules = names.named_slots(target.model)
    done: list[tuple[Module, Module]] = []
    try:
        for old in dict.fromkeys(modules[path] for path in step.paths):
            new = SyncBatchNorm.convert_sync_batchnorm(old)  # type: ignore[no-untyped-call]  # torch has no types
            new.train(old.training)
            swap_layers.carry_over(old, new)
            done.append((old, new))
            _put(target, old, new)
        return tuple(done)
    except BaseException:
        convert_undo(step, target, tuple(done))
        raise


def convert_undo(step: ConvertSyncBatchNorm, target: Target, memo: Memo) -> None:
    """Puts the old modules back."""
    del step
    for old, new in reversed(memo):
        _put(target, new, old)


def _put(target: Target, old: Module, new: Module) -> None:
    if target.model is old:
        target.model = new
    slots = [(parent, name) for parent in target.model.modules() for name, m in parent._modules.items() if m is old]
    for parent, name in slots:
        parent.register_module(name, new)


def _is_plain(module: Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm)


CONVERT: Handler[ConvertSyncBatchNorm, Target, Memo] = Handler(ready=convert_ready, do=convert_do, undo=convert_undo)
