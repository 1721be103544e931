"""What a model's own ``config`` says of its architecture, in the words of Hugging Face. Asking never raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from prepkit.facts import ArchitectureFacts
from prepkit.formats.models.architecture import PARTS, peek, said, said_by


def ask(owner: object, method: str) -> Any:
    """What the method without arguments returns; None if it is missing or raises, as ``get_input_embeddings`` may."""
    try:
        return getattr(owner, method)()
    except Exception:  # as above
        return None


def architecture(model: nn.Module) -> ArchitectureFacts:
    """Facts of ``model.config``, and of its text config where it says nothing itself (multimodal models)."""
    config = peek(model, "config")
    parts = (peek(config, name) for name in PARTS)
    sources = tuple(source for source in (config, ask(config, "get_text_config"), *parts) if source is not None)
    return said_by(sources, _tp_size(model, config))


def _tp_size(model: nn.Module, config: object) -> int | None:
    """``model.tp_size``, else that of ``config.distributed_config``, a mapping or an object (H-3)."""
    return said((model, peek(config, "distributed_config")), int, "tp_size")


def tensor_plan(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """The model's own tensor-parallel plan. What its config says of the base model comes under the base's prefix."""
    own = peek(model, "tp_plan") or peek(model, "_tp_plan")
    if isinstance(own, Mapping) and own:
        return _pairs(own, "")
    base = peek(peek(model, "config"), "base_model_tp_plan")
    prefix = peek(model, "base_model_prefix")
    inside = isinstance(prefix, str) and isinstance(peek(model, prefix), nn.Module)
    return _pairs(base, f"{prefix}." if inside else "") if isinstance(base, Mapping) else ()


def _pairs(plan: Mapping[Any, Any], prefix: str) -> tuple[tuple[str, str], ...]:
    return tuple((prefix + path, style) for path, style in plan.items() if isinstance(path, str) and type(style) is str)
