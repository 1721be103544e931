"""A small model of any type that transformers knows, on meta: its class, and its config with few layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, TypeGuard

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

HEADS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM")
"""Tasks whose class is taken before others, as ``MODEL_FOR_..._MAPPING_NAMES`` of transformers names them."""

NEEDED: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": {"num_attention_heads": 16}},
    "autoformer": {"prediction_length": 4},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "deepseek_ocr2": {"text_config": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "dense"]}},
    "deepseek_ocr2_text": {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "dense"]},
    "emu3": {"pad_token_id": 0, "vocabulary_map": {"<image>": 4}},
    "esm": {"vocab_size": 33},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "hunyuan_vl_text": {"head_dim": 128},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "informer": {"prediction_length": 4},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 128},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    "time_series_transformer": {"prediction_length": 4},
}
"""What a type's config lacks for its model to build."""

STACKS = ("n_layer", "depth", "num_blocks")
"""Fields that count the layers of a stack, beside those that end with ``layers``."""

LAYERS = (2, 4, 0)
"""Layers of each stack; the first number with which the model builds is taken, and 0 is what its config says."""


def model_types() -> tuple[str, ...]:
    """Every type of the installed transformers, in its order."""
    return tuple(CONFIG_MAPPING_NAMES)


def classes_of(kind: str) -> list[type[PreTrainedModel]]:
    """Classes of the type, those with a head first; none where it has a config and no model of its own."""
    config = CONFIG_MAPPING[kind]
    file = _modeling(config)
    named = [vars(file).get(name) for name in _names(kind)]
    own = [value for value in reversed(vars(file).values()) if getattr(value, "config_class", None) is config]
    found = dict.fromkeys(value for value in (*named, *own) if _is_model(value))
    return list(found)


def _is_model(value: object) -> TypeGuard[type[PreTrainedModel]]:
    return isinstance(value, type) and issubclass(value, PreTrainedModel) and "PreTrained" not in value.__name__


def _names(kind: str) -> Iterator[str]:
    """What transformers' tables name for the type."""
    tables = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in HEADS]
    tables += [
        getattr(modeling_auto, name)
        for name in dir(modeling_auto)
        if name.startswith("MODEL_FOR_") and name.endswith("_NAMES")
    ]
    for table in (*tables, modeling_auto.MODEL_MAPPING_NAMES):
        found = table.get(kind, ()) if isinstance(table, Mapping) else ()
        yield from (found,) if isinstance(found, str) else found


def _modeling(config: type[PretrainedConfig]) -> ModuleType:
    """The file with the models beside the one with the config."""
    return import_module(config.__module__.replace(".configuration_", ".modeling_"))


def build(kind: str) -> PreTrainedModel:
    """A model of the type on meta: its first class that builds, with the fewest layers.

    Raises ``LookupError`` for a type without a model, and what transformers raises where nothing builds.
    """
    reasons: list[Exception] = []
    for layers in LAYERS:
        for cls in classes_of(kind):
            try:
                with torch.device("meta"):
                    return cls(config_of(kind, layers))
            except Exception as error:
                reasons.append(error)
    raise reasons[0] if reasons else LookupError("has no model of its own")


def config_of(kind: str, layers: int) -> PretrainedConfig:
    """The type's own config with this many layers in each stack; 0: as many as it says."""
    config = CONFIG_MAPPING[kind](**NEEDED.get(kind, {}))
    if layers:
        shrink(config, layers)
    return config


def shrink(config: PretrainedConfig, layers: int) -> None:
    """Gives every stack of the config, also of the configs inside it, at most this many layers; other sizes stay."""
    for name, value in tuple(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            shrink(value, layers)
        elif (name in STACKS or name.endswith("layers")) and type(value) is int and value > layers:
            setattr(config, name, layers)
    kinds = vars(config).get("layer_types")
    if isinstance(kinds, list):
        config.layer_types = kinds[:layers]
