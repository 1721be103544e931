"""What a config says of the architecture, in the words of Hugging Face: an object's, or a file's as a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from prepkit.facts import ArchitectureFacts

T = TypeVar("T")

PARTS = ("text_config", "decoder", "encoder", "language_config", "llm_config", "vision_config")
"""Where composite models keep the configs of their parts (encoder-decoders, multimodal models), the widest first."""

HIDDEN = ("hidden_size", "d_model", "n_embd", "dim")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "n_head_kv", "num_kv_heads")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


TEXT = ("text_encoder", "decoder", "generator", "text_config")
"""Where transformers' ``get_text_config()`` finds the text's part; where there are two of them it says nothing."""


def peek(owner: object, name: str) -> Any:
    """The attribute, or the item of a mapping; None if it is missing or reading it raises, as properties may."""
    try:
        return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)
    except Exception:  # user code answers here, and observing must not fail over it
        return None


def architecture(fields: Mapping[str, Any]) -> ArchitectureFacts:
    """Facts of a config that is a mapping, and of its text config where it says nothing itself."""
    texts = [fields[name] for name in TEXT if fields.get(name) is not None]
    text = (fields,) if not texts else tuple(texts) if len(texts) == 1 else ()
    parts = (fields.get(name) for name in PARTS)
    sources = tuple(source for source in (fields, *text, *parts) if source is not None)
    return said_by(sources, said((fields.get("distributed_config"),), int, "tp_size"))


def said_by(sources: tuple[object, ...], tp_size: int | None) -> ArchitectureFacts:
    """Return what the first of the sources says that says something."""
    return ArchitectureFacts(
        tie_word_embeddings=said(sources, bool, "tie_word_embeddings"),
        hidden_sizes=_hidden_sizes(sources),
        heads=said(sources, int, *HEADS),
        kv_heads=said(sources, int, *KV_HEADS),
        vocab_size=said(sources, int, "vocab_size"),
        experts=said(sources, int, *EXPERTS),
        layer_types=_sequence(sources, str, "layer_types"),
        use_cache=said(sources, bool, "use_cache"),
        sliding_window=said(sources, int, "sliding_window"),
        tp_size=tp_size,
    )


def said(sources: tuple[object, ...], kind: type[T], *names: str) -> T | None:
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
        one = said((source,), int, *HIDDEN)
        if sizes := (one,) if one is not None else _sequence((source,), int, "hidden_sizes"):
            return sizes
    return ()
