"""Real architectures, from config, on meta: what they declare is read, and nothing is invented."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

from prepkit.facts import ArchitectureFacts, Env, ModelFacts
from prepkit.observe import observe
from prepkit.resolve.modules import repeated_blocks
from tests.support.transformers_models import FAMILIES

CAUSAL = ArchitectureFacts(
    tie_word_embeddings=False, hidden_sizes=(32,), heads=4, kv_heads=2, vocab_size=96, use_cache=True
)
EXPECTED: dict[str, tuple[ArchitectureFacts, str, str | None, str | None, tuple[str, ...]]] = {
    # architecture, a declared block, input and output embedding, the first tie
    "llama": (CAUSAL, "LlamaDecoderLayer", "model.embed_tokens", "lm_head", ()),
    "llama-tied": (
        evolve(CAUSAL, tie_word_embeddings=True),
        "LlamaDecoderLayer",
        "model.embed_tokens",
        "lm_head",
        ("model.embed_tokens.weight", "lm_head.weight"),
    ),
    "gpt2": (
        evolve(CAUSAL, tie_word_embeddings=True, kv_heads=None),
        "GPT2Block",
        "transformer.wte",
        "lm_head",
        ("transformer.wte.weight", "lm_head.weight"),
    ),
    "bert": (
        evolve(CAUSAL, tie_word_embeddings=True, kv_heads=None),
        "BertLayer",
        "bert.embeddings.word_embeddings",
        "cls.predictions.decoder",
        ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    ),
    "t5": (
        evolve(CAUSAL, tie_word_embeddings=True, kv_heads=None, use_cache=False),
        "T5Block",
        "shared",
        "lm_head",
        ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),
    ),
    "mixtral": (evolve(CAUSAL, experts=3), "MixtralDecoderLayer", "model.embed_tokens", "lm_head", ()),
    "vit": (
        evolve(CAUSAL, tie_word_embeddings=None, kv_heads=None, vocab_size=None, use_cache=None),
        "ViTLayer",
        "vit.embeddings.patch_embeddings",
        None,
        (),
    ),
}


def meta(family: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = FAMILIES[family]()[0]
    return model


def facts(model: nn.Module) -> ModelFacts:
    return observe(model, env=Env()).facts.model


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_architecture_says_of_itself_is_read(family: str) -> None:
    found = facts(meta(family))
    architecture, block, into, out, tie = EXPECTED[family]
    assert found.architecture == architecture
    assert block in found.declared_blocks
    assert block in {cls.name for cls in found.classes}
    assert block in {repeated.cls for repeated in repeated_blocks(found)}
    assert (found.input_embedding, found.output_embedding) == (into, out)
    assert (found.ties[0] if found.ties else ()) == tie
    assert found.has_tie_weights


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_order_are_those_of_torch(family: str) -> None:
    model = meta(family)
    found = facts(model)
    assert [param.name for param in found.params] == [name for name, _ in model.named_parameters()]
    assert [buffer.name for buffer in found.buffers] == [name for name, _ in model.named_buffers()]
    assert [module.path for module in found.modules] == [path for path, _ in model.named_modules()]
    persistent = {buffer.name for buffer in found.buffers if buffer.persistent}
    assert persistent == {name for name, _ in model.named_buffers()} & set(model.state_dict())
    assert [param.shape for param in found.params] == [tuple(param.shape) for param in model.parameters()]


def test_a_model_on_meta_has_the_facts_of_a_real_one() -> None:
    assert facts(meta("t5")) == facts(FAMILIES["t5"]()[0])


def test_gradient_checkpointing_of_transformers_is_marked_on_the_blocks() -> None:
    model: Any = meta("llama")
    assert not any(module.marks for module in facts(model).modules)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    marked = {module.path for module in facts(model).modules if module.marks == ("checkpointed",)}
    assert {"model.layers.0", "model.layers.1", "model.layers.2"} <= marked


def test_a_text_config_answers_where_the_outer_one_is_silent() -> None:
    text = SimpleNamespace(hidden_size=8, num_attention_heads=2, vocab_size=10, layer_types=["full", "sliding"])
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(vocab_size=99, get_text_config=lambda: text)
    assert facts(model).architecture == ArchitectureFacts(
        hidden_sizes=(8,), heads=2, vocab_size=99, layer_types=("full", "sliding")
    )


@pytest.mark.parametrize(
    "part", ["text_config", "decoder", "encoder", "language_config", "llm_config", "vision_config"]
)
def test_the_hidden_size_is_found_in_every_part_of_a_composite_config(part: str) -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(**{part: SimpleNamespace(hidden_size=8)}, vocab_size=99)
    assert facts(model).architecture.hidden_sizes == (8,)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"hidden_sizes": [8, 16]}, (8, 16)),
        ({"d_model": 4}, (4,)),
        ({"n_embd": 6, "hidden_sizes": [8, 16]}, (6,)),
        ({"hidden_size": None, "hidden_sizes": None}, ()),
        ({"hidden_size": "wide"}, ()),
        ({"hidden_size": True}, ()),
    ],
)
def test_hidden_sizes_are_numbers_or_nothing(config: dict[str, Any], sizes: tuple[int, ...]) -> None:
    model = nn.Linear(2, 2)
    model.config = config
    assert facts(model).architecture.hidden_sizes == sizes


def test_a_config_whose_properties_raise_says_nothing_and_breaks_nothing() -> None:
    class Angry:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    model = nn.Linear(2, 2)
    model.config = Angry()
    assert facts(model).architecture == ArchitectureFacts()


@pytest.mark.parametrize("config", [{"tp_size": 4}, SimpleNamespace(tp_size=4)])
def test_the_tensor_parallel_size_comes_from_the_model_or_its_distributed_config(config: Any) -> None:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(distributed_config=config)
    assert facts(model).architecture.tp_size == 4
    model.tp_size = 2
    assert facts(model).architecture.tp_size == 2


def test_reading_an_architecture_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        facts(meta("mixtral"))


def test_the_models_own_tensor_plan_is_read_with_its_prefix() -> None:
    own = dict(facts(meta("llama")).tensor_plan)
    assert own["model.layers.*.self_attn.q_proj"] == "colwise"
    assert own["lm_head"] == "colwise_gather_output"
    assert facts(meta("gpt2")).tensor_plan == ()


def test_a_plan_in_the_config_alone_is_that_of_the_base_model() -> None:
    model = nn.Module()
    model.config = SimpleNamespace(base_model_tp_plan={"up": "colwise", "down": 3})
    assert facts(model).tensor_plan == (("up", "colwise"),)
    model.base_model_prefix, model.core = "core", nn.Module()
    assert facts(model).tensor_plan == (("core.up", "colwise"),)
