"""A field that a config class does not have is told with the one that was meant, also where Python builds the class."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from attrs import fields, has

from prepkit.findings.text import near, shorter

OTHER_NAMES = {
    "learning_rate": "lr",
    "weight_decay_rate": "weight_decay",
    "wd": "weight_decay",
    "clip_grad_norm": "clip",
    "gradient_clipping": "clip",
    "max_grad_norm": "clip",
    "gradient_accumulation_steps": "accumulation",
    "accumulation_steps": "accumulation",
    "mixed_precision": "precision",
    "gradient_checkpointing": "checkpointing",
    "activation_checkpointing": "checkpointing",
    "torch_compile": "compile",
    "strategy": "engine",
    "zero_stage": "stage",
    "cpu_offload": "offload",
    "sharding_strategy": "sharding",
    "auto_wrap_policy": "wrap",
    "fsdp_version": "engine",
}
"""What others call a field of prepkit's: accelerate, transformers, DeepSpeed, torch."""


def explain_keywords(names: dict[str, object]) -> None:
    """Gives every class of prepkit's config among these names an ``__init__`` that names the field that was meant."""
    for value in names.values():
        if isinstance(value, type) and value.__module__.startswith("prepkit.config") and has(value):
            type.__setattr__(value, "__init__", _explained(value, value.__init__))


def _explained(cls: type, plain: Callable[..., None]) -> Callable[..., None]:
    if hasattr(plain, "__wrapped__"):
        return plain
    known = tuple(field.alias for field in fields(cls) if field.init)

    @wraps(plain)
    def init(self: Any, *args: Any, **given: Any) -> None:
        if unknown := [key for key in given if key not in known]:
            raise TypeError(_said(cls, unknown[0], known))
        plain(self, *args, **given)

    return init


def _said(cls: type, key: str, known: tuple[str, ...]) -> str:
    what = f"{cls.__name__} has no field {shorter(repr(key), 100)}"
    other = OTHER_NAMES.get(key.lower(), "")
    meant = (other,) if other in known else near(key, known, limit=1)
    if meant:
        return f"{what}; write {meant[0]}=..."
    return f"{what}, only {', '.join(known)}" if known else f"{what}, and takes none"
