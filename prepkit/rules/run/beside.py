"""What reaches a prepared model from beside its plan: another optimizer, and the state of an unsharded run."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule

_TOGETHER = "Give it to build_plan with the other: optimizer=[first, second], and ready.step() steps both."


def _replaced(facts: RunFacts) -> Iterator[Hit]:
    one = facts.stranger
    if one is not None and one.replaced:
        what = f"this {one.name} holds {count(len(one.replaced), 'parameter')} that apply has replaced in the model"
        yield Hit("optimizer", f"{what}, so that it would train nothing: {some(one.replaced)}.")


def _unknown(facts: RunFacts) -> Iterator[Hit]:
    one = facts.stranger
    if one is not None and not one.replaced and one.shared and one.averaged_elsewhere:
        what = f"this {one.name} holds {count(len(one.shared), 'parameter')} of a prepared model, and the plan does"
        fix = "Give it to build_plan in the place of the other, and ready.step() steps it." if one.engine_steps else ""
        yield Hit("optimizer", f"{what} not know it: {some(one.shared)}.", fix)


def _inside_window(facts: RunFacts) -> Iterator[Hit]:
    one = facts.stranger
    if one is not None and not one.replaced and one.shared and one.window:
        what = (
            f"this {one.name} was stepped inside a window of {one.window} micro-batches, and no gradient of this rank "
            "has been averaged with those of the others: the plan has no optimizer, so that nothing ends its windows."
        )
        yield Hit("optimizer", what)


def _unsaved(facts: RunFacts) -> Iterator[Hit]:
    one = facts.stranger
    if one is not None and not one.replaced and one.shared and one.planned and not one.averaged_elsewhere:
        what = f"this {one.name} holds {count(len(one.shared), 'parameter')} of a prepared model, and the plan knows"
        yield Hit(one.name, f"{what} another: what ready.save() writes is the state of that one.")


def _saves_shards(facts: RunFacts) -> Iterator[Hit]:
    by_torch = tuple(place for place in facts.saves_shards if "torch.save(" in place)
    if others := [place for place in facts.saves_shards if place not in by_torch]:
        what = f"{'; '.join(others)} would write this rank's shards: once training is over it is refused."
        yield Hit("model.save_pretrained", what)
    if by_torch:
        what = f"{'; '.join(by_torch)} would write this rank's shards: no load_state_dict takes them later."
        yield Hit("torch.save", what, "Write ready.export(folder) on every rank, or ready.save(folder) to go on from.")


def _whole_state(facts: RunFacts) -> Iterator[Hit]:
    if facts.whole_state:
        what = f"This state of {count(facts.whole_state, 'parameter')} is of an optimizer that was not sharded."
        yield Hit("optimizer", what)


def _whole_weights(facts: RunFacts) -> Iterator[Hit]:
    if facts.whole_weights:
        what = f"{count(len(facts.whole_weights), 'weight')} of this state are whole, and the model is sharded"
        yield Hit("model", f"{what}: {some(facts.whole_weights)}.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.replaced",
        summary="An optimizer that steps holds what the model holds, and not what apply has replaced.",
        check=_replaced,
        at=(Moment.STEP,),
        needs=(Need.OPTIMIZERS,),
        fix=_TOGETHER,
        source=("pain 1",),
    ),
    Rule(
        id="run.unknown-optimizer",
        summary="Gradients that are averaged and cleared for ready.step() are stepped by it alone.",
        check=_unknown,
        at=(Moment.STEP,),
        needs=(Need.OPTIMIZERS,),
        fix=_TOGETHER,
    ),
    Rule(
        id="run.inside-window",
        summary="An optimizer steps gradients that the ranks have averaged.",
        check=_inside_window,
        at=(Moment.STEP,),
        needs=(Need.OPTIMIZERS,),
        fix="Give it to build_plan, or write Config(accumulation=1).",
    ),
    Rule(
        id="run.unsaved-optimizer",
        summary="The state of every optimizer of a prepared model is in its checkpoints.",
        check=_unsaved,
        at=(Moment.STEP,),
        needs=(Need.OPTIMIZERS,),
        fix="Give it to build_plan with the other: optimizer=[first, second], or give this one alone.",
        severity=Severity.WARNING,
    ),
    Rule(
        id="run.saves-shards",
        summary="What saves a sharded model writes it whole.",
        check=_saves_shards,
        at=(Moment.FIRST_STEP,),
        cost="reads the files of the program once",
        fix=(
            "Write ready.export(folder) on every rank, or under accelerate's face "
            "save_pretrained(folder, state_dict=accelerator.get_state_dict(model))."
        ),
        severity=Severity.WARNING,
        source=("transformers PreTrainedModel.save_pretrained",),
    ),
    Rule(
        id="run.whole-state",
        summary="The state that a sharded optimizer loads is sharded as it is; torch would fail in its next step.",
        check=_whole_state,
        at=(Moment.LOAD,),
        needs=(Need.STATE,),
        fix=(
            "Write ready.resume(folder), from what ready.save(folder) has written under any engine, or "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict with "
            "StateDictOptions(full_state_dict=True), which takes names in the place of numbers."
        ),
        overridable=False,
        stops="torch fails in its next step",
    ),
    Rule(
        id="run.whole-weights",
        summary="The weights that a sharded model loads are sharded as it is.",
        check=_whole_weights,
        at=(Moment.LOAD,),
        needs=(Need.STATE,),
        fix=(
            "Load them before build_plan, or write torch.distributed.checkpoint.state_dict.set_model_state_dict("
            "ready.model, state, options=StateDictOptions(full_state_dict=True)); what ready.save(folder) has written "
            "is read by ready.resume(folder, only_model=True)."
        ),
        overridable=False,
        stops="torch cannot copy whole weights into shards",
    ),
)
"""Reporting order: other optimizers, then what is loaded."""
