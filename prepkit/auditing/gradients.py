"""What is wrong with the gradients that an optimizer is about to step."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.auditing.rule import AuditRule
from prepkit.facts.prepared import PreparedFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit


def _nothing(facts: PreparedFacts) -> Iterator[Hit]:
    found = facts.gradients
    if found is not None and found.stepped and len(found.missing) == found.stepped:
        yield Hit("optimizer", f"None of {count(found.stepped, 'parameter')} that it is about to step has a gradient.")
    elif found is not None and found.zero:
        what = f"Every gradient of {count(found.stepped, 'parameter')} that it is about to step is zero."
        yield Hit("optimizer", what, "Look for a clip of 0, a loss times 0, or labels that are all ignored.")


def _without(facts: PreparedFacts) -> Iterator[Hit]:
    found = facts.gradients
    if found is not None and 0 < len(found.missing) < found.stepped:
        what = f"{count(len(found.missing), 'parameter')} of {found.stepped} that are about to be stepped"
        yield Hit(at(found.missing[0]), f"{what} have no gradient: {some(found.missing)}.")


def _spoiled(facts: PreparedFacts) -> Iterator[Hit]:
    found = facts.gradients
    if found is not None and found.spoiled:
        what = f"{count(len(found.spoiled), 'gradient')} about to be stepped hold NaN or infinite elements"
        yield Hit(at(found.spoiled[0]), f"{what}: {some(found.spoiled)}.")


def _parted(facts: PreparedFacts) -> Iterator[Hit]:
    found = facts.gradients
    if found is None:
        return
    averaged = {param.name for param in facts.params if param.averaged_by}
    own = [name for name in found.parted if name in averaged]
    if own:
        what = f"Each rank is about to step {count(len(own), 'parameter')} with a gradient of its own: {some(own)}."
        yield Hit(at(own[0]), what)


RULES: tuple[AuditRule, ...] = (
    AuditRule(
        id="audit.steps-nothing",
        summary="What an optimizer steps has gradients.",
        look=_nothing,
        fix="Call zero_grad() before backward or after step(), not between them; give the optimizer what is trained.",
    ),
    AuditRule(
        id="audit.gradients-part",
        summary="Ranks step a replicated parameter with one gradient.",
        look=_parted,
        fix="Call the wrapper, model(x), and not model.module(x); leave no_sync() before a window's last backward.",
        source=("torch DistributedDataParallel.forward",),
    ),
    AuditRule(
        id="audit.gradients-not-finite",
        summary="Gradients are finite when they are stepped.",
        look=_spoiled,
        fix="Look at the first batch and the loss under torch.autograd.detect_anomaly(); mind sqrt and log of zero.",
        severity=Severity.WARNING,
        source=("torch.autograd.detect_anomaly",),
    ),
    AuditRule(
        id="audit.without-gradient",
        summary="Every parameter that is stepped has a gradient.",
        look=_without,
        fix="Freeze what takes no part in the loss; look for a .detach(), .item() or no_grad() on the way to it.",
        severity=Severity.NOTE,
    ),
)
"""Reporting order: nothing is trained, ranks part, then values."""
