"""A tiny causal or sequence-to-sequence language model of any type of transformers, on the CPU, without dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attrs import frozen
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from tests.support.transformers_small import NEEDED

Batch = dict[str, torch.Tensor]

VOCABULARY, LENGTH, SAMPLES = 128, 16, 2
MOST = 6_000_000
"""Parameters that a model has at most to count as tiny."""

_LAYERS = {"n_layer", "n_layers", "depth", "num_blocks"}
_WIDTHS = {
    "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size", "word_embed_proj_dim",
    "decoder_hidden_size", "encoder_hidden_size", "text_hidden_size",
}  # fmt: skip
_INNER = {
    "intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner", "moe_intermediate_size",
    "shared_expert_intermediate_size", "shared_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size",
    "mlp_hidden_size", "intermediate_size_mlp", "moe_shared_expert_intermediate_size", "feed_forward_hidden_size",
}  # fmt: skip
_HEADS = {"num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"}
_KEY_HEADS = {"num_key_value_heads", "num_kv_heads", "multi_query_group_num"}
_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
_CHOSEN = {"num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "num_experts_per_topk"}
_LENGTHS = {"max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_source_positions"}
_GROUPS = {"n_group", "topk_group", "num_expert_groups"}

_MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "xmod": {"default_language": "en_XX"},
}
"""What a type's config lacks for its model to build tiny, beside ``NEEDED``."""

Sizes = Callable[[str, int], int | None]
"""A field and its default to the tiny size; ``None`` leaves it."""


def _common(name: str, value: int) -> int | None:
    if name in _LAYERS or (name.endswith("layers") and "dense" not in name):
        return min(value, 2)
    if name.endswith("vocab_size") or name.startswith("vocab_size"):
        return min(value, VOCABULARY)
    if name == "encoder_hash_byte_group_vocab":
        return VOCABULARY
    if name in {"mamba_chunk_size", "mamba_d_state"}:
        return min(value, 16)
    if name in _LENGTHS:
        return min(value, 64)
    if name in _EXPERTS:
        return min(value, 4)
    if name in _CHOSEN:
        return min(value, 2)
    if name in _GROUPS:
        return 1
    if name.endswith("token_id") and value >= VOCABULARY:
        return VOCABULARY - 1
    return None


def _narrow(name: str, value: int) -> int | None:
    if name in _WIDTHS:
        return min(value, 64)
    if name in _INNER or name.endswith("intermediate_size"):
        return min(value, 96)
    if name in _HEADS:
        return min(value, 4)
    if name in _KEY_HEADS:
        return min(value, 2)
    if name in {"head_dim", "attention_head_dim", "d_kv"}:
        return min(value, 16)
    return _common(name, value)


def _equal_heads(name: str, value: int) -> int | None:
    return min(value, 4) if name in _KEY_HEADS else _narrow(name, value)


def _own_heads(name: str, value: int) -> int | None:
    return None if name in {"head_dim", "attention_head_dim", "d_kv"} else _narrow(name, value)


def _shallow_heads(name: str, value: int) -> int | None:
    kept = name in _HEADS | _KEY_HEADS | {"head_dim", "attention_head_dim", "d_kv"}
    return None if kept else 256 if name in _WIDTHS and value > 256 else _narrow(name, value)


def _thin(name: str, value: int) -> int | None:
    return None if name in _WIDTHS | _HEADS | _KEY_HEADS | {"head_dim", "d_kv"} else _narrow(name, value)


def _latent(name: str, value: int) -> int | None:
    """Of attention whose keys and values are projected from a latent: one head of keys for each of queries."""
    return _LATENT.get(name) or _equal_heads(name, value)


_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "qk_head_dim": 32,
    "rotary_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "n_group": 1,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


VARIANTS: tuple[Sizes, ...] = (_narrow, _own_heads, _equal_heads, _latent, _shallow_heads, _thin)
"""Tried in this order; the first with which the model builds, is tiny and has a finite loss is taken."""


def kinds() -> tuple[str, ...]:
    """Every type with a causal or a sequence-to-sequence language model."""
    return tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}))


