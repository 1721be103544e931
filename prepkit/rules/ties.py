"""Parameters that are one and the same, or should be."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prepkit.facts import ModelFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, some
from prepkit.resolve.modules import parent, unit_of
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Rule


def apart(paths: tuple[str, ...], model: ModelFacts) -> Iterator[tuple[tuple[str, str], ...]]:
    """Groups of tied parameters that units at these paths would share: per name the unit that it falls into.

    A name in a module that is reachable under an earlier path is passed over: a shared module has one unit.
    """
    if not model.ties or not paths:
        return
    owner = unit_of(paths, model)
    here = {module.path for module in model.modules}
    for group in model.ties:
        places = tuple((name, owner[name]) for name in group if parent(name) in here)
        if len({unit for _, unit in places}) > 1:
            yield places


def _split(resolved: Resolved) -> Iterator[Hit]:
    for places in apart(resolved.units, resolved.facts.model):
        if places[0][0] in resolved.ignored_params:
            continue
        names = some(tuple(name for name, _ in places))
        units = " and ".join(f"`{unit}`" if unit else "the root" for unit in dict.fromkeys(unit for _, unit in places))
        what = f"{names} are one parameter, but fall into the units {units}; a parameter can be sharded once only."
        extra = some(tuple(dict.fromkeys(unit for _, unit in places if unit)))
        fix = f"Leave {extra} out of config.engine.wrap, or write wrap=WrapBlocks(), which keeps ties together."
        yield Hit(at(places[0][0]), what, fix)


def _embeddings(model: ModelFacts) -> tuple[str, str, bool] | None:
    """Weights of the input and output embedding, and whether they are tied; None where one is not to be seen."""
    if model.input_embedding is None or model.output_embedding is None:
        return None
    first, second = (f"{path}.weight" if path else "weight" for path in (model.input_embedding, model.output_embedding))
    names = {param.name for param in model.params}.union(*model.ties)
    if first == second or first not in names or second not in names:
        return None
    return first, second, any({first, second} <= set(group) for group in model.ties)


def _left_untied(embeddings: tuple[str, ...], model: ModelFacts) -> bool:
    """Whether the model's class ties one of the two, and nothing is tied to it.

    Classes may tie other things, such as two embeddings, and a config that says yes leaves the output as it is.
    """
    tied = set().union(*model.ties)
    return any(_names(key, name) for name in embeddings if name not in tied for key in model.tied_keys)


def _names(key: str, name: str) -> bool:
    """Whether a key of ``_tied_weights_keys``, a regular expression in transformers, is meant for a parameter."""
    try:
        return re.search(key, name) is not None
    except re.error:
        return key == name


def _only_declared(resolved: Resolved) -> Iterator[Hit]:
    model = resolved.facts.model
    pair = _embeddings(model)
    if pair and not pair[2] and model.architecture.tie_word_embeddings and _left_untied(pair[:2], model):
        first, second, _tied = pair
        what = f"model.config.tie_word_embeddings is True, but `{second}` is not `{first}`: each would learn by itself."
        call = "Call model.tie_weights()" if model.has_tie_weights else f"Assign `{first}` to `{second}`"
        yield Hit(at(second), what, f"{call} before planning, or set model.config.tie_word_embeddings = False.")


def _undeclared(resolved: Resolved) -> Iterator[Hit]:
    pair = _embeddings(resolved.facts.model)
    if pair and pair[2] and resolved.facts.model.architecture.tie_word_embeddings is False:
        first, second, _tied = pair
        what = f"`{second}` is `{first}`, but model.config.tie_word_embeddings is False: a reload would untie them."
        yield Hit(at(second), what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="ties.split",
        summary="What is sharded keeps every tied parameter in one unit.",
        check=_split,
        fix="Leave the units that share it out of config.engine.wrap.",
        source=("pain 10", "torch FSDPState._validate_no_duplicate_params"),
    ),
    Rule(
        id="ties.only-declared",
        summary="Embeddings that the model's config calls tied are one parameter.",
        check=_only_declared,
        fix="Call model.tie_weights() before planning.",
        source=("pain 10",),
    ),
    Rule(
        id="ties.undeclared",
        summary="Embeddings that are one parameter are called tied by the model's config.",
        check=_undeclared,
        fix="Set model.config.tie_word_embeddings = True, or give the output embedding a weight of its own.",
        severity=Severity.WARNING,
        source=("pain 10",),
    ),
)
"""Reporting order: what torch refuses, then what would train or save wrongly."""
