"""Which methods of a model could be called in the place of its forward. Reads classes only."""

from __future__ import annotations

from types import FunctionType

from torch import nn

from prepkit.facts.model import WELL_KNOWN
from prepkit.live.observe.architecture import ask

LIBRARIES = frozenset({"accelerate", "deepspeed", "diffusers", "peft", "timm", "torch", "transformers"})
"""Packages whose base classes have many methods that compute nothing, such as ``push_to_hub``."""

MODELS = "transformers.models."
"""Where a library keeps classes of single models, whose methods are the model's own."""


def methods(model: nn.Module) -> tuple[str, ...]:
    """Public methods besides ``forward``, sorted; of a library's base classes the well-known ones alone.

    ``generate`` is left out where the model itself says that it cannot (transformers' ``can_generate``).
    """
    found: set[str] = set()
    for cls in set(type(model).__mro__) - {nn.Module, object}:
        own = cls.__module__.partition(".")[0] not in LIBRARIES or cls.__module__.startswith(MODELS)
        public = {name for name, value in vars(cls).items() if isinstance(value, FunctionType) and name[0] != "_"}
        found |= public if own else public & set(WELL_KNOWN)
    if ask(model, "can_generate") is False:
        found.discard("generate")
    return tuple(sorted(found - {"forward"}))