def class_of(kind: str) -> type[PreTrainedModel]:
    """Its sequence-to-sequence class where it has one, else its causal one."""
    config = CONFIG_MAPPING[kind]
    several = kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    found = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if several else MODEL_FOR_CAUSAL_LM_MAPPING)[config]
    return found[0] if isinstance(found, tuple) else found


@frozen
class Recipe:
    """How the model of a type is built."""

    variant: int
    """Of ``VARIANTS``."""
    frozen: tuple[str, ...] = ()
    """Parameters without a part in the loss of text: DDP waits for their gradients (``run.gradients-waited-for``)."""
    dtype: torch.dtype = torch.float32


def build(kind: str, seed: int, recipe: Recipe) -> PreTrainedModel:
    """The model in training mode, its weights drawn with the seed; raises what transformers raises."""
    cls, sizes = class_of(kind), VARIANTS[recipe.variant]
    with torch.device("meta"):
        number = sum(param.numel() for param in cls(_config(kind, sizes)).parameters())
    if number > MOST:
        raise ValueError(f"{number} parameters are not tiny")
    torch.manual_seed(seed)
    model = cls(_config(kind, sizes))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for name in recipe.frozen:
        model.get_parameter(name).requires_grad_(requires_grad=False)
    if recipe.dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch's grouped product has no float64
    return model.to(recipe.dtype).train()


def recipe_of(kind: str) -> Recipe:
    """By the first of ``VARIANTS`` that trains; raises the first reason where none does."""
    reasons: list[Exception] = []
    for variant in range(len(VARIANTS)):
        try:
            model = build(kind, 0, Recipe(variant))
            loss = loss_of(model, batch_of(model, 0, 0))
            loss.backward()  # type: ignore[no-untyped-call]
            if not math.isfinite(loss.item()):
                raise ValueError(f"its loss is {loss.item()}")
            named = model.named_parameters()
            return Recipe(variant, tuple(name for name, one in named if one.requires_grad and one.grad is None))
        except Exception as error:  # whatever transformers raises for a size that does not fit
            reasons.append(error)
    raise reasons[0]


def batch_of(model: PreTrainedModel, step: int, rank: int) -> Batch:
    """Tokens of one rank at one step, drawn."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    vocabulary = min(VOCABULARY, model.get_input_embeddings().weight.shape[0]) - 8
    ids, labels = (torch.randint(4, vocabulary, (SAMPLES, LENGTH), generator=source) for _ in range(2))
    several = bool(model.config.is_encoder_decoder)
    return {"input_ids": ids, "labels": labels if several else ids.clone()}


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The model's own loss."""
    loss = model(**batch).loss
    if loss is None:
        raise ValueError("it gives no loss for labels")
    return loss.mean()  # type: ignore[no-any-return]


def _config(kind: str, sizes: Sizes) -> PretrainedConfig:
    cls = CONFIG_MAPPING[kind]
    needed = {**NEEDED.get(kind, {}), **_MORE.get(kind, {})}
    fields = _fields(cls(**needed), sizes)
    both = {name: {**needed[name], **fields[name]} for name in needed if isinstance(fields.get(name), dict)}
    config = cls(**{**needed, **fields, **both})
    text = config.get_text_config()
    config = text if class_of(kind).config_class is type(text) else config
    for part in _parts(config):
        part.use_cache = False
        if part.is_encoder_decoder:
            part.decoder_start_token_id = getattr(part, "decoder_start_token_id", None) or 1
            part.pad_token_id = 0 if getattr(part, "pad_token_id", None) is None else part.pad_token_id
    return config


def _fields(config: PretrainedConfig, sizes: Sizes) -> dict[str, Any]:
    """What the tiny config says otherwise than its defaults."""
    given: dict[str, Any] = {}
    layers = {len(value) for name, value in vars(config).items() if name.endswith("layer_types") and value}
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            given[name] = _fields(value, sizes)
        elif type(value) is float and ("drop" in name or "pdrop" in name):
            given[name] = 0.0
        elif type(value) is int and (size := sizes(name, value)) is not None and size != value:
            given[name] = size
        elif isinstance(value, list) and value and len(value) in layers:
            given[name] = value[:1] + value[-1:]
        elif isinstance(value, list) and name == "eos_token_id":
            given[name] = VOCABULARY - 1
    return given


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PretrainedConfig):
            yield from _parts(value)
