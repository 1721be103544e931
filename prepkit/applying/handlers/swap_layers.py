"""Layers taken out of a model and others put in their place, under the same names; and the way back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib import import_module

from attrs import frozen
from torch.nn import Module

from prepkit.applying.handlers import problems
from prepkit.objects import names

_TABLES = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks"),
    *("_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Where torch keeps the hooks of a module."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@frozen(repr=False)
class Swapped:
    """One layer that was replaced."""

    old: Module
    new: Module


def library_problems(module: str, package: str, rule: str = "fp8.library-missing") -> problems.Problems:
    """Why a library cannot be used here; empty when it can be imported."""
    try:
        import_module(module)
    except ImportError as error:
        return problems.told(rule, [module], f"cannot be imported: {error}", f"Type pip install {package}.")
    return ()


def layer_problems(paths: Iterable[str], cls: type[Module], model: Module) -> problems.Problems:
    """Return what keeps these modules from being replaced: not there, another class, or hooks that would be lost."""
    paths, modules = tuple(paths), names.named_modules(model)
    layers = {path: modules[path] for path in paths if path in modules}
    other = [path for path, module in layers.items() if type(module) is not cls]
    kind = type(layers[other[0]]).__name__ if other else ""
    lost, after = "hooks would be lost with the layer", "Register them after preparing."
    hooked = (path for path, module in layers.items() if any(getattr(module, name) for name in _HOOKS))
    inside = (pair for path, module in layers.items() for pair in module.named_parameters(path))
    return (
        *problems.absent("module", paths, modules),
        *problems.told("plan.other-model", other, f"{kind}, where the plan says {cls.__name__}"),
        *problems.told("params.hooks-lost", hooked, lost, after),
        *problems.partitioned(inside),
    )


def swap(model: Module, paths: Iterable[str], make: Callable[[Module], Module]) -> tuple[Swapped, ...]:
    """Puts ``make(layer)`` into every place that holds the layer. All or nothing: when it raises, nothing has changed.

    Linear in the size of the model.
    """
    modules = names.named_modules(model)
    swapped: list[Swapped] = []
    for path in paths:
        new = make(modules[path])
        swapped.append(Swapped(modules[path], new.train(modules[path].training)))
    try:
        _exchange(model, [(pair.old, pair.new) for pair in swapped])
        return tuple(swapped)
    except BaseException:
        put_back(model, tuple(swapped))
        raise


def carry_over(old: Module, new: Module) -> None:
    """Hooks that were put on the old module, and attributes that were set on it, on the one that takes its place."""
    for key, value in vars(old).items():
        if (key in _TABLES and value) or key not in vars(new):
            vars(new)[key] = value


def put_back(model: Module, swapped: tuple[Swapped, ...]) -> None:
    """Every old layer in every place that holds its replacement."""
    _exchange(model, [(pair.new, pair.old) for pair in swapped])


def _exchange(model: Module, pairs: list[tuple[Module, Module]]) -> None:
    places: dict[int, list[tuple[Module, str]]] = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            places[id(child)].append((parent, name))
    for old, new in pairs:
        for parent, name in places[id(old)]:
            parent._modules[name] = new
