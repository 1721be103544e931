"""``torch.compile`` in place: which modules, and with which arguments."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from typing import Any

import torch
from torch.nn import Module

from prepkit.applying.handlers import problems
from prepkit.interpreter import Handler
from prepkit.objects import names
from prepkit.objects.target import Target
from prepkit.steps import CompileModules


def compile_ready(step: CompileModules, target: Target) -> problems.Problems:
    """Every path must be a module that is not compiled yet (CM-1, G-46), and torch must know the backend (K-DY1)."""
    modules = names.named_slots(target.model)
    compiled = (path for path in step.paths if path in modules and _is_compiled(modules[path]))
    unknown = [step.backend] if step.backend not in torch.compiler.list_backends(exclude_tags=None) else []
    fix = "Import what registers it before apply, or plan with inductor."
    return (
        *problems.absent("module", step.paths, modules),
        *problems.told("compile.foreign-backend", unknown, "torch.compile knows no such backend", fix),
        *_misfits(step),
        *problems.told("model.already-compiled", compiled, "compiled already", "Give the model before torch.compile."),
    )


def arguments(step: CompileModules) -> dict[str, Any]:
    """Keyword arguments of ``torch.compile`` besides the backend; those that were left alone are not given."""
    how: dict[str, Any] = {"fullgraph": step.fullgraph, "dynamic": step.dynamic}
    if step.mode != "default":  # backends other than inductor take no mode
        how["mode"] = step.mode
    if step.options:
        how["options"] = {option.name: option.value for option in step.options}
    if step.recompile_limit is not None:
        how["recompile_limit"] = step.recompile_limit
    if step.isolate_recompiles:
        how["isolate_recompiles"] = True
    return how


def _misfits(step: CompileModules) -> problems.Problems:
    """Arguments that this torch does not have, and options that inductor would refuse in the midst of applying."""
    known = inspect.signature(torch.compile).parameters
    older = (name for name in arguments(step) if name not in known)
    what = f"torch.compile of torch {torch.__version__} has no such argument"
    met = problems.told("compile.unknown-option", older, what, "Leave it out of config.compile.")
    if step.backend == "inductor":
        for option in step.options:
            try:
                torch._TorchCompileInductorWrapper(None, {option.name: option.value}, step.dynamic)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                what = f"inductor does not take {option.value!r}: {_reason(option.name, error)}"
                met += problems.told("compile.unknown-option", [option.name], what)
    return met


def _reason(name: str, error: RuntimeError) -> str:
    """Return what torch says; where it would list all of its 600 options, the nearest."""
    from torch import _inductor as inductor  # half a second, and only a refusal asks

    known = inductor.list_options()
    if name.replace("-", "_") in known:
        return str(error)
    near = get_close_matches(name, known, n=1)
    return f"it knows none of that name{f'; did you mean {near[0]}?' if near else ''}"


def compile_do(step: CompileModules, target: Target) -> None:
    """``Module.compile`` on each: the module keeps its class, names and hooks. Compiling itself waits for first use."""
    modules = names.named_slots(target.model)
    how = arguments(step)
    try:
        for path in step.paths:
            if _is_deepspeed(modules[path]):
                modules[path].compile(
                    backend=step.backend, compile_kwargs=how
                )  # its own method, with its own signature
            else:
                modules[path].compile(backend=step.backend, **how)
    except BaseException:
        compile_undo(step, target, None)
        raise


def compile_undo(step: CompileModules, target: Target, memo: None) -> None:
    """Drops the compiled calls; ``Module.compile`` keeps nothing else."""
    del memo
    modules = names.named_slots(target.model)
    for path in step.paths:
        module = modules[path]
        if _is_deepspeed(module):
            vars(module)["_is_compiled"] = False
            module = module.get_submodule("module")
        vars(module).pop("_compiled_call_impl", None)


def _is_deepspeed(module: Module) -> bool:
    return "DeepSpeedEngine" in names.known_bases(type(module))


def _is_compiled(module: Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


COMPILE: Handler[CompileModules, Target, None] = Handler(ready=compile_ready, do=compile_do, undo=compile_undo)
