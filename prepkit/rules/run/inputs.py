"""What a program hands to its layers and losses: samples as they are read, ids, noise."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.inputs import InputFacts
from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.rules.rule import Hit, Moment, Rule


def _given(facts: RunFacts) -> InputFacts:
    return facts.window.inputs if facts.window is not None else InputFacts()


def _padding(facts: RunFacts) -> Iterator[Hit]:
    for one in _given(facts).padding:
        what = f"Of {one.batch} samples {one.samples} ids are {one.row}, the padding_idx of this table, and no pads:"
        yield Hit(one.line, f"{what} {one.said}. Its row stays 0.")


def _ordered(facts: RunFacts) -> Iterator[Hit]:
    for line, function, sampler in _given(facts).ordered:
        what = f"{function} runs over the samples of a batch in the order in which {sampler} has drawn them: nothing"
        yield Hit(line, f"{what} has sorted them, so that the loss depends on that order.")


def _uniform(facts: RunFacts) -> Iterator[Hit]:
    for line in _given(facts).uniform:
        what = "Numbers in [0, 1) are multiplied by a standard deviation and added to a mean: all of them are above it,"
        yield Hit(line, f"{what} and their spread is another.")


def _noises(facts: RunFacts) -> Iterator[Hit]:
    for line, other in _given(facts).noises:
        what = f"The model is to say the noise that is drawn here, and is given that of {other}:"
        yield Hit(line, f"{what} it can learn nothing of this one.")


def _times(facts: RunFacts) -> Iterator[Hit]:
    for line, other in _given(facts).times:
        what = "The model is told the times that are drawn here, and what it is given has as much noise as the times of"
        yield Hit(line, f"{what} {other} say.")


def _rewritten(facts: RunFacts) -> Iterator[Hit]:
    for one in _given(facts).rewritten:
        what = f"Reading a sample writes into {one.holder}, and reading it again writes once more: each epoch begins"
        yield Hit(one.line or one.holder, f"{what} with what the last one has left of the samples.")


def _wrapped(facts: RunFacts) -> Iterator[Hit]:
    for one in _given(facts).wrapped:
        what = f"{one.past:,} of {one.numbers:,} numbers are past what {one.dtype} holds,"
        yield Hit(one.line, f"{what} and wrap around: what was large and bright is small and dark.")


def _mispaired(facts: RunFacts) -> Iterator[Hit]:
    for function, moved, left in _given(facts).mispaired:
        what = f"It puts samples into another order by their field {moved}, and leaves field {left} in the first one:"
        yield Hit(f"collate_fn {function}", f"{what} what belonged together no longer does.")


def _alike(facts: RunFacts) -> Iterator[Hit]:
    for line, model, samples in _given(facts).alike:
        what = f"All {samples} samples that {model} is given here are one and the same"
        yield Hit(line, f"{what}: they teach what one does.")


def _lost(facts: RunFacts) -> Iterator[Hit]:
    for one in _given(facts).lost:
        alike = f"hold one and the same `{one.kind}`"
        if one.other:
            what = (
                f"`{one.name}` is set here and, before a sample was read with it, otherwise at {one.other}: both parts"
            )
            yield Hit(one.line, f"{what} {alike}, so that each is read with what was set last.")
        else:
            what = (
                f"`{one.name}` of one part is set here in the place of what was there, and another part, whose samples"
            )
            yield Hit(one.line, f"{what} are read in a random order, is read with it: both {alike}.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.padding-read",
        summary="The padding_idx of a table is the id of pads, and of nothing that is to be learned.",
        check=_padding,
        at=(Moment.AUDIT,),
        fix="Leave padding_idx out, or number what is learned from 1 and make the table one row longer.",
        severity=Severity.WARNING,
        source=("torch Embedding: padding_idx",),
    ),
    Rule(
        id="run.order-read",
        summary="What accumulates over samples runs over sorted ones.",
        check=_ordered,
        at=(Moment.AUDIT,),
        fix="Sort first: order = time.argsort(descending=True), then risk[order] and event[order].",
        severity=Severity.WARNING,
        source=("torch.logcumsumexp", "Cox: partial likelihood"),
    ),
    Rule(
        id="run.noise-uniform",
        summary="Noise that has a mean and a standard deviation is normal.",
        check=_uniform,
        at=(Moment.AUDIT,),
        fix="Write torch.randn_like in the place of torch.rand_like.",
        severity=Severity.WARNING,
        source=("torch.randn_like",),
    ),
    Rule(
        id="run.noise-other",
        summary="Noise that a model is to say is in what it is given.",
        check=_noises,
        at=(Moment.AUDIT,),
        fix="Draw it once, and give it to both: x_t = q_sample(x, t, noise), and the loss of model(x_t, t) and noise.",
        severity=Severity.WARNING,
        source=("DDPM: algorithm 1",),
    ),
    Rule(
        id="run.time-other",
        summary="A model is told the times by which noise was added to what it is given.",
        check=_times,
        at=(Moment.AUDIT,),
        fix="Draw t once, and give it to both: add_noise(x, noise, t) and model(x_t, t).",
        severity=Severity.WARNING,
        source=("DDPM: algorithm 1",),
    ),
    Rule(
        id="run.samples-rewritten",
        summary="Reading a sample leaves what the data set holds as it was.",
        check=_rewritten,
        at=(Moment.AUDIT,),
        fix="Change a copy: x = self.x[i].clone() (numpy: .copy()), or x = x + noise in the place of x += noise.",
        severity=Severity.WARNING,
        source=("torch.utils.data.Dataset",),
    ),
    Rule(
        id="run.integers-wrapped",
        summary="What is computed of small integers stays within what their dtype holds.",
        check=_wrapped,
        at=(Moment.AUDIT,),
        fix="Make it floating first: self.wav[i].float() * gain.",
        severity=Severity.WARNING,
        source=("torch.Tensor.float",),
    ),
    Rule(
        id="run.fields-mispaired",
        summary="A batch has all fields of its samples in one order.",
        check=_mispaired,
        at=(Moment.AUDIT,),
        fix="Sort the samples, and no field of them: batch.sort(key=lambda one: len(one[0]), reverse=True).",
        severity=Severity.WARNING,
        source=("torch.utils.data.DataLoader",),
    ),
    Rule(
        id="run.rows-alike",
        summary="Samples of a batch are not all the same.",
        check=_alike,
        at=(Moment.AUDIT,),
        fix="Put copies away: buffer.append(state.copy()), where an environment or a reader writes into one array.",
        severity=Severity.WARNING,
        source=("gymnasium Env.step", "torch.stack"),
    ),
    Rule(
        id="run.transform-shared",
        summary="What is set of the data set of one part stays until that part is read.",
        check=_lost,
        at=(Moment.AUDIT,),
        fix=(
            "Give the other part a copy first: val.dataset = copy.copy(val.dataset), and then "
            "val.dataset.transform = ...; or keep transforms in a data set around each part."
        ),
        severity=Severity.WARNING,
        source=("torch.utils.data.random_split",),
    ),
)
"""Reporting order."""
