"""Methods that run as the forward does: torch's ``register_fsdp_forward_method``, or the forward of the wrapper."""

from __future__ import annotations

from attrs import frozen
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn import Module

from prepkit.applying.handlers import problems
from prepkit.interpreter import Handler
from prepkit.objects import names
from prepkit.objects.entry_point import IN_STEP, MARK, ThroughWrapper, like_forward
from prepkit.objects.target import Target
from prepkit.steps import RegisterEntryPoints


@frozen(eq=False, repr=False)
class Registered:
    """What the way back needs."""

    holder: Module
    names: tuple[str, ...]
    told: tuple[Module, ...]
    """Modules whose ``generate`` was told that ranks go in step."""


def register_ready(step: RegisterEntryPoints, target: Target) -> problems.Problems:
    """The model must have every method, and none may stand in the instance already."""
    inner = names.unwrap_root(target.model)[-1]
    marked = ["model"] if MARK in vars(inner) else []
    return (
        *problems.absent("method", step.names, {name for name in step.names if hasattr(inner, name)}),
        *problems.told("model.already-wrapped", marked, "its methods are entry points already", problems.PLAIN),
    )


def register_do(step: RegisterEntryPoints, target: Target) -> Registered:
    """Puts a callable for each method into the instance of the outermost module."""
    outer, inner = target.model, names.unwrap_root(target.model)[-1]
    generators = [m for m in inner.modules() if callable(getattr(type(m), "generate", None))] if step.in_step else []
    done = Registered(outer, step.names, tuple(m for m in generators if IN_STEP not in vars(m)))
    try:
        for name in step.names:
            method = like_forward(inner, getattr(inner, name))
            vars(outer)[name] = ThroughWrapper(outer, inner, method) if step.through == "wrapper" else method
            if step.through == "units":
                register_fsdp_forward_method(outer, name)
        for module in done.told:
            vars(module)[IN_STEP] = True
        vars(outer)[MARK] = step.names
        return done
    except BaseException:
        register_undo(step, target, done)
        raise


def register_undo(step: RegisterEntryPoints, target: Target, memo: Registered) -> None:
    """Leaves the methods to the classes."""
    del step, target
    for name in (*memo.names, MARK):
        vars(memo.holder).pop(name, None)
    for module in memo.told:
        vars(module).pop(IN_STEP, None)


REGISTER: Handler[RegisterEntryPoints, Target, Registered] = Handler(
    ready=register_ready, do=register_do, undo=register_undo
)
