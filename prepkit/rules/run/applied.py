"""What the steps of a plan have to find, and what they have made: layout, master weights, values, owners."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prepkit.facts.run import AppliedFacts, RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some, spans
from prepkit.rules.rule import Hit, Moment, Need, Rule

NOTHING = AppliedFacts()

REPORT = (
    "Build model and optimizer again before the next apply. It is a defect of prepkit or of torch: report it with the "
    "plan file and the attestation."
)
"""Where a step was done, and has not led to what the plan says."""


def _layout(facts: RunFacts) -> Iterator[Hit]:
    """One hit for all that differ in the same way."""
    names: dict[str, list[str]] = {}
    for one in (facts.applied or NOTHING).layout:
        names.setdefault(one.what, []).append(one.where)
    for what, those in names.items():
        yield Hit(at(those[0]), what + (f"; likewise {some(those[1:])}" if those[1:] else ""))


def _values(facts: RunFacts) -> Iterator[Hit]:
    if changed := (facts.applied or NOTHING).changed:
        what = f"{count(len(changed), 'tensor')} with other values than before the first step: {some(changed)}."
        yield Hit(at(changed[0]), what)


def _overwritten(facts: RunFacts) -> Iterator[Hit]:
    if ranks := (facts.applied or NOTHING).overwritten:
        what = f"Rank{'s' * (len(ranks) > 1)} {spans(ranks)} had built other weights, and the engine has sent rank 0's."
        yield Hit("model", what)


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.other-layout",
        summary="Parameters and buffers are those of the plan, each with its shape, dtype, placement and attributes.",
        check=_layout,
        at=(Moment.APPLY,),
        fix=REPORT,
        source=("pain 1",),
    ),
    Rule(
        id="run.values-changed",
        summary="Weights and buffers that no step writes have the values that they had before apply.",
        check=_values,
        at=(Moment.APPLY,),
        needs=(Need.VALUES,),
        cost="a pass over all buffers, and with apply(fingerprint=True) two over all weights",
        fix=REPORT,
        source=("pain 17",),
    ),
    Rule(
        id="run.other-owners",
        summary="Who scales, counts, clips and ticks is who the plan says.",
        check=lambda facts: [Hit(one.where, one.what) for one in (facts.applied or NOTHING).owners],
        at=(Moment.APPLY,),
        fix=REPORT,
        source=("pain 16",),
    ),
    Rule(
        id="run.overwritten-ranks",
        summary="Ranks have built the weights that rank 0 sends them.",
        check=_overwritten,
        at=(Moment.APPLY,),
        needs=(Need.VALUES, Need.RANKS),
        cost="64 elements of each parameter, and a share of the one exchange over the ranks",
        fix=(
            "Nothing, where rank 0's are meant, or weights=BroadcastWeights() to say so; else load the same checkpoint "
            "on every rank, or write torch.manual_seed(0) before the model is built."
        ),
        severity=Severity.NOTE,
        source=("DDP-3", "torch DistributedDataParallel"),
    ),
)
"""Reporting order: the model, its values, who does what."""

STEPS = Rule(
    id="run.step-undone",
    summary="Every step of a plan has left what it says.",
    check=lambda facts: [Hit(one.where, one.what) for one in (facts.applied or NOTHING).steps],
    at=(Moment.APPLY,),
    fix=REPORT,
)
"""Told last: what else is wrong often follows from it, and is said in words of the model."""

_act = partial(Rule, at=(Moment.ACT,), told_by="pk.apply", overridable=False)

ACTS: tuple[Rule, ...] = (
    _act(
        id="apply.not-asked",
        summary="Every step of a plan has a handler, whose check can look.",
        fix="Mend what the check raised; a step without a handler needs its row in the table of handlers.",
    ),
    _act(
        id="apply.step-failed",
        summary="Every step of a plan can be done, on every rank.",
        fix="Mend what the error names, and apply the plan again; the end of the message says what stands.",
    ),
    _act(
        id="apply.library-refused",
        summary="torch, DeepSpeed and MS-AMP do what a step asks of them.",
        fix="Mend what the error names; build model and optimizer again before the next apply.",
    ),
    _act(
        id="apply.no-mesh",
        summary="The device mesh is built before a step works on it.",
        fix="Apply a whole plan: BuildMesh has to come before this step.",
    ),
    _act(
        id="apply.group-not-formed",
        summary="All ranks form the process group within its time-out.",
        fix="Look at the connections between the machines, or at that rank's log.",
    ),
    _act(
        id="apply.gradient-lost",
        summary="No parameter that a step replaces holds a gradient.",
        fix="Call optimizer.zero_grad() first.",
        overridable=True,
    ),
    _act(
        id="plan.ranks-differ",
        summary="All ranks apply one plan to one model.",
        fix="Run pk.save(plan, f'plan-{rank}.json') on two of these ranks, and prepkit diff on the files.",
    ),
    _act(
        id="checkpoint.replaced-linear",
        summary="Kept outputs of linear layers are those of torch's own.",
        fix="Call ready.close() of that run first, or leave keep_ops out.",
        overridable=True,
    ),
    _act(
        id="deepspeed.compiler",
        summary="A compiler and ninja are there where DeepSpeed compiles what it runs.",
        fix="Install it.",
    ),
    _act(
        id="deepspeed.stale-lock",
        summary="No lock of a killed compilation is left where DeepSpeed compiles.",
        fix="Remove the file.",
        overridable=True,
    ),
    _act(
        id="ddp.overlapping-buffers",
        summary="Each element of a buffer that DDP sends has memory of its own.",
        fix="Register it as tensor.contiguous(), or choose DDP(broadcast_buffers=False) where ranks keep it alike.",
    ),
    _act(
        id="fp8.recipe-refused",
        summary="TransformerEngine takes the recipe, with its options.",
        fix="Leave out the option that it names.",
    ),
    _act(
        id="optimizer.state-layout",
        summary="State of the optimizer can be laid out as its parameters are.",
        fix="Create the optimizer after preparing.",
    ),
    _act(
        id="weights.not-initialised",
        summary="Initialisers write all that is without values, each in its own unit.",
        fix="Write them there, or load the weights: LoadWeights(path).",
    ),
    _act(
        id="weights.held-elsewhere",
        summary="Nobody but the model and its optimizer holds a parameter whose values are stashed.",
        fix="Let go of the losses, outputs and references from before apply.",
    ),
    _act(
        id="weights.file-changed",
        summary="The files of the checkpoint are as they were when the plan was made.",
        fix="Restore the file, or plan again.",
    ),
    _act(
        id="weights.files-differ",
        summary="All ranks read one checkpoint.",
        fix="Give every rank the same checkpoint, or one folder for all.",
    ),
)
"""What a step of a plan has to find before it acts; steps tell rows of a config too, those that have ``Moment.ACT``."""
