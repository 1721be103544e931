"""How a loop shares its work over micro-batches, ranks and steps."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.loops import ShareFacts
from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.rules.rule import Hit, Moment, Rule


def _shares(facts: RunFacts) -> ShareFacts:
    return facts.window.shares if facts.window is not None else ShareFacts()


def _twice(facts: RunFacts) -> Iterator[Hit]:
    line, library, count = _shares(facts).twice
    if count:
        what = f"The program has divided the loss that goes backward here by {count}, and {library} does so again"
        yield Hit(line, f"{what}: gradients are {count} times too small.")


def _clipped_late(facts: RunFacts) -> Iterator[Hit]:
    line, step = _shares(facts).clipped_late
    if line:
        yield Hit(line, f"It clips gradients that {step} has stepped already: the step takes them as they are.")


def _clipped_between(facts: RunFacts) -> Iterator[Hit]:
    for line in _shares(facts).clipped_between:
        what = "It clips what the first micro-batches of a step have made, and again what later ones have added to it"
        yield Hit(line, f"{what}: later micro-batches weigh more, and none as much as the step would have it.")


def _gathered(facts: RunFacts) -> Iterator[Hit]:
    for line, ranks in _shares(facts).gathered:
        what = f"Outputs of {ranks} ranks are gathered without their graph, and go into the loss, this rank's own too"
        yield Hit(line, f"{what}: no gradient flows through that side of it.")


def _misplaced(facts: RunFacts) -> Iterator[Hit]:
    for line, told, own in _shares(facts).misplaced:
        what = f"Samples of this rank are compared with those of all ranks, and their targets begin at column {told}"
        yield Hit(line, f"{what}: their own pairs begin at {own}, and what it learns are pairs of another rank.")


def _unwaited(facts: RunFacts) -> Iterator[Hit]:
    for line, name in _shares(facts).unwaited:
        yield Hit(line, f"{name}(async_op=True) over a gradient was not waited for, and the optimizer steps now.")


def _kept(facts: RunFacts) -> Iterator[Hit]:
    for name, file, count in _shares(facts).kept:
        what = f"`{name}` keeps the graphs of losses of earlier steps, of {count} by now, so that memory grows"
        yield Hit(file, f"{what} with each step.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.loss-divided",
        summary="A loss is divided by the number of micro-batches once.",
        check=_twice,
        at=(Moment.AUDIT,),
        fix="Hand the loss to the library as it is, without a division.",
        severity=Severity.WARNING,
        source=("accelerate Accelerator.backward",),
    ),
    Rule(
        id="run.clipped-late",
        summary="Gradients are clipped before they are stepped.",
        check=_clipped_late,
        at=(Moment.AUDIT,),
        fix="Move the line between the backward and optimizer.step().",
        severity=Severity.WARNING,
        source=("torch clip_grad_norm_", "accelerate Accelerator.clip_grad_norm_"),
    ),
    Rule(
        id="run.clipped-between",
        summary="Gradients are clipped once all micro-batches have come to them.",
        check=_clipped_between,
        at=(Moment.AUDIT,),
        fix="Clip where the optimizer steps alone: behind `if accelerator.sync_gradients:` under accelerate.",
        severity=Severity.WARNING,
        source=("torch clip_grad_norm_", "accelerate Accelerator.clip_grad_norm_"),
    ),
    Rule(
        id="run.gathered-apart",
        summary="Outputs that are gathered for a loss keep the graph of the rank's own part.",
        check=_gathered,
        at=(Moment.AUDIT,),
        fix="Write gathered[rank] = outputs before they are joined.",
        severity=Severity.WARNING,
        source=("torch.distributed.all_gather", "torch.distributed.nn.functional.all_gather"),
    ),
    Rule(
        id="run.pairs-misplaced",
        summary="Targets among gathered samples are the rank's own.",
        check=_misplaced,
        at=(Moment.AUDIT,),
        fix="Write targets = torch.arange(len(x)) + rank * len(x).",
        severity=Severity.WARNING,
        source=("torch.distributed.all_gather",),
    ),
    Rule(
        id="run.unwaited",
        summary="What is reduced in the background is waited for before it is stepped.",
        check=_unwaited,
        at=(Moment.AUDIT,),
        fix="Keep what the call returns, and call work.wait() for each before the step.",
        severity=Severity.WARNING,
        source=("torch.distributed.all_reduce",),
    ),
    Rule(
        id="run.loss-kept",
        summary="Totals hold numbers, and no graphs.",
        check=_kept,
        at=(Moment.AUDIT,),
        fix="Write total += loss.item(), or loss.detach() in the place of loss.",
        severity=Severity.WARNING,
        source=("torch Tensor.detach",),
    ),
)
"""Reporting order."""
