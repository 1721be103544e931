"""What stands inside a model and trains otherwise than it seems."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule

LOGITS = {
    "cross_entropy": "Leave the softmax out: it takes logits.",
    "binary_cross_entropy_with_logits": "Leave the sigmoid out: it takes logits.",
    "nll_loss": "Write log_softmax in the place of softmax.",
}
"""What a loss takes."""


def _drops(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and facts.frozen_drops:
        what = f"Frozen, and in training mode with dropout: {some(facts.frozen_drops)}. What it gives is random."
        yield Hit(at(facts.frozen_drops[0]), what)


def _norms(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and facts.frozen_norms:
        what = f"Frozen, and its batch norms go on to average what they see: {some(facts.frozen_norms)}."
        yield Hit(at(facts.frozen_norms[0]), what)


def _forgetful(facts: RunFacts) -> Iterator[Hit]:
    if facts.forgetful:
        what = f"Checkpointed with preserve_rng_state=False over dropout: {some(facts.forgetful)}."
        yield Hit(at(facts.forgetful[0]), f"{what} Backward drops other elements than forward did.")


def _renormalised(facts: RunFacts) -> Iterator[Hit]:
    if facts.renormalised:
        what = f"Checkpointed over batch norms, which average each batch twice: {some(facts.renormalised)}."
        yield Hit(at(facts.renormalised[0]), what)


def _softmax(facts: RunFacts) -> Iterator[Hit]:
    if facts.softmax:
        yield Hit(at(facts.softmax), "The model ends with a softmax, and its CrossEntropyLoss takes another one.")
    for loss, before in facts.window.squashed if facts.window is not None else ():
        if before.endswith("mm"):
            what = f"{loss} was given what a linear layer computes, and takes logarithms of probabilities."
            yield Hit("loss", what, "Write cross_entropy in its place, or log_softmax before it.")
        else:
            yield Hit("loss", f"{loss} was given what has gone through a {before} already.", LOGITS[loss])


def _off(facts: RunFacts) -> Iterator[Hit]:
    if facts.adapters is not None and facts.adapters.off:
        names = facts.adapters.off
        what = f"{count(len(names), 'adapter')} train, and are disabled or merged: {some(names)}. None gets a gradient."
        yield Hit(at(names[0]), what)


def _zero(facts: RunFacts) -> Iterator[Hit]:
    if facts.adapters is not None and facts.adapters.zero:
        names = facts.adapters.zero
        what = f"{count(len(names), 'adapter')} with a scale of 0: {some(names)}. Neither matrix gets a gradient."
        yield Hit(at(names[0]), what)


def _base(facts: RunFacts) -> Iterator[Hit]:
    if facts.adapters is not None and facts.adapters.base:
        names = facts.adapters.base
        what = f"{count(len(names), 'layer')} train beside their adapters: {some(names)}."
        yield Hit(at(names[0]), f"{what} Saving the adapter saves none of it.")


def _head(facts: RunFacts) -> Iterator[Hit]:
    if facts.adapters is not None and facts.adapters.heads and facts.optimizers:
        names = facts.adapters.heads
        yield Hit(at(names[0]), f"Adapters train, and the head of the task is frozen: {some(names)}.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.checkpoint-forgets",
        summary="What is recomputed is what forward computed.",
        check=_forgetful,
        at=(Moment.AUDIT,),
        fix="Leave preserve_rng_state at True.",
        source=("torch.utils.checkpoint",),
    ),
    Rule(
        id="run.softmax-twice",
        summary="A loss takes what the model computes as it is meant.",
        check=_softmax,
        at=(Moment.AUDIT,),
        fix="End the model with the linear layer: CrossEntropyLoss takes logits.",
        source=("torch CrossEntropyLoss",),
    ),
    Rule(
        id="run.adapters-off",
        summary="Adapters that train are in use.",
        check=_off,
        at=(Moment.AUDIT,),
        fix="Call model.unmerge_adapter() and model.enable_adapter_layers() before training.",
        source=("peft BaseTunerLayer",),
    ),
    Rule(
        id="run.adapters-zero",
        summary="Adapters have a scale.",
        check=_zero,
        at=(Moment.AUDIT,),
        fix="Give lora_alpha a value above 0, and call no set_scale(..., 0).",
        source=("peft LoraLayer",),
    ),
    Rule(
        id="run.adapters-base",
        summary="What lies under an adapter is frozen.",
        check=_base,
        at=(Moment.AUDIT,),
        fix="Freeze it, or name it in modules_to_save so that it is saved.",
        severity=Severity.WARNING,
        source=("peft",),
    ),
    Rule(
        id="run.head-frozen",
        summary="A task's head trains with the adapters.",
        check=_head,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Write LoraConfig(task_type='SEQ_CLS') or modules_to_save=['score']; nothing, where it was trained before.",
        severity=Severity.WARNING,
        source=("peft LoraConfig.modules_to_save",),
    ),
    Rule(
        id="run.frozen-drops",
        summary="What is frozen gives the same for the same input.",
        check=_drops,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call .eval() on it after each model.train().",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.frozen-norms",
        summary="Batch norms of what is frozen rest.",
        check=_norms,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call .eval() on it after each model.train().",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.checkpoint-norms",
        summary="A batch norm averages each batch once.",
        check=_renormalised,
        at=(Moment.AUDIT,),
        fix="Checkpoint what stands beside them, or write momentum = 1 - (1 - momentum) ** 0.5 for theirs.",
        severity=Severity.WARNING,
        source=("torch.utils.checkpoint",),
    ),
)
"""Reporting order: what trains otherwise, then what is odd."""
