"""Configs with facts on which rules fire: what is wrapped, tied, and held together."""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve

from prepkit.config import (
    DDP,
    FSDP1,
    FSDP2,
    CheckpointBlocks,
    CompileBlocks,
    Config,
    WrapClasses,
    WrapPaths,
    WrapRoot,
    WrapSize,
)
from prepkit.facts import ArchitectureFacts, Env, Facts, ModelFacts
from prepkit.testing.tiny import tiny_facts, tiny_model
from tests.support.counterexamples.build import Counterexample, of, param, ranks


def _on_torch(version: str, model: ModelFacts) -> Facts:
    facts = tiny_facts(model, device="cuda")
    return evolve(facts, env=evolve(facts.env, torch=version))


def _embeddings(*, declared: bool, tied: bool) -> ModelFacts:
    said = ArchitectureFacts(tie_word_embeddings=declared)
    return evolve(tiny_model(tied=tied), architecture=said, tied_keys=("head.weight",), has_tie_weights=True)


_EXPERTS = tuple(param(f"layers.0.attn.experts.{index}.weight") for index in range(2))
_LORA = param("layers.0.attn.lora", "bfloat16")


def _hooked() -> ModelFacts:
    return evolve(
        tiny_model(),
        param_hooks=(("norm.weight", "register_hook"), ("head.weight", "register_post_accumulate_grad_hook")),
    )


COUNTEREXAMPLES: dict[str, Callable[[], Counterexample]] = {
    "wrap.empty": lambda: ranks(Config(engine=FSDP2(wrap=WrapClasses(("",))))),
    "wrap.class-not-found": lambda: ranks(Config(engine=FSDP2(wrap=WrapClasses(("BertLayer",))))),
    "wrap.pattern-not-found": lambda: ranks(Config(engine=FSDP2(wrap=WrapPaths(("model.layers.*",))))),
    "wrap.container": lambda: ranks(Config(engine=FSDP2(wrap=WrapPaths(("layers",))))),
    "wrap.size-below-one": lambda: ranks(Config(engine=FSDP2(wrap=WrapSize(0)))),
    "wrap.named-twice": lambda: ranks(Config(engine=FSDP2(wrap=WrapClasses(("Block", "Block"))))),
    "blocks.none-selected": lambda: of(Config(compile=CompileBlocks()), tiny_model(blocks=1)),
    "blocks.one-unit": lambda: ranks(Config(engine=FSDP2(wrap=WrapRoot()))),
    "blocks.nested": lambda: of(
        Config(checkpointing=CheckpointBlocks(blocks=WrapClasses(("Block", "Linear")))), tiny_model()
    ),
    "blocks.declared-absent": lambda: (
        Config(engine=FSDP2()),
        tiny_facts(evolve(tiny_model(), declared_blocks=("VisionLayer",)), world=2),
    ),
    "ties.split": lambda: of(Config(engine=FSDP2(wrap=WrapClasses(("Block", "Linear")))), tiny_model(tied=True)),
    "ties.only-declared": lambda: of(Config(), _embeddings(declared=True, tied=False)),
    "ties.undeclared": lambda: of(Config(), _embeddings(declared=False, tied=True)),
    "units.mixed-dtypes": lambda: of(Config(engine=FSDP2()), tiny_model(extra=(_LORA,))),
    "units.scalar": lambda: of(Config(engine=FSDP1()), tiny_model(extra=(param("norm.scale", shape=()),))),
    "units.left-whole": lambda: (
        Config(engine=FSDP2(ignored=("norm",))),
        _on_torch("2.6.0", tiny_model(extra=(param("head.scale", shape=()),))),
    ),
    "units.packed": lambda: (
        Config(engine=FSDP2()),
        _on_torch("2.6.0", tiny_model(extra=(param("norm.packed", "uint8", requires_grad=False, cls="Params4bit"),))),
    ),
    "units.packed-whole": lambda: ranks(
        Config(engine=FSDP2()),
        model=tiny_model(extra=(param("norm.packed", "uint8", requires_grad=False, cls="Params4bit"),)),
    ),
    "units.integer": lambda: of(
        Config(engine=FSDP2()), tiny_model(extra=(param("embed.table", "int16", requires_grad=False),))
    ),
    "units.empty": lambda: of(Config(engine=FSDP2()), tiny_model(extra=(param("norm.none", shape=(0, 4)),))),
    "units.mixed-requires-grad": lambda: ranks(
        Config(engine=FSDP2()), model=tiny_model(frozen=("layers.0.attn.weight",)), optimizer=None
    ),
    "units.unused-on-old-torch": lambda: (
        Config(engine=FSDP2(reduce_unused=True)),
        _on_torch("2.9.0", tiny_model()),
    ),
    "units.experts": lambda: ranks(Config(engine=FSDP2()), model=tiny_model(extra=_EXPERTS)),
    "units.experts-on-old-torch": lambda: (
        Config(engine=FSDP2()),
        evolve(tiny_facts(tiny_model(extra=_EXPERTS), world=8), env=Env.declare(world_size=8, torch="2.9.0")),
    ),
    "params.self-written": lambda: of(
        Config(engine=FSDP2()), evolve(tiny_model(), self_written=(("embed.weight", "max_norm=1"),))
    ),
    "params.hooks-lost": lambda: of(Config(engine=FSDP2()), _hooked()),
    "params.attributes-lost": lambda: of(
        Config(engine=FSDP1(use_orig_params=False)),
        evolve(tiny_model(), param_attributes=(("norm.weight", "_no_weight_decay"),)),
    ),
    "params.hooks-local": lambda: ranks(Config(engine=DDP()), model=_hooked()),
}
"""Rule id to a config and facts on which the rule fires."""
