"""What several phases of one program do to each other: what is evaluated, unfrozen, merged, or gone on with."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.phases import PhaseFacts
from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import count
from prepkit.rules.rule import Hit, Moment, Rule


def _phases(facts: RunFacts) -> PhaseFacts:
    return facts.window.phases if facts.window is not None else PhaseFacts()


def _unheld(facts: RunFacts) -> Iterator[Hit]:
    for one in _phases(facts).unheld:
        rest = f" and {count(one.count - 1, 'more weight')}" if one.count > 1 else ""
        what = f"`{one.name}`{rest} of {one.model}, frozen at first, get gradients by now, and no optimizer"
        yield Hit(one.line, f"{what} that steps holds them: they stay as they are.")


def _merged(facts: RunFacts) -> Iterator[Hit]:
    for one in _phases(facts).merged:
        rest = f" and {count(one.count - 1, 'more module')}" if one.count > 1 else ""
        what = f"What trains of `{one.name}`{rest} of {one.model} gets no gradient any more, since a frozen weight"
        yield Hit(one.line, f"{what} beside it was written: an adapter that is merged does not train.")


def _idle(facts: RunFacts) -> Iterator[Hit]:
    for one in _phases(facts).idle:
        what = f"The adapter `{one.name}` was added to {one.model}, which had trained before, and is not switched on"
        yield Hit(one.line, f"{what}: this steps the adapter of before.")


def _other_moments(facts: RunFacts) -> Iterator[Hit]:
    for one in _phases(facts).moments:
        what = f"The weights that {one.optimizer} goes on with are those of step {one.step}, and the `{one.key}` of"
        yield Hit(
            one.line or one.optimizer,
            f"{what} {count(one.weights, 'weight')} is not what stood beside them on this rank.",
        )


def _other_samples(facts: RunFacts) -> Iterator[Hit]:
    for one in _phases(facts).samples:
        left = f"Step {one.step} has left its pass after {count(one.trained, 'batch')}. The run that goes on there"
        if not one.passed:
            what = "begins with samples of these."
        elif one.others:
            what = f"passes over {one.passed:,} with other samples: some come again, and others never do."
        else:
            what = (
                f"passes over {one.passed:,}: {'some come again' if one.passed < one.trained else 'others never do'}."
            )
        yield Hit(one.line or "loader", f"{left} {what}")


def _training(facts: RunFacts) -> Iterator[Hit]:
    for line, model, why in _phases(facts).evaluations.training:
        yield Hit(line, f"It evaluates {model} in training mode, which {why}: what is measured is another model.")


def _worst(facts: RunFacts) -> Iterator[Hit]:
    for one in _phases(facts).evaluations.worst:
        better = "lower" if one.lower else "higher"
        if one.never:
            yield Hit(
                one.line, f"`{one.who}` begins with {one.never}, and no `{one.measure}` is {better}: none is kept."
            )
        else:
            what = f"`{one.who}` takes {'higher' if one.lower else 'lower'} values for better"
            yield Hit(one.line, f"{what}, and of `{one.measure}` the {better} one is: what is worse is kept.")


def _refitted(facts: RunFacts) -> Iterator[Hit]:
    for line, what in _phases(facts).evaluations.refitted:
        yield Hit(
            line, f"`{what}` fits once more, on what validates, which is then no longer what the model was taught."
        )


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.unfrozen-unheld",
        summary="Weights that are unfrozen are given to an optimizer.",
        check=_unheld,
        at=(Moment.AUDIT,),
        fix='Write optimizer.add_param_group({"params": [...]}) where they are unfrozen, or make the optimizer anew.',
        severity=Severity.WARNING,
        source=("torch Optimizer.add_param_group",),
    ),
    Rule(
        id="run.merged-trained",
        summary="Adapters that train are merged into no weight.",
        check=_merged,
        at=(Moment.AUDIT,),
        fix="Call model.unmerge_adapter() behind the evaluation, before the next batch to train on.",
        severity=Severity.WARNING,
        source=("peft merge_adapter",),
    ),
    Rule(
        id="run.adapter-idle",
        summary="An adapter that is added behind a training is switched on before the next.",
        check=_idle,
        at=(Moment.AUDIT,),
        fix='Call model.set_adapter("name") behind add_adapter("name", config), before the optimizer is made.',
        severity=Severity.WARNING,
        source=("peft PeftModel.add_adapter",),
    ),
    Rule(
        id="run.resumed-state",
        summary="What an optimizer goes on with is what stood beside the weights that were loaded.",
        check=_other_moments,
        at=(Moment.AUDIT,),
        fix="Save the state of every rank where ranks step weights of their own, and load each rank its own; and "
        "weights and state of one step.",
        severity=Severity.WARNING,
        source=("torch Optimizer.load_state_dict",),
    ),
    Rule(
        id="run.resumed-samples",
        summary="A pass that is gone on with passes over the batches that were trained on.",
        check=_other_samples,
        at=(Moment.AUDIT,),
        fix="Give the sampler the epoch and the seed that the pass had, before it is read: sampler.set_epoch(epoch); "
        "and pass over as many batches as it had given.",
        severity=Severity.WARNING,
        source=("torch DistributedSampler.set_epoch", "accelerate skip_first_batches"),
    ),
    Rule(
        id="run.evaluated-training",
        summary="A model that is evaluated is in evaluation mode.",
        check=_training,
        at=(Moment.AUDIT,),
        fix="Call model.eval() before it is evaluated, and model.train() behind that.",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.worst-kept",
        summary="What is kept for the best is better by the measure's own name.",
        check=_worst,
        at=(Moment.AUDIT,),
        fix="Turn the comparison round: mode='min' and < float('inf') for losses and errors, mode='max' and "
        "> -float('inf') for accuracies, greater_is_better=False for what is an error.",
        severity=Severity.WARNING,
        source=(
            "torch.optim.lr_scheduler.ReduceLROnPlateau",
            "Lightning ModelCheckpoint, EarlyStopping",
            "transformers TrainingArguments.greater_is_better",
        ),
    ),
    Rule(
        id="run.refitted",
        summary="A transform is fitted once, on what is trained on.",
        check=_refitted,
        at=(Moment.AUDIT,),
        fix="Write scaler.transform(...) of what validates.",
        severity=Severity.WARNING,
        source=("sklearn fit_transform",),
    ),
)
"""Reporting order."""
