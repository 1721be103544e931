"""What the lessons of a loop miss: batches, tokens, and what a maker is to learn."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.loops import LessonFacts
from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.rules.rule import Hit, Moment, Rule


def _lessons(facts: RunFacts) -> LessonFacts:
    return facts.window.lessons if facts.window is not None else LessonFacts()


def _skips(facts: RunFacts) -> Iterator[Hit]:
    for line, name, count in _lessons(facts).skips:
        what = f"Each pass reads `{name}`, which leaves out its first {count} batches every time"
        yield Hit(line, f"{what}: from the second pass on they are never trained on.")


def _new_tokens(facts: RunFacts) -> Iterator[Hit]:
    for line, count, first, one in _lessons(facts).new_tokens:
        what = f"The batch has token {one}, of {count} that were added from {first} on, and the embedding is frozen"
        yield Hit(line, f"{what}: new tokens keep the values that they were made with.")


def _alike(facts: RunFacts) -> Iterator[Hit]:
    for line, maker, judge in _lessons(facts).judged_alike:
        who = maker or "What makes samples"
        what = f"{who} is taught to have {judge} say of its samples what {judge} is taught to say"
        yield Hit(line, f"{what}, and not the opposite: it learns to be found out.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.skip-kept",
        summary="Batches that are skipped on resuming are skipped in the first pass alone.",
        check=_skips,
        at=(Moment.AUDIT,),
        fix="Write active = skipped if epoch == first_epoch else loader inside the loop over passes, and read that.",
        severity=Severity.WARNING,
        source=("accelerate skip_first_batches",),
    ),
    Rule(
        id="run.new-tokens-frozen",
        summary="Tokens that are added to a vocabulary, and used, are trained.",
        check=_new_tokens,
        at=(Moment.AUDIT,),
        fix='Give LoraConfig trainable_token_indices=[...] with the new ids, or modules_to_save=["embed_tokens", '
        '"lm_head"].',
        severity=Severity.WARNING,
        source=("peft LoraConfig", "transformers resize_token_embeddings"),
    ),
    Rule(
        id="run.judged-alike",
        summary="A maker learns the opposite of what its judge learns of its samples.",
        check=_alike,
        at=(Moment.AUDIT,),
        fix="Give the loss of the maker's turn the label of real samples, torch.ones_like(said).",
        severity=Severity.WARNING,
        source=("torch tutorials, DCGAN",),
    ),
)
"""Reporting order."""
