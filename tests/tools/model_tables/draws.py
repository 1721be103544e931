"""Configs at drawn sizes, and the facts of the models that transformers makes of them on the meta device."""

from __future__ import annotations

import dataclasses
import inspect
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from attrs import define, field
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from prepkit.facts import ModelFacts
from prepkit.observe import observe

FEWEST = 6
"""Models of which a field has been given, before a table is trusted over it."""

Raw = dict[str, Any]
Path = tuple[str, ...]

COMMON = {one.name for one in dataclasses.fields(PreTrainedConfig)} | {"model_type"}
SKIPPED = re.compile(
    r"(_token_id|_token_index|_ids?|_index|_indices|seed|eps|epsilon|initializer\w*|\w*_std|torchscript|tokenizer_class"
    r"|attn_implementation|pretraining_tp|suppress_tokens|summary_type|init_device|ctc_loss_reduction|init_scheme"
    r"|is_encoder_decoder|return_dict\w*|output_\w+|rope_theta|rope_scaling)$"
)
HEADS = re.compile(r"(heads?|n_heads?|num_heads)$")
KV = re.compile(r"kv|key_value")
LAYERS = re.compile(r"(layers|n_layers?|num_blocks|depth|num_hidden_layers|num_layers)$")
WIDTH = re.compile(
    r"(hidden_size|d_model|n_embd|embed_dim|embedding_size|embedding_dim|width|^dim|hidden_dim|lstm_size)$"
)
HEAD_DIM = re.compile(r"(head_dim|head_size|d_kv|d_head|d_state|state_size)$")
EXTRA = re.compile(r"getattr\(\s*(?:self\.)?config,\s*[\"'](\w+)[\"']")


class Unbuilt(Exception):
    """transformers could not make the config or the model."""


@define
class Probe:
    """One drawn config, what its class makes of it, and the facts of the model."""

    raw: Raw
    fields: dict[str, Any]
    facts: ModelFacts


@define
class Drawer:
    """Draws configs for one model class, and learns which fields may be varied."""

    config_class: Any
    model_class: Any
    seed: int = 0
    defaults: Raw = field(factory=dict)
    kinds: dict[Path, str] = field(factory=dict)
    """Path of a field to what its class says its type is."""
    frozen: set[Path] = field(factory=set)
    """Fields that no draw could vary."""
    _rng: random.Random = field(init=False)
    _tried: Counter[Path] = field(factory=Counter)
    _worked: Counter[Path] = field(factory=Counter)

    def __attrs_post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        config = self.config_class()
        self.defaults = config.to_dict()
        self.kinds = dict(_kinds(self.config_class, ()))
        source = inspect.getsource(sys.modules[self.model_class.__module__])
        for name in sorted(set(EXTRA.findall(source))):
            if HEAD_DIM.search(name) and (name,) not in self.kinds and name not in self.config_class.attribute_map:
                self.kinds[name,] = "int | None"

    @property
    def varied(self) -> set[Path]:
        """Fields that were given in enough configs that became models."""
        return {path for path, times in self._worked.items() if times >= FEWEST}

    def usual(self) -> Iterator[Probe]:
        """The model at the sizes that its class has by default, where those make one."""
        with suppress(Unbuilt):
            yield built(self.config_class, self.model_class, {"dtype": "float32"})

    def probe(self) -> Probe:
        """One model more. Raises ``Unbuilt`` where none could be made."""
        error = ""
        for attempt in range(60):
            raw, changed = self._draw(0.75 if attempt < 20 else 0.4 if attempt < 40 else 0.15)
            try:
                made = built(self.config_class, self.model_class, raw)
            except Unbuilt as failed:
                error = str(failed)
                self._tried.update(changed)
                self._freeze()
                continue
            self._tried.update(changed)
            self._worked.update(changed)
            return made
        raise Unbuilt(error)

    def _freeze(self) -> None:
        for path, tried in self._tried.items():
            if tried >= 8 and not self._worked[path]:
                self.frozen.add(path)

    def _draw(self, share: float) -> tuple[Raw, list[Path]]:
        raw: Raw = {}
        changed: list[Path] = []
        for path, kind in self.kinds.items():
            if SKIPPED.search(path[-1]) or path in self.frozen:
                continue
            layers = LAYERS.search(path[-1]) is not None
            if self._rng.random() > share and not layers:
                continue
            value = self._value(path, _at(self.defaults, path), kind, raw)
            if value is not KEEP:
                _set(raw, path, value)
                if not layers:
                    changed.append(path)
        raw["dtype"] = self._rng.choice(("float32", "bfloat16", "float16"))
        if self._rng.random() < 0.3:
            raw["num_labels"] = self._rng.randint(3, 9)
        return raw, changed

    def _value(self, path: Path, default: Any, kind: str, raw: Raw) -> Any:
        name, rng = path[-1], self._rng
        if isinstance(default, bool):
            return rng.random() < 0.5
        if type(default) is int or (default is None and "int" in kind and "list" not in kind and "bool" not in kind):
            return self._int(name, default, "None" in kind)
        if isinstance(default, float):
            if name == "partial_rotary_factor":
                return rng.choice((0.25, 0.5, 0.75, 1.0))
            return rng.choice((0.0, 0.1)) if default == 0.0 else default
        if isinstance(default, str):
            return self._text(name, default, kind)
        if isinstance(default, list):
            return self._list(path, default, raw)
        return self._rope(name, default)

    def _rope(self, name: str, default: Any) -> Any:
        if name == "rope_parameters" and isinstance(default, dict) and "partial_rotary_factor" in default:
            return {**default, "partial_rotary_factor": self._rng.choice((0.25, 0.5, 0.75, 1.0))}
        return KEEP

    def _text(self, name: str, default: str, kind: str) -> Any:
        if default in ACT2FN and ("act" in name or "nonlin" in name):
            return self._rng.choice(("gelu", "gelu_new", "silu", "relu", "gelu_pytorch_tanh", "tanh", "quick_gelu"))
        if name in TEXTS:
            return self._rng.choice(TEXTS[name])
        if options := re.findall(r"'([^']+)'", kind) if "Literal" in kind else ():
            return self._rng.choice(options)
        return KEEP

    def _list(self, path: Path, default: list[Any], raw: Raw) -> Any:
        rng, name = self._rng, path[-1]
        if name in ("mlp_only_layers",):
            return sorted(rng.sample(range(4), rng.randint(0, 2)))
        if default and all(isinstance(one, str) for one in default) and "type" in name:
            count = _at(raw, (*path[:-1], "num_hidden_layers"))
            return [rng.choice(sorted(set(default))) for _ in range(count)] if isinstance(count, int) else KEEP
        if name == "depths":
            return [rng.randint(1, 3) for _ in default]
        if name in ("hidden_sizes", "embed_dims", "neck_hidden_sizes"):
            return [48 * rng.randint(1, 9) for _ in default]
        return KEEP

    def _int(self, name: str, default: int | None, optional: bool) -> Any:
        rng = self._rng
        if optional and rng.random() < 0.4:
            return None if default is None else KEEP
        for pattern, values in SIZES:
            if pattern.search(name):
                return rng.choice(values)
        if name == "vocab_size":
            return (default or 100) + rng.randint(1, 500)
        if default is None or default < 0:
            return rng.choice((default, 8 * rng.randint(2, 40))) if default else 8 * rng.randint(2, 40)
        if default <= 4:
            return max(1, default + rng.randint(0, 2)) if default else rng.randint(0, 2)
        if default <= 16:
            return rng.choice((default, 2 * default, default + 2))
        return 8 * rng.randint(4, 90)


