"""Llama models as facts, without transformers, and their FSDP2 plans."""

from __future__ import annotations

from typing import Any

from prepkit import planner
from prepkit.config import FSDP2, AdamW, Config
from prepkit.facts import ClassFact, Env, Facts, ModelFacts, ModuleFact, ParamFact
from prepkit.plan import Plan

SIZES = {
    "8B": (4096, 14336, 32, 1024),
    "70B": (8192, 28672, 80, 1024),
    "405B": (16384, 53248, 126, 1024),
}
"""Hidden size, inner size, layers, width of keys and values."""
VOCABULARY = 128256


def llama(name: str, dtype: str = "float32") -> ModelFacts:
    width, inner, layers, kv = SIZES[name]
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    params: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCABULARY, width)}
    params |= {f"model.layers.{i}.{path}": shape for i in range(layers) for path, shape in shapes.items()}
    params |= {"model.norm": (width,), "lm_head": (VOCABULARY, width)}
    paths = {"": None}
    for param in params:
        parts = param.split(".")
        paths |= {".".join(parts[:end]): None for end in range(1, len(parts) + 1)}
    blocks = {f"model.layers.{i}" for i in range(layers)}
    return ModelFacts(
        classes=tuple(ClassFact(name=n, module="m") for n in ("LlamaForCausalLM", "LlamaDecoderLayer", "Linear")),
        modules=tuple(ModuleFact(path=path, cls=(1 if path in blocks else 2) if path else 0) for path in paths),
        params=tuple(ParamFact(name=f"{n}.weight", shape=s, dtype=dtype) for n, s in params.items()),
        declared_blocks=("LlamaDecoderLayer",),
    )


def facts(name: str, world: int, dtype: str = "float32", **env: Any) -> Facts:
    declared = {"device": "cuda", "torch": "2.13.0", "bf16": True, "per_node": 8}
    return Facts(model=llama(name, dtype), env=Env.declare(world_size=world, **(declared | env)))


def fsdp2(name: str, world: int, cfg: Config | None = None, **env: Any) -> Plan:
    return planner.plan(cfg or Config(engine=FSDP2(), optimizer=AdamW()), facts(name, world, **env)).unwrap()
