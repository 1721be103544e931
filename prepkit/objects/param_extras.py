"""What hangs on a parameter besides its values: attributes, and hooks. Lost where another object takes its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from prepkit.facts.model import ParamHook
from prepkit.objects import names

OF_LIBRARIES = frozenset({"_is_param", "_spec", "_local_tensor", "_is_hf_initialized", "_tp_already_sharded"})
"""Attributes that torch and transformers set themselves, and mean nothing to whoever comes later."""
PREFIXES = ("_fsdp", "ds_", "_hp_")
"""Of attributes that FSDP1 and DeepSpeed set."""

HOOKS: tuple[tuple[str, ParamHook], ...] = (
    ("_backward_hooks", "register_hook"),
    ("_post_accumulate_grad_hooks", "register_post_accumulate_grad_hook"),
)
"""Where torch keeps the hooks of a tensor, and who puts them there."""


def attributes(param: Tensor) -> dict[str, Any]:
    """Return what somebody has set on a parameter, by name; of classes with attributes of their own nothing."""
    if not (type(param) is Parameter or isinstance(param, DTensor)) or hasattr(param, "ds_shape"):
        return {}
    own = vars(param)
    return {k: v for k, v in own.items() if k not in OF_LIBRARIES and not k.startswith(PREFIXES)} if own else {}


def hooks(param: Tensor) -> Iterator[ParamHook]:
    """Kinds of the hooks on a parameter."""
    for kept, kind in HOOKS:
        if getattr(param, kept, None):
            yield kind


def every_attribute(model: Module) -> dict[str, dict[str, Any]]:
    """Name of each parameter that has any to its attributes, tied ones under each of their names."""
    found = ((name, attributes(param)) for name, param in names.all_parameter_names(model).items())
    return {name: own for name, own in found if own}


def carry_over(model: Module, kept: Mapping[str, Mapping[str, Any]]) -> None:
    """Sets on the parameters that have these names now what ``every_attribute`` has found on those before them."""
    params = names.all_parameter_names(model) if kept else {}
    for name, own in kept.items():
        for key, value in own.items():
            if not hasattr(params[name], key):
                setattr(params[name], key, value)