SIZES: tuple[tuple[re.Pattern[str], Sequence[int]], ...] = (
    (re.compile(rf"({KV.pattern}).*{HEADS.pattern}"), (1, 2)),
    (HEADS, (2, 4, 6, 8, 12)),
    (re.compile(r"^max_window_layers$|_layer_interval$|_sparse_step$"), range(1, 6)),
    (LAYERS, (*range(2, 8), *range(2, 8), 9, 13, 25)),
    (WIDTH, range(96, 817, 48)),
    (HEAD_DIM, range(16, 113, 8)),
    (re.compile(r"(?<!shared_)experts$"), (4, 8, 12, 16, 20)),
    (re.compile(r"per_tok|top_?k|n_group|topk_group|experts_per"), (1, 2)),
    (re.compile(r"^image_size$"), (96, 192, 288, 384)),
    (re.compile(r"^patch_size$"), (8, 16, 32)),
)
"""What a field is called, and the sizes that it is given: they divide each other as models need them to."""

TEXTS = {
    "feed_forward_proj": ("relu", "gated-gelu", "gated-silu"),
}
"""Fields whose texts the library reads, and lists in no type of theirs."""

KEEP = object()
"""The field is not given."""


def built(config_class: Any, model_class: Any, raw: Mapping[str, Any]) -> Probe:
    """The model of a raw config, on the meta device. Raises ``Unbuilt``."""
    try:
        config = config_class(**deepcopy(dict(raw)))
        fields = normal(config)
        with torch.device("meta"):
            model = model_class._from_config(config)
    except Exception as error:  # any error of a drawn config: another one is drawn
        raise Unbuilt(f"{type(error).__name__}: {str(error)[:200]}") from error
    return Probe(raw=dict(raw), fields=fields, facts=observe(model).facts.model)


NAMED = (
    *("tie_word_embeddings", "hidden_size", "d_model", "n_embd", "dim", "num_attention_heads", "n_head", "n_heads"),
    *("num_heads", "num_key_value_heads", "n_head_kv", "num_kv_heads", "vocab_size", "num_local_experts"),
    *("num_experts", "n_routed_experts", "use_cache", "sliding_window", "hidden_sizes", "layer_types"),
)
"""What ``ArchitectureFacts`` are read from, whether or not the config says it in a field."""


def normal(config: Any) -> dict[str, Any]:
    """Fields of a config as a model reads them, parts inside, with ``num_labels`` and what properties say."""
    found: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        own = getattr(config, name, None)
        plain = own is None or isinstance(own, bool | int | float | str | list)
        found[name] = normal(own) if isinstance(own, PreTrainedConfig) else own if plain else value
    found["num_labels"] = config.num_labels
    properties = (
        name
        for cls in type(config).__mro__
        if issubclass(cls, PreTrainedConfig) and cls is not PreTrainedConfig
        for name, value in vars(cls).items()
        if isinstance(value, property)
    )
    for name in (*NAMED, *config.attribute_map, *properties):
        try:
            value = getattr(config, name)
        except Exception:  # a config that does not have it
            continue
        if name not in found and (value is None or isinstance(value, bool | int | float | str | list | tuple)):
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _kinds(config_class: Any, above: Path) -> Iterator[tuple[Path, str]]:
    parts = getattr(config_class, "sub_configs_defaults", {})
    for one in dataclasses.fields(config_class):
        if one.name in parts:
            spec = parts[one.name]
            yield from _kinds(spec.get_config_class(spec.model_type), (*above, one.name))
        elif one.name not in COMMON:
            yield (*above, one.name), str(one.type)


def _at(data: Any, path: Path) -> Any:
    for name in path:
        data = data.get(name) if isinstance(data, dict) else None
    return data


def _set(data: Raw, path: Path, value: Any) -> None:
    for name in path[:-1]:
        data = data.setdefault(name, {})
    data[path[-1]] = value
