"""What a model makes of a batch: on whom what it says of a sample depends, and what its losses compare that with."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.facts.window import ForwardFacts
from prepkit.findings import Severity
from prepkit.findings.text import some
from prepkit.rules.rule import Hit, Moment, Rule

_BATCH_FIRST = "Write batch_first=True where it is made, or give it (time, batch, width)."


def _forwards(facts: RunFacts) -> tuple[ForwardFacts, ...]:
    return facts.window.forwards if facts.window is not None else ()


def _told_of_texts(facts: RunFacts) -> bool:
    """Return whether ``run.text-odd`` says the same of what such a model was called with."""
    return facts.window is not None and bool(facts.window.text)


def _mixes(facts: RunFacts) -> Iterator[Hit]:
    for one in _forwards(facts):
        if one.mixed is not None:
            place = one.mixed.path or "its own forward"
            what = f"What it says of one sample changes with the other {one.mixed.batch - 1} of the batch, also in"
            since = f"evaluation mode; from {place} on ({one.mixed.kind})."
            yield Hit(one.model, f"{what} {since}", _BATCH_FIRST if one.mixed.time_first else "")


def _sees(facts: RunFacts) -> Iterator[Hit]:
    for one in _forwards(facts):
        if one.ahead:
            what = (
                f"Each place of {one.ahead} learns the next token, and what it says changes with that token: it reads"
            )
            yield Hit(one.model, f"{what} off what it is to predict.")


def _copies(facts: RunFacts) -> Iterator[Hit]:
    for one in _forwards(facts):
        if one.copies:
            what = f"Each place of {one.copies} learns the token that it was given, and sees none behind it: there is"
            yield Hit(one.model, f"{what} nothing to predict.")
        elif one.skips and not _told_of_texts(facts):
            yield Hit(one.model, "Each place learns the token behind the next one: something has shifted them twice.")


def _pads(facts: RunFacts) -> Iterator[Hit]:
    for one in _forwards(facts):
        if one.padded:
            what = f"What it says of a sample changes with the number of pads behind it in {one.padded}"
            yield Hit(one.model, f"{what}, and so with the width that its batch is padded to.")


def _learns_pads(facts: RunFacts) -> Iterator[Hit]:
    for one in _forwards(facts):
        if one.learned and not _told_of_texts(facts):
            yield Hit(one.model, f"The loss counts places that are pads in {one.learned}.")


def _placed(facts: RunFacts) -> Iterator[Hit]:
    for one in _forwards(facts):
        if one.placed:
            what = "What it says of a sample depends on its place in the batch, as of positions counted along the batch"
            yield Hit(one.model, f"{what}: it says something else where all samples have moved by one.")


def _holds(facts: RunFacts) -> Iterator[Hit]:
    for one in _forwards(facts):
        if one.holds:
            yield Hit(one.model, f"What each sample is to give stands in what it is given: {one.holds} is the target.")
        if one.shown:
            what = f"The class of each sample of the loss stands in what it is given, {one.shown}, which hides that of"
            fix = "Take the loss on samples whose classes it is not given, as half of them in each step."
            yield Hit(one.model, f"{what} others: it reads off what it is to say.", fix)


def _views(facts: RunFacts) -> Iterator[Hit]:
    for one in _forwards(facts):
        if one.views_apart:
            what = f"Its {one.views_apart} samples stand in pairs, each beside the one that is most like it"
            yield Hit(one.model, f"{what}, as two views of one thing; the loss has it find another one.")


def _misgiven(facts: RunFacts) -> Iterator[Hit]:
    for one in facts.window.misgiven if facts.window is not None else ():
        if not one.kind:
            yield Hit(one.loss, f"It is given {one.what}.", one.fix)


def _bounded(facts: RunFacts) -> Iterator[Hit]:
    for one in facts.window.misgiven if facts.window is not None else ():
        if one.kind == "bounded":
            yield Hit(one.loss, f"It is given {one.what}.", one.fix)


def _alike(facts: RunFacts) -> Iterator[Hit]:
    for name, line in facts.window.alike if facts.window is not None else ():
        what = f"It was called twice for one loss ({line}), with the same samples, and has said the same"
        yield Hit(name, f"{what}: two views of a sample are one.")


def _drops(facts: RunFacts) -> Iterator[Hit]:
    for one in _forwards(facts):
        if one.drops:
            yield Hit(one.model, f"It drops elements in evaluation mode too: {some(one.drops)}.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.samples-mix",
        summary="What a model says of a sample does not depend on the others of its batch.",
        check=_mixes,
        at=(Moment.AUDIT,),
        fix="Look which dimension it takes for the batch: attention, softmax and reshapes go along another one.",
        severity=Severity.WARNING,
        source=("torch MultiheadAttention, RNNBase: batch_first",),
    ),
    Rule(
        id="run.sees-ahead",
        summary="No place sees the token that it is to predict.",
        check=_sees,
        at=(Moment.AUDIT,),
        fix="Mask what comes later: is_causal=True, or a mask that is True (or -inf) above the diagonal; read one way.",
        source=("torch scaled_dot_product_attention",),
    ),
    Rule(
        id="run.shifted",
        summary="Each place predicts the token behind it.",
        check=_copies,
        at=(Moment.AUDIT,),
        fix="Shift once: outputs[:, :-1] against tokens[:, 1:].",
        severity=Severity.WARNING,
        source=("transformers ForCausalLMLoss",),
    ),
    Rule(
        id="run.pads-heeded",
        summary="What a model says of a sample does not depend on the pads behind it.",
        check=_pads,
        at=(Moment.AUDIT,),
        fix="Give it the mask of the pads, with the sense that it takes, or lengths; average over tokens alone.",
        severity=Severity.WARNING,
        source=("torch TransformerEncoder: src_key_padding_mask", "torch pack_padded_sequence"),
    ),
    Rule(
        id="run.pads-learned",
        summary="Pads do not count in a loss.",
        check=_learns_pads,
        at=(Moment.AUDIT,),
        fix="Write -100 where a target is a pad, or ignore_index= of the pad.",
        severity=Severity.WARNING,
        source=("torch cross_entropy: ignore_index",),
    ),
    Rule(
        id="run.calls-alike",
        summary="A loss over two calls of a model has two things to compare.",
        check=_alike,
        at=(Moment.AUDIT,),
        fix="Augment each view by itself, and return a copy of a sample where an augmentation writes in place.",
        severity=Severity.WARNING,
        source=("torch Module.forward",),
    ),
    Rule(
        id="run.samples-placed",
        summary="What a model says of a sample is the same wherever it stands in the batch.",
        check=_placed,
        at=(Moment.AUDIT,),
        fix="Count positions along the dimension of the sequence: of (N, T, C), with batch_first=True, x.size(1).",
        severity=Severity.WARNING,
        source=("torch Module.forward",),
    ),
    Rule(
        id="run.views-apart",
        summary="A contrastive loss pairs each sample with its own other view.",
        check=_views,
        at=(Moment.AUDIT,),
        fix="Put views one behind the other, as the loss takes them: torch.cat([first, second]), or for views of shape "
        "(N, 2, ...) views.transpose(0, 1).flatten(0, 1).",
        severity=Severity.WARNING,
        source=("SimCLR, arXiv 2002.05709",),
    ),
    Rule(
        id="run.target-given",
        summary="What is to be predicted does not stand in the input.",
        check=_holds,
        at=(Moment.AUDIT,),
        fix="Take the target from behind the window: series[i + length], and not series[i + length - 1].",
        severity=Severity.WARNING,
        source=("torch.nn.functional.mse_loss",),
    ),
    Rule(
        id="run.loss-misgiven",
        summary="A loss is given what it is defined for.",
        check=_misgiven,
        at=(Moment.AUDIT,),
        fix="Read in torch's page of the loss what it takes.",
        source=("torch.nn.functional",),
    ),
    Rule(
        id="run.loss-bounded",
        summary="What a model can say reaches what it is to learn.",
        check=_bounded,
        at=(Moment.AUDIT,),
        fix="Leave the last activation out, or scale the targets.",
        severity=Severity.WARNING,
        source=("torch.nn.functional",),
    ),
    Rule(
        id="run.drops-evaluating",
        summary="Nothing is dropped in evaluation mode.",
        check=_drops,
        at=(Moment.AUDIT,),
        fix="Write training=self.training, or dropout_p=self.dropout if self.training else 0.0.",
        severity=Severity.WARNING,
        source=("torch dropout, scaled_dot_product_attention",),
    ),
)
"""What is asked of a model with its batch changed, in reporting order."""
