"""Rules about weights: checkpoints that fail to fit a model, and initialisers that are missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import evolve

from prepkit.config import FSDP2, XLA, BroadcastWeights, Config, InitWeights, KeepLoaders, LoadWeights
from prepkit.facts import Facts
from prepkit.facts.checkpoint import (
    CheckpointFacts,
    StoredProblem,
)
from prepkit.testing.tiny import PATH, in_parts, tiny_checkpoint


def _lacking_a_row(facts: Facts) -> tuple[Config, Facts]:
    whole = in_parts(tiny_checkpoint(facts.model))
    return _load(
        facts, evolve(whole, tensors=tuple(tensor for tensor in whole.tensors if tensor.key != "embed.weight.1"))
    )


def _load(facts: Facts, checkpoint: CheckpointFacts | None) -> tuple[Config, Facts]:
    return Config(weights=LoadWeights(PATH)), evolve(facts, checkpoint=checkpoint)


def _changed(facts: Facts, name: str, **changes: Any) -> tuple[Config, Facts]:
    """Another tensor under this name."""
    whole = tiny_checkpoint(facts.model)
    tensors = (evolve(tensor, **changes) if tensor.key == name else tensor for tensor in whole.tensors)
    return _load(facts, evolve(whole, tensors=tuple(tensors)))


def _more(facts: Facts, key: str) -> Facts:
    """Facts of a checkpoint that holds a tensor a second time, under its key with a prefix."""
    whole = tiny_checkpoint(facts.model)
    again = tuple(evolve(tensor, key=key) for tensor in whole.tensors if key.endswith(f".{tensor.key}"))
    return evolve(facts, checkpoint=evolve(whole, tensors=whole.tensors + again))


def _damaged(facts: Facts) -> tuple[Config, Facts]:
    problem = StoredProblem(file="model-0.safetensors", what="truncated: it has 90 bytes of 740")
    return _load(facts, evolve(tiny_checkpoint(facts.model), problems=(problem,)))


def _both(facts: Facts) -> tuple[Config, Facts]:
    model = facts.model
    whole = tiny_checkpoint(model)
    tied = evolve(
        model,
        params=tuple(param for param in model.params if param.name != "head.weight"),
        ties=(("embed.weight", "head.weight"),),
    )
    return _load(evolve(facts, model=tied, optimizer=None), whole)


def _without_resets(facts: Facts) -> Facts:
    classes = tuple(evolve(cls, resets=False) for cls in facts.model.classes)
    return evolve(facts, model=evolve(facts.model, classes=classes))


def _stepped(facts: Facts) -> tuple[Config, Facts]:
    assert facts.optimizer is not None, "healthy facts have one"
    optimizer = evolve(facts.optimizer, stateful=("norm.weight",))
    return Config(engine=FSDP2(), weights=BroadcastWeights()), evolve(facts, optimizer=optimizer)


COUNTEREXAMPLES: dict[str, Callable[[Facts], tuple[Config, Facts]]] = {
    "weights.not-filled": lambda facts: (
        Config(engine=XLA(), weights=InitWeights(), loaders=KeepLoaders()),
        evolve(facts, env=evolve(facts.env, libraries=(("torch_xla", "2.9.0"),))),
    ),
    "weights.state-not-sent": _stepped,
    "weights.not-seen": lambda facts: _load(facts, None),
    "weights.unreadable": _damaged,
    "weights.rename": lambda facts: (
        Config(weights=LoadWeights(PATH, rename=(("^old[.]", ""),))),
        _more(facts, "old.norm.weight"),
    ),
    "weights.missing-keys": lambda facts: _load(facts, tiny_checkpoint(facts.model, drop=("norm.weight",))),
    "weights.unexpected-keys": lambda facts: (Config(weights=LoadWeights(PATH)), _more(facts, "old.norm.weight")),
    "weights.shape": lambda facts: _changed(facts, "norm.weight", shape=(8,), length=32),
    "weights.parts": _lacking_a_row,
    "weights.dtype": lambda facts: _changed(facts, "norm.weight", dtype="int8", length=4),
    "weights.tied-twice": _both,
    "weights.no-initialiser": lambda facts: (Config(weights=InitWeights()), _without_resets(facts)),
    "weights.buffer-not-computed": lambda facts: (Config(weights=InitWeights()), facts),
}
"""Rule id to a pair on which it fires, made from healthy facts."""
