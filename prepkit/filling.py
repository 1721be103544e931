"""Which tensor of a checkpoint fills which of the model, and what a model can initialise by itself.

Sums on facts that rules and planner share, linear in the number of tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from attrs import evolve, frozen

from prepkit.checkpoint import CheckpointFacts, StoredTensor
from prepkit.config import Config, InitWeights, LoadWeights
from prepkit.facts import Facts, ModelFacts
from prepkit.units import parent


@frozen(kw_only=True)
class Match:
    """A checkpoint held against a model."""

    found: tuple[tuple[str, StoredTensor], ...]
    """Name of each parameter and persistent buffer, with the tensor that fills it; a tied one under its first name."""
    missing: tuple[str, ...]
    """Names that the checkpoint has under none of their ties."""
    unexpected: tuple[str, ...]
    """Keys that are no parameter, no buffer and no tie of the model."""
    twice: tuple[tuple[str, str], ...]
    """Of tied parameters that the checkpoint holds under several keys: the key that is read, and one that is not."""


def match(model: ModelFacts, checkpoint: CheckpointFacts) -> Match:
    """What the checkpoint fills; names of the model are keys of the checkpoint, as in a state dict."""
    stored = {tensor.key: tensor for tensor in checkpoint.tensors}
    tied = {group[0]: group for group in model.ties}
    wanted = [*(param.name for param in model.params), *(buffer.name for buffer in model.buffers if buffer.persistent)]
    found: list[tuple[str, StoredTensor]] = []
    twice: list[tuple[str, str]] = []
    for name in wanted:
        keys = [key for key in tied.get(name, (name,)) if key in stored]
        if keys:
            found.append((name, stored[keys[0]]))
            twice.extend((keys[0], key) for key in keys[1:])
    there = {name for name, _ in found}
    known = {*wanted, *(buffer.name for buffer in model.buffers), *(name for group in model.ties for name in group)}
    return Match(
        found=tuple(found),
        missing=tuple(name for name in wanted if name not in there),
        unexpected=tuple(key for key in stored if key not in known),
        twice=tuple(twice),
    )


def asked(cfg: Config, facts: Facts) -> CheckpointFacts | None:
    """The checkpoint that the config loads, where it was seen, with its keys renamed as the config says."""
    there, how = facts.checkpoint, cfg.weights
    if not isinstance(how, LoadWeights) or there is None or there.path != how.path:
        return None
    if not how.rename or unreadable(how):
        return there
    return evolve(there, tensors=tuple(evolve(one, key=renamed(how, one.key)) for one in there.tensors))


def renamed(how: LoadWeights, key: str) -> str:
    """The name in the model that a key of the checkpoint stands for.

    >>> renamed(LoadWeights("x", rename=(("^policy[.]", ""), ("[.]gamma$", ".weight"))), "policy.norm.gamma")
    'norm.weight'
    """
    for pattern, replacement in how.rename:
        key = re.sub(pattern, replacement, key)
    return key


def unreadable(how: LoadWeights) -> tuple[tuple[str, str], ...]:
    """The pairs of ``rename`` that are no regular expression and replacement, each with why."""
    found = []
    for pattern, replacement in how.rename:
        try:
            re.compile(pattern)
            re.sub(f"(?:{pattern})|", replacement, "")
        except (re.error, IndexError) as error:
            found.append((pattern, str(error)))
    return tuple(found)


def initialised(cfg: Config, facts: Facts) -> tuple[str, ...]:
    """Names of the parameters that get their values from initialisers: all, those that a checkpoint lacks, or none."""
    names = tuple(param.name for param in facts.model.params)
    match cfg.weights:
        case InitWeights():
            return names
        case LoadWeights() if (checkpoint := asked(cfg, facts)) is not None:
            missing = set(match(facts.model, checkpoint).missing)
            return tuple(name for name in names if name in missing)
        case _:
            return ()


def computed(cfg: Config, facts: Facts) -> tuple[str, ...]:
    """Names of the buffers that no checkpoint fills: where they are on meta, the model has to compute them."""
    names = tuple(buffer.name for buffer in facts.model.buffers)
    match cfg.weights:
        case InitWeights():
            return names
        case LoadWeights() if (checkpoint := asked(cfg, facts)) is not None:
            filled = {name for name, _ in match(facts.model, checkpoint).found}
            return tuple(name for name in names if name not in filled)
        case _:
            return ()


def helpless(model: ModelFacts, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the tensors whose module has no ``reset_parameters``, nor an ``_init_weights`` in or above it."""
    able = {module.path for module in model.modules if model.classes[module.cls].resets}
    above = {module.path for module in model.modules if model.classes[module.cls].inits}
    return tuple(name for name in names if parent(name) not in able and not _under(parent(name), above))


def _under(path: str, above: set[str]) -> bool:
    while path and path not in above:
        path = parent(path)
    return path in above
