"""Canonical names: a module's place in the model as its author wrote it, whatever has been wrapped around it since.

The compile, checkpoint and FSDP1 wrappers put a segment of their own into every name below them; here those segments do
not exist. A DDP or DeepSpeed root is looked through as well: ``named_parameters(ddp)`` and
``named_parameters(ddp.module)`` are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The attribute in which each wrapper keeps what it wraps: ``OptimizedModule``, ``CheckpointWrapper``, FSDP1."""

MOST_REPEATED = 100_000
"""Places of shared modules beyond their first: each level that holds the one below it twice doubles them."""

PREPARERS = ("deepspeed", "lightning", "lightning_fabric")
"""Packages besides torch whose wrappers are known. Fabric comes in either of two."""

ROOTS = frozenset({"DistributedDataParallel", "DeepSpeedEngine"})
"""Classes that keep the model in ``module`` and are looked through at the root."""


def canonical(name: str) -> str:
    """The name without wrapper segments, wherever they stand, also leading (H-14 keeps some).

    >>> canonical("_checkpoint_wrapped_module.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in SEGMENTS)


class Site(NamedTuple):
    """One place in the module tree."""

    path: str
    """Canonical path; ``""`` is the root."""
    stack: tuple[nn.Module, ...]
    """What stands there: wrappers, outermost first, then the user's module."""
    first: bool
    """True if this is the first path to the user's module; a shared module has several."""

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self.stack[-1]

    @property
    def slot(self) -> nn.Module:
        """The outermost object: the one that the parent holds, and the one to wrap further or to replace."""
        return self.stack[0]


def sites(model: nn.Module) -> list[Site]:
    """Every place, in ``named_modules`` order, a shared module once per path. Linear in the number of places.

    Raises ``ValueError`` if a module contains itself, or shared modules have more than ``MOST_REPEATED`` places.
    """
    found: list[Site] = []
    seen: set[int] = set()
    above: dict[int, str] = {}

    def note(path: str, stack: tuple[nn.Module, ...]) -> None:
        first = id(stack[-1]) not in seen
        seen.add(id(stack[-1]))
        found.append(Site(path, stack, first))
        if not first and len(found) - len(seen) > MOST_REPEATED:
            raise ValueError(_multiplied(path, stack[-1]))

    def visit(path: str, stack: tuple[nn.Module, ...]) -> None:
        module = stack[-1]
        key = id(module)
        if key in above:
            raise ValueError(_cycle(path, above[key], module))
        note(path, stack)
        above[key] = path
        prefix = path + "." if path else ""
        for name, child in module._modules.items():
            if child is None:
                continue
            if child._modules:
                visit(prefix + name, unwrap(child))
            else:  # most modules have no children: nothing to unwrap, and nothing that could contain them
                note(prefix + name, (child,))
        del above[key]

    visit("", unwrap_root(model))
    return found


def unwrap(module: nn.Module) -> tuple[nn.Module, ...]:
    """The wrappers around a module, outermost first, and the module itself."""
    stack = [module]
    while (inner := _inside(stack[-1])) is not None:
        stack.append(inner)
    return tuple(stack)


def unwrap_root(model: nn.Module) -> tuple[nn.Module, ...]:
    """As ``unwrap``, but looks through DDP and DeepSpeed too, in any order with the others."""
    stack = unwrap(model)
    while is_root_wrapper(stack[-1]):
        stack += unwrap(stack[-1].get_submodule("module"))
    return stack


def is_root_wrapper(module: nn.Module) -> bool:
    """True if the module is a DDP wrapper or a DeepSpeed engine."""
    return "module" in module._modules and not ROOTS.isdisjoint(known_bases(type(module)))


def known_bases(cls: type) -> frozenset[str]:
    """Bare names of the classes of torch and of ``PREPARERS`` among a class and its bases; by name, to import none."""
    return frozenset(c.__name__ for c in cls.__mro__ if c.__module__.partition(".")[0] in ("torch", *PREPARERS))


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Canonical path to the user's module, never a wrapper; shared modules under their first path only."""
    return {site.path: site.module for site in sites(model) if site.first}


def named_slots(model: nn.Module) -> dict[str, nn.Module]:
    """Canonical path to the outermost object at that place, wrappers included; every path of a shared module.

    This is what to wrap, compile, shard or replace: wrapping the user's module would go under what is there already.
    """
    return {site.path: site.slot for site in sites(model)}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name to parameter, each under its first name only, in ``named_parameters`` order."""
    every = all_parameter_names(model)
    return {name: every[name] for name in first_names(every.items()).values()}


def all_parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name to parameter, tied ones under each of their names (``remove_duplicate=False``)."""
    return dict(parameters_at(sites(model)))


def parameters_at(places: Iterable[Site]) -> list[tuple[str, nn.Parameter]]:
    """Every canonical name with its parameter, in order, tied ones once per name."""
    return [
        (f"{site.path}.{name}" if site.path else name, param)
        for site in places
        for name, param in site.module._parameters.items()
        if param is not None
    ]


def first_names(named: Iterable[tuple[str, nn.Parameter]]) -> dict[int, str]:
    """``id`` of each parameter to its first name, in order. Valid for as long as the parameters live."""
    first: dict[int, str] = {}
    for name, param in named:
        first.setdefault(id(param), name)
    return first


def _inside(module: nn.Module) -> nn.Module | None:
    children = module._modules
    # A wrapper has one child, so that most modules cost one comparison.
    if len(children) != 1:
        return None
    return next((child for name, child in children.items() if name in SEGMENTS), None)


def _cycle(path: str, ancestor: str, module: nn.Module) -> str:
    return (
        f"{path} is the same {type(module).__name__} as {ancestor or 'the root'}, which contains it, so the model has "
        f"no end; keep such a reference out of the module tree, for example in a tuple: self.outer = (module,)"
    )


def _multiplied(path: str, module: nn.Module) -> str:
    return (
        f"modules that are shared have more than {MOST_REPEATED:,} places, {path} ({type(module).__name__}) among "
        "them: each level that holds the one below it twice doubles their names. Hold a shared module in one place, "
        "and keep further references to it out of the module tree, for example in a tuple: self.again = (module,)"
    )
