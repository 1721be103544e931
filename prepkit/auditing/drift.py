"""What has changed since the audit, while the model trains: facts of the audit against facts of this step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isclose

from prepkit.auditing.rule import AuditRule
from prepkit.facts.prepared import PreparedFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit


def _params(facts: PreparedFacts) -> Iterator[Hit]:
    for before, now in facts.running:
        old = {param.name: (param.dtype, param.device) for param in before.params}
        new = {param.name: (param.dtype, param.device) for param in now.params}
        if gone := [name for name in old if name not in new]:
            yield Hit(
                at(gone[0]), f"The model no longer has {count(len(gone), 'parameter')} of the audit: {some(gone)}."
            )
        if more := [name for name in new if name not in old]:
            yield Hit(
                at(more[0]), f"The model has {count(len(more), 'parameter')} more than at the audit: {some(more)}."
            )
        changed = [name for name in old if name in new and old[name] != new[name]]
        if changed:
            (dtype, device), (other, there) = old[changed[0]], new[changed[0]]
            what = f"was {dtype} on {device}, and is {other} on {there}"
            also = f"; so are {len(changed) - 1} more" if len(changed) > 1 else ""
            yield Hit(at(changed[0]), f"It {what}{also}.")


def _trained(facts: PreparedFacts) -> Iterator[Hit]:
    for before, now in facts.running:
        old = {param.name: param.requires_grad for param in before.params}
        changed = [one for one in now.params if old.get(one.name, one.requires_grad) != one.requires_grad]
        for way, word in ((True, "unfrozen"), (False, "frozen")):
            if names := [one.name for one in changed if one.requires_grad is way]:
                yield Hit(at(names[0]), f"{count(len(names), 'parameter')} {word} since the audit: {some(names)}.")


def _ties(facts: PreparedFacts) -> Iterator[Hit]:
    for before, now in facts.running:
        held = [set(group) for group in now.ties]
        for group in before.ties:
            if not any(set(group) <= one for one in held):
                yield Hit(at(group[0]), f"{' and '.join(f'`{name}`' for name in group)} are no longer one parameter.")


def _slots(facts: PreparedFacts) -> Iterator[Hit]:
    for before, now in facts.running:
        for index, (old, new) in enumerate(zip(before.held, now.held, strict=False)):
            gone = [name for name in old if name not in new]
            orphans = now.orphans[index] - before.orphans[index]
            where = "optimizer" if len(now.held) == 1 else f"optimizer[{index}]"
            if gone or orphans > 0:
                what = f"It no longer steps {some(gone)}" if gone else "It steps all that it did"
                strangers = f", and steps {count(orphans, 'tensor')} that the model does not have" * (orphans > 0)
                yield Hit(where, f"{what}{strangers}.")


def _state(facts: PreparedFacts) -> Iterator[Hit]:
    for before, now in facts.running:
        for index, (old, new) in enumerate(zip(before.stateful, now.stateful, strict=False)):
            if lost := [name for name in old if name not in new]:
                where = "optimizer" if len(now.held) == 1 else f"optimizer[{index}]"
                yield Hit(where, f"The state of {count(len(lost), 'parameter')} is gone: {some(lost)}.")


def _hooks(facts: PreparedFacts) -> Iterator[Hit]:
    for before, now in facts.running:
        gone = Counter(before.hooks) - Counter(now.hooks)
        if gone:
            path, hook = next(iter(gone))
            what = f"{count(gone.total(), 'hook')} of the audit {'is' if gone.total() == 1 else 'are'} gone, such as"
            yield Hit(at(path), f"{what} {hook}.")


def _rate(facts: PreparedFacts) -> Iterator[Hit]:
    for _, now in facts.running:
        pairs = list(zip(now.rates, now.scheduled, strict=False))
        for index, (rate, wanted) in enumerate(pairs):
            if not isclose(rate, wanted, rel_tol=1e-6, abs_tol=1e-15):
                where = f"optimizer.param_groups[{index}].lr"
                yield Hit(where, f"The learning rate is {rate:g}, and the scheduler has set {wanted:g}.")
                break


def _ranks(facts: PreparedFacts) -> Iterator[Hit]:
    for _, now in facts.running:
        if now.parted:
            what = f"Ranks that hold the same of {count(len(now.parted), 'parameter')} differ: {some(now.parted)}."
            yield Hit(at(now.parted[0]), what)
        if now.rates_parted:
            yield Hit("optimizer", "Ranks step with different learning rates.", "Give every rank the same lr.")


RULES: tuple[AuditRule, ...] = (
    AuditRule(
        id="audit.drift-params",
        summary="While it trains a model keeps its parameters, and each its dtype and device.",
        look=_params,
        fix="Cast, move and change the model before it is prepared, not in the loop: no .half(), .to() or del there.",
    ),
    AuditRule(
        id="audit.drift-trained",
        summary="What trains at the audit trains later, and nothing else.",
        look=_trained,
        fix="Freeze and unfreeze before the model is wrapped; else wrap it and make its optimizer again at that step.",
        severity=Severity.WARNING,
        source=("pain 26",),
    ),
    AuditRule(
        id="audit.drift-ties",
        summary="Tied parameters stay one parameter.",
        look=_ties,
        fix="Call model.tie_weights() after what replaced one of them, and make the optimizer again.",
    ),
    AuditRule(
        id="audit.drift-slots",
        summary="An optimizer goes on with the parameters that it had.",
        look=_slots,
        fix="Make the optimizer again where parameters are replaced, and give the scheduler that one.",
        source=("pain 1",),
    ),
    AuditRule(
        id="audit.drift-state",
        summary="An optimizer keeps the state that it had.",
        look=_state,
        fix="Clear no optimizer.state in the loop; load a state dict with the state of every parameter.",
    ),
    AuditRule(
        id="audit.drift-hooks",
        summary="Hooks that hung at the audit hang on.",
        look=_hooks,
        fix="Remove hooks before the model is prepared; what clears all of a module's takes its wrapper's as well.",
        severity=Severity.WARNING,
    ),
    AuditRule(
        id="audit.drift-rate",
        summary="The learning rate is what the scheduler has set.",
        look=_rate,
        fix="Let one of them set the rate: drop the line that writes param_groups[...]['lr'], or the scheduler.",
    ),
    AuditRule(
        id="audit.drift-ranks",
        summary="Ranks that hold the same weights stay equal, bit by bit.",
        look=_ranks,
        fix="Train through the wrapper: its forward, no step of one rank alone; broadcast the weights to go on.",
        source=("pain 22",),
    ),
)
"""Reporting order: the model, its optimizer, its hooks, the rate, the ranks."""
