"""Float8 with torchao and MS-AMP, which are imported when a step needs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from attrs import frozen
from torch.nn import Linear, Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from prepkit.applying.handlers import problems
from prepkit.applying.handlers.swap_layers import Swapped, layer_problems, library_problems, put_back, swap
from prepkit.findings import RunRefused
from prepkit.interpreter import Handler
from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.steps import ConvertFP8Linears, InitializeMSAMP, PrecomputeFloat8Scales

# --- torchao -------------------------------------------------------------------------------------------------------


def convert_ready(step: ConvertFP8Linears, target: Target) -> problems.Problems:
    """The library must be there, and every layer a plain Linear without hooks."""
    return library_problems("torchao.float8", "torchao") + layer_problems(step.paths, Linear, target.model)


def convert_do(step: ConvertFP8Linears, target: Target) -> tuple[Swapped, ...]:
    """One call of torchao's ``convert_to_float8_training`` per layer, so that only the planned ones are converted."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(
        Float8LinearConfig.from_recipe_name(step.recipe),
        enable_fsdp_float8_all_gather=step.all_gather,
        pad_inner_dim=step.pad_inner_dim,
        emulate=step.emulate,
    )

    def make(layer: Module) -> Module:
        converted: Module = convert_to_float8_training(
            layer, config=config
        )  # a Linear by itself is returned, not changed
        return converted

    return swap(target.model, step.paths, make)


def convert_undo(step: ConvertFP8Linears, target: Target, memo: tuple[Swapped, ...]) -> None:
    """Puts the Linears back, whose parameters were never changed."""
    del step
    put_back(target.model, memo)


CONVERT: Handler[ConvertFP8Linears, Target, tuple[Swapped, ...]] = Handler(
    ready=convert_ready, do=convert_do, undo=convert_undo
)


def scales_ready(step: PrecomputeFloat8Scales, target: Target) -> problems.Problems:
    """The library must be there. An optimizer may still be created by a step before this one."""
    del step, target
    return library_problems("torchao.float8", "torchao")


def scales_do(step: PrecomputeFloat8Scales, target: Target) -> RemovableHandle:
    """A hook after ``optimizer.step``: collective, one reduction over all float8 weights of the model."""
    del step
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    if target.optimizer is None:
        raise RunRefused(problems.no_optimizer(target))
    model = target.model

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        precompute_float8_dynamic_scale_for_fsdp(model)

    return target.optimizer.register_step_post_hook(after)


def scales_undo(step: PrecomputeFloat8Scales, target: Target, memo: RemovableHandle) -> None:
    """Takes the hook away."""
    del step, target
    memo.remove()


SCALES: Handler[PrecomputeFloat8Scales, Target, RemovableHandle] = Handler(
    ready=scales_ready, do=scales_do, undo=scales_undo
)

# --- MS-AMP --------------------------------------------------------------------------------------------------------

WIDE = "use_fp32_linear"
"""Attribute by which MS-AMP's ``LinearReplacer`` is told to leave a Linear."""
_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute in which torch's DDP finds the names that it leaves out, and in which MS-AMP puts its own."""


@frozen(repr=False)
class BeforeMSAMP:
    """Model and optimizer as they were put together before MS-AMP: what is needed to put them together again."""

    model: Module
    optimizer: Optimizer
    modules: tuple[tuple[Module, dict[str, Module | None], dict[str, torch.nn.Parameter | None]], ...]
    """Each module with its children and parameters."""
    slots: tuple[tuple[torch.Tensor, ...], ...]
    defaults: dict[str, Any]
    groups: tuple[dict[str, Any], ...]
    """Options of each group."""
    ignored: Any
    scheduled: bool
    """The scheduler drives the optimizer."""


def msamp_ready(step: InitializeMSAMP, target: Target) -> problems.Problems:
    """MS-AMP and an optimizer must be there; under DDP, MS-AMP's own wrapper must stand in the place of torch's."""
    met = library_problems("msamp", "msamp")
    met += problems.absent("module", (*step.linears, *step.kept), names.named_modules(target.model))
    met += problems.no_optimizer(target)
    ddp = torch.nn.parallel.DistributedDataParallel
    if step.reduced and not met and not ddp.__module__.startswith("msamp"):
        what = "this msamp leaves torch's DistributedDataParallel as it is, which would not reduce float8 gradients"
        met += problems.told(
            "fp8.library-too-old", ["msamp"], what, "Install a newer one, or plan with backend=TorchAO()."
        )
    return met


def msamp_do(step: InitializeMSAMP, target: Target) -> BeforeMSAMP:
    """``msamp.initialize``, which returns another optimizer over the same groups; the scheduler follows it."""
    import msamp

    if target.optimizer is None:
        raise RunRefused(problems.no_optimizer(target))
    before = _before(target.model, target.optimizer, target.scheduler)
    modules = names.named_modules(target.model)
    try:
        for path in step.kept:
            vars(modules[path])[WIDE] = True
        target.together()  # rank 0's scaled weights are sent to all
        target.model, target.optimizer = msamp.initialize(target.model, target.optimizer, opt_level=step.opt_level)
        if before.scheduled:
            target.scheduler.optimizer = target.optimizer
        return before
    except BaseException:
        msamp_undo(step, target, before)
        raise


def _before(model: Module, optimizer: Optimizer, scheduler: Any) -> BeforeMSAMP:
    return BeforeMSAMP(
        model=model,
        optimizer=optimizer,
        modules=tuple((module, dict(module._modules), dict(module._parameters)) for module in model.modules()),
        slots=tuple(tuple(group["params"]) for group in optimizer.param_groups),
        defaults=dict(optimizer.defaults),
        groups=tuple({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups),
        ignored=getattr(model, _IGNORED, None),
        scheduled=getattr(scheduler, "optimizer", None) is optimizer,
    )


def msamp_undo(step: InitializeMSAMP, target: Target, memo: BeforeMSAMP) -> None:
    """Puts children, parameters and slots back where they were; MS-AMP has copied the values, not changed them."""
    target.model, target.optimizer = memo.model, memo.optimizer
    for module, children, params in memo.modules:
        module._modules.clear()
        module._modules.update(children)
        module._parameters.clear()
        module._parameters.update(params)
    for group, slots, options in zip(memo.optimizer.param_groups, memo.slots, memo.groups, strict=True):
        group.clear()
        group.update(options, params=list(slots))
    memo.optimizer.defaults.clear()
    memo.optimizer.defaults.update(memo.defaults)
    modules = names.named_modules(memo.model)
    for path in step.kept:
        vars(modules[path]).pop(WIDE, None)
    vars(memo.model).pop(_IGNORED, None)
    if memo.ignored is not None:
        vars(memo.model)[_IGNORED] = memo.ignored
    if memo.scheduled:
        target.scheduler.optimizer = memo.optimizer


MSAMP: Handler[InitializeMSAMP, Target, BeforeMSAMP] = Handler(ready=msamp_ready, do=msamp_do, undo=msamp_undo)
