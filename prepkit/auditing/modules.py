"""The model itself: modes, ties, dtypes, values."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from prepkit.auditing.rule import AuditRule
from prepkit.facts.prepared import PreparedFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit


def _eval(facts: PreparedFacts) -> Iterator[Hit]:
    sleeping = (*facts.dropout, *facts.normalised)
    if facts.optimizers and not facts.training and sleeping:
        what = f"The model is in evaluation mode, and so {count(len(sleeping), 'module')} not in use: {some(sleeping)}."
        yield Hit("model", what)


def _part_in_eval(facts: PreparedFacts) -> Iterator[Hit]:
    if facts.optimizers and facts.evaluating:
        what = f"Modules with dropout and trained parameters are in evaluation mode: {some(facts.evaluating)}."
        yield Hit(at(facts.evaluating[0]), what)


def _tie(facts: PreparedFacts) -> Iterator[Hit]:
    model = facts.model
    ends = (model.input_embedding, model.output_embedding)
    flat = any("fsdp1" in param.averaged_by for param in facts.params)
    if not model.architecture.tie_word_embeddings or None in ends or ends[0] == ends[1] or flat:
        return  # FSDP1's views have no identity of their own
    pair = {f"{end}.weight" for end in ends}
    names = {param.name for param in model.params}
    if pair <= names and not any(pair <= set(group) for group in model.ties):
        what = f"The config says tie_word_embeddings=True, but `{ends[0]}.weight` is not `{ends[1]}.weight`."
        yield Hit(at(f"{ends[1]}.weight"), what)


def _unlike(facts: PreparedFacts) -> Iterator[Hit]:
    alike: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for param in facts.params:
        if param.requires_grad and re.search(r"\.\d+\.", param.name):
            alike[re.sub(r"\.\d+\.", ".*.", param.name)].append((param.dtype, param.name))
    odd: list[str] = []
    kinds: Counter[str] = Counter()
    for members in alike.values():
        counted = Counter(dtype for dtype, _ in members)
        if len(counted) > 1:
            usual = counted.most_common(1)[0][0]
            odd += [f"{name} ({dtype})" for dtype, name in members if dtype != usual]
            kinds[usual] += 1
    if odd:
        usual = kinds.most_common(1)[0][0]
        yield Hit(at(odd[0].split(" ")[0]), f"Their like in other blocks are {usual}: {some(odd)}.")


def _nan(facts: PreparedFacts) -> Iterator[Hit]:
    if facts.nan:
        yield Hit(
            at(facts.nan[0]), f"NaN before the first step, in {count(len(facts.nan), 'tensor')}: {some(facts.nan)}."
        )


def _meta(facts: PreparedFacts) -> Iterator[Hit]:
    empty = tuple(param.name for param in facts.params if param.device == "meta")
    if empty and len(empty) < len(facts.params):
        what = f"No data for {len(empty)} of {count(len(facts.params), 'parameter')}: {some(empty)}."
        yield Hit(at(empty[0]), what)


def _elsewhere(facts: PreparedFacts) -> Iterator[Hit]:
    for path in facts.elsewhere:
        yield Hit(at(path), "`forward` was set on the object, and computes with modules that are not in this model.")


RULES: tuple[AuditRule, ...] = (
    AuditRule(
        id="audit.left-on-meta",
        summary="Every parameter has data, or none.",
        look=_meta,
        fix="Load or initialise them: module.to_empty(device=...) and then its weights.",
        source=("pain 17",),
    ),
    AuditRule(
        id="audit.nan",
        summary="No parameter and no buffer holds NaN.",
        look=_nan,
        fix="Initialise them again; to_empty() leaves buffers as the memory was.",
        source=("pain 17",),
    ),
    AuditRule(
        id="audit.tie-broken",
        summary="What the config says is tied is one parameter.",
        look=_tie,
        fix="Call model.tie_weights() before the model is wrapped, or write tie_word_embeddings=False.",
        source=("pain 10",),
    ),
    AuditRule(
        id="audit.forward-elsewhere",
        summary="A forward that was set on a module computes with that module.",
        look=_elsewhere,
        fix="Copy the model before its forward is replaced, or take the forward off: del module.forward.",
        source=("pain 20",),
    ),
    AuditRule(
        id="audit.eval-mode",
        summary="A model that is trained is in training mode.",
        look=_eval,
        fix="Call model.train() before the loop; from_pretrained returns a model in evaluation mode.",
        source=("pain 19",),
    ),
    AuditRule(
        id="audit.part-in-eval",
        summary="Parts that are trained are in training mode.",
        look=_part_in_eval,
        fix="Call model.train(), or freeze the part with requires_grad_(False).",
        severity=Severity.WARNING,
    ),
    AuditRule(
        id="audit.unlike-dtypes",
        summary="Trained parameters at the same place of equal blocks have one dtype.",
        look=_unlike,
        fix="Cast them as the others: block.to(dtype).",
        severity=Severity.WARNING,
        source=("pain 8",),
    ),
)
"""Reporting order: what cannot run, what computes otherwise, what trains otherwise."""
