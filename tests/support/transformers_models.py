"""Tiny transformers models from config, without dropout and without download, each with a batch of four samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Batch = dict[str, torch.Tensor]
VOCABULARY = 96


def _tokens(seed: int, length: int = 12) -> torch.Tensor:
    return torch.randint(VOCABULARY, (4, length), generator=torch.Generator().manual_seed(seed))


def _causal() -> Batch:
    return {"input_ids": _tokens(1), "labels": _tokens(1)}


def llama(tied: bool = False) -> tuple[Any, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)), _causal()


def llama_tied() -> tuple[Any, Batch]:
    return llama(tied=True)


def qwen3() -> tuple[Any, Batch]:
    """Norms inside its attention see the heads of one tensor rank only."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)), _causal()


def gpt2() -> tuple[Any, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=16, **quiet)
    ), _causal()


def bert() -> tuple[Any, Batch]:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(**sizes, **quiet, vocab_size=VOCABULARY, max_position_embeddings=16)
    return BertForMaskedLM(config), _causal()


def t5() -> tuple[Any, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(**sizes, vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    return T5ForConditionalGeneration(config), {"input_ids": _tokens(2), "labels": _tokens(3, 7)}


def mixtral() -> tuple[Any, Batch]:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads)), _causal()


def qwen3_moe() -> tuple[Any, Batch]:
    """Experts of another size than a dense layer's, whose weights its files hold one by one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)), _causal()


def vit() -> tuple[Any, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = ViTConfig(**sizes, **quiet, image_size=8, patch_size=4, num_labels=5)
    pixels = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(4))
    return ViTForImageClassification(config), {"pixel_values": pixels, "labels": torch.tensor([0, 3, 1, 4])}


def gemma3() -> tuple[Any, Batch]:
    """Tied; its embedding multiplies by a buffer that no checkpoint holds."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, pad_token_id=0)), _causal()


def whisper() -> tuple[Any, Batch]:
    """Encoder of sound, decoder of text; positions in a frozen embedding."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": VOCABULARY, "num_mel_bins": 8}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(**layers, **sizes, **ends, max_source_positions=16, max_target_positions=16, use_cache=False)
    sound = torch.rand(4, 8, 32, generator=torch.Generator().manual_seed(5))
    return WhisperForConditionalGeneration(config), {"input_features": sound, "labels": _tokens(6, 7)}


FAMILIES: dict[str, Callable[[], tuple[Any, Batch]]] = {
    "llama": llama,
    "llama-tied": llama_tied,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "mixtral": mixtral,
    "vit": vit,
}

MORE: dict[str, Callable[[], tuple[Any, Batch]]] = {
    "qwen3": qwen3,
    "qwen3-moe": qwen3_moe,
    "gemma3": gemma3,
    "whisper": whisper,
}
"""Through FSDP2 alone; some through tensor parallelism."""


def build(family: str, seed: int = 0) -> tuple[Any, Batch]:
    """The model in training mode, equal on every rank, and its batch."""
    torch.manual_seed(seed)
    model, batch = {**FAMILIES, **MORE}[family]()
    return model.train(), batch
