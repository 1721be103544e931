"""What a model's own ``config`` says of its architecture, in the words of Hugging Face. Asking never raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from prepkit.facts import ArchitectureFacts

T = TypeVar("T")

PARTS = ("text_config", "decoder", "encoder", "language_config", "llm_config", "vision_config")
"""Where composite models keep the configs of their parts (encoder-decoders, multimodal models), the widest first."""

HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def peek(owner: object, name: str) -> Any:
    """The attribute, or the item of a mapping; None if it is missing or reading it raises, as properties may."""
    try:
        return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
    except Exception:  # user code answers here, and observing must not fail over it
        return None


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
    return ArchitectureFacts(
        tie_word_embeddings=_said(sources, bool, "tie_word_embeddings"),
        hidden_sizes=_hidden_sizes(sources),
        heads=_said(sources, int, *HEADS),
        kv_heads=_said(sources, int, *KV_HEADS),
        vocab_size=_said(sources, int, "vocab_size"),
        experts=_said(sources, int, *EXPERTS),
        layer_types=_sequence(sources, str, "layer_types"),
        use_cache=_said(sources, bool, "use_cache"),
        sliding_window=_said(sources, int, "sliding_window"),
        tp_size=_tp_size(model, config),
    )


def _said(sources: tuple[object, ...], kind: type[T], *names: str) -> T | None:
    """The first value of exactly this kind under any of the names; ``True`` is no ``int`` here."""
    for source in sources:
        for name in names:
            value = peek(source, name)
            if type(value) is kind:
                return value
    return None


def _sequence(sources: tuple[object, ...], kind: type[T], name: str) -> tuple[T, ...]:
    for source in sources:
        value = peek(source, name)
        if isinstance(value, list | tuple) and value and all(type(item) is kind for item in value):
            return tuple(value)
    return ()


def _hidden_sizes(sources: tuple[object, ...]) -> tuple[int, ...]:
    """One size, or the sizes of all stages of a vision backbone."""
    for source in sources:
        one = _said((source,), int, *HIDDEN)
        if sizes := (one,) if one is not None else _sequence((source,), int, "hidden_sizes"):
            return sizes
    return ()


def _tp_size(model: nn.Module, config: object) -> int | None:
    """``model.tp_size``, else that of ``config.distributed_config``, a mapping or an object (H-3)."""
    return _said((model, peek(config, "distributed_config")), int, "tp_size")


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
