"""Llama 3.1 models with their real widths, on meta: no weights, no download. For ``--model llama:seventy``."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEADS = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}
SIZES = {
    "eight": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "seventy": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "big": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}


def _model(size: str) -> LlamaForCausalLM:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES[size], **HEADS))


def eight() -> LlamaForCausalLM:
    """8.03 billion parameters."""
    return _model("eight")


def seventy() -> LlamaForCausalLM:
    """70.6 billion parameters."""
    return _model("seventy")


def big() -> LlamaForCausalLM:
    """406 billion parameters."""
    return _model("big")
