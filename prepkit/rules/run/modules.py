"""The model itself: modes, ties, dtypes, values."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule


def _eval(facts: RunFacts) -> Iterator[Hit]:
    sleeping = (*facts.dropout, *facts.normalised)
    if facts.optimizers and not facts.training and sleeping:
        what = f"The model is in evaluation mode, and so {count(len(sleeping), 'module')} not in use: {some(sleeping)}."
        yield Hit("model", what)


def _part_in_eval(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and facts.evaluating:
        what = f"Modules with dropout and trained parameters are in evaluation mode: {some(facts.evaluating)}."
        yield Hit(at(facts.evaluating[0]), what)


_AGAIN = "Call model.tie_weights() after what replaced one of them, and make the optimizer again."


def _untied(facts: RunFacts) -> Iterator[Hit]:
    """Since an earlier look, or since before apply."""
    for before, now in facts.running:
        held = [set(group) for group in now.ties]
        for group in before.ties:
            if not any(set(group) <= one for one in held):
                what = f"{' and '.join(f'`{name}`' for name in group)} are no longer one parameter."
                yield Hit(at(group[0]), what, _AGAIN)


def _tie(facts: RunFacts) -> Iterator[Hit]:
    if facts.running:
        yield from _untied(facts)
        return
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


def _unlike(facts: RunFacts) -> Iterator[Hit]:
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


_BACK = "Go back to a checkpoint before it; clip gradients, and leave out steps whose loss is not finite."


def _nan(facts: RunFacts) -> Iterator[Hit]:
    for before, now in facts.running:
        if new := [name for name in now.course.not_finite if name not in before.course.not_finite]:
            what = f"NaN or infinite since the last look: {some(new)}, of the weights that were read."
            yield Hit(at(new[0]), what, _BACK)
    if facts.running:
        return
    if facts.nan:
        yield Hit(
            at(facts.nan[0]), f"NaN before the first step, in {count(len(facts.nan), 'tensor')}: {some(facts.nan)}."
        )


def _meta(facts: RunFacts) -> Iterator[Hit]:
    empty = tuple(param.name for param in facts.params if param.device == "meta")
    if facts.applied is not None and facts.applied.empty:
        empty = facts.applied.empty
        yield Hit(at(empty[0]), f"No data for {count(len(empty), 'tensor')}: {some(empty)}.")
    elif empty and len(empty) < len(facts.params):
        what = f"No data for {len(empty)} of {count(len(facts.params), 'parameter')}: {some(empty)}."
        yield Hit(at(empty[0]), what)


def _elsewhere(facts: RunFacts) -> Iterator[Hit]:
    for path in facts.elsewhere:
        yield Hit(at(path), "`forward` was set on the object, and computes with modules that are not in this model.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.left-on-meta",
        summary="Every parameter has data, or none.",
        check=_meta,
        at=(Moment.APPLY, Moment.AUDIT),
        fix="Load or initialise them: module.to_empty(device=...) and then its weights.",
        source=("pain 17",),
    ),
    Rule(
        id="run.nan",
        summary="No parameter and no buffer holds NaN, and none comes to.",
        check=_nan,
        at=(Moment.AUDIT, Moment.DRIFT),
        needs=(Need.VALUES, Need.BEFORE),
        cost="a pass over all weights",
        fix="Load or initialise it again, as by module.reset_parameters(): to_empty() leaves what the memory held.",
        source=("pain 17",),
    ),
    Rule(
        id="run.tie-broken",
        summary="What the config says is tied is one parameter, and what was tied stays so.",
        check=_tie,
        at=(Moment.APPLY, Moment.AUDIT, Moment.DRIFT),
        needs=(Need.BEFORE,),
        fix="Call model.tie_weights() before the model is wrapped, or write tie_word_embeddings=False.",
        source=("pain 10",),
    ),
    Rule(
        id="run.forward-elsewhere",
        summary="A forward that was set on a module computes with that module.",
        check=_elsewhere,
        at=(Moment.AUDIT,),
        fix="Copy the model before its forward is replaced, or take the forward off: del module.forward.",
        source=("pain 20",),
    ),
    Rule(
        id="run.eval-mode",
        summary="A model that is trained is in training mode.",
        check=_eval,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix=(
            "Call model.train() before the loop, as from_pretrained returns a model in evaluation mode; nothing, where "
            "it is to be trained without dropout."
        ),
        severity=Severity.WARNING,
        source=("pain 19",),
    ),
    Rule(
        id="run.part-in-eval",
        summary="Parts that are trained are in training mode.",
        check=_part_in_eval,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call model.train(), or freeze the part with requires_grad_(False).",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.unlike-dtypes",
        summary="Trained parameters at the same place of equal blocks have one dtype.",
        check=_unlike,
        at=(Moment.AUDIT,),
        fix="Cast them as the others: block.to(dtype).",
        severity=Severity.WARNING,
        source=("pain 8",),
    ),
)
"""Reporting order: what cannot run, what computes otherwise, what trains otherwise."""
