"""Builds a config with facts in which one thing is other than usual."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from prepkit.config import Config
from prepkit.facts import Facts, GroupFact, ModelFacts, OptimizerFacts, ParamFact
from prepkit.testing.tiny import LIBRARIES, tiny_facts, tiny_loader, tiny_model, tiny_optimizer

Counterexample = tuple[Config, Facts]
"""A config, and facts for which it is wrong."""


def ranks(cfg: Config, world: int = 8, **options: Any) -> Counterexample:
    """Facts of so many ranks, with fields of their own."""
    return cfg, evolve(tiny_facts(world=world), **options)


def env(cfg: Config, **changes: Any) -> Counterexample:
    """An environment with fields of its own."""
    facts = tiny_facts()
    return cfg, evolve(facts, env=evolve(facts.env, **changes))


def of(cfg: Config, model: ModelFacts) -> Counterexample:
    """Facts about this model."""
    return cfg, tiny_facts(model)


def param(name: str, dtype: str = "float32", shape: tuple[int, ...] = (4,), **more: Any) -> ParamFact:
    """A parameter of four elements."""
    return evolve(ParamFact(name=name, shape=shape, dtype=dtype), **more)


def optimized(cfg: Config, **changes: Any) -> Counterexample:
    """An optimizer with fields of its own."""
    facts = tiny_facts()
    assert facts.optimizer is not None
    return cfg, evolve(facts, optimizer=evolve(facts.optimizer, **changes))


def loaded(cfg: Config, **changes: Any) -> Counterexample:
    """Two ranks and a loader with fields of its own."""
    return cfg, tiny_facts(world=2, loader=tiny_loader(**changes))


def float8(cfg: Config, device: str = "cuda", world: int = 1, optimizer: bool = True, **env: Any) -> Counterexample:
    """The config on a model of width 16, where everything is installed, on a Blackwell unless said otherwise."""
    facts = tiny_facts(tiny_model(width=16, vocab=16), world=world, device=device, optimizer=optimizer)
    usual = {"libraries": LIBRARIES, "capability": (10, 0) if device == "cuda" else None}
    return cfg, evolve(facts, env=evolve(facts.env, **{**usual, **env}))


def changed_model(example: Counterexample, **changes: Any) -> Counterexample:
    """The counterexample with a model that has fields of its own."""
    return example[0], evolve(example[1], model=evolve(example[1].model, **changes))


def with_loader(example: Counterexample) -> Counterexample:
    """The counterexample with a loader."""
    return example[0], evolve(example[1], loaders=(tiny_loader(),))


NAMES = tuple(param.name for param in tiny_model().params)


WHOLE = GroupFact(slots=NAMES)


def grouped(*groups: tuple[str, ...]) -> OptimizerFacts:
    """An optimizer with these groups."""
    return evolve(tiny_optimizer(tiny_model()), groups=tuple(GroupFact(slots=slots) for slots in groups))
