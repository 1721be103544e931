"""What was written where nobody reads it."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.facts.run import RunFacts
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some
from prepkit.rules.rule import Hit, Moment, Need, Rule


def _unread(facts: RunFacts) -> Iterator[Hit]:
    for one in facts.unread:
        what = f"`{one.name}` was set, and nothing reads it: `{one.meant}` does what it seems to mean."
        yield Hit(one.where, what, f"Write {one.meant} in its place.", milder=not one.sure)


def _hidden(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and facts.hidden:
        what = f"{count(len(facts.hidden), 'module')} in plain lists or dicts, of which no optimizer has a parameter"
        yield Hit(at(facts.hidden[0]), f"{what}: {some(facts.hidden)}. The model does not know them.")


def _no_gradients(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and not facts.gradients_on:
        yield Hit("env", "Gradients are switched off in this thread: a backward would fail, or train nothing.")


def _alone(facts: RunFacts) -> Iterator[Hit]:
    if facts.optimizers and facts.launched > 1 and facts.world_size == 1:
        what = f"A launcher has started {facts.launched} processes, and this one has no group with the others"
        yield Hit("env", f"{what}: {facts.launched} models train, each by itself.")


def _window(facts: RunFacts) -> Iterator[Hit]:
    if facts.inside_window:
        what = (
            f"It steps inside a window of {facts.accumulation} micro-batches: accelerate holds back the steps of "
            "optimizers that it has prepared, and this one it has not."
        )
        yield Hit("optimizer", what)


def _unused_window(facts: RunFacts) -> Iterator[Hit]:
    if facts.unused_window:
        what = f"Accelerator(gradient_accumulation_steps={facts.accumulation}), and it steps after one micro-batch"
        yield Hit("optimizer", f"{what}: accumulate() was not entered.")


RULES: tuple[Rule, ...] = (
    Rule(
        id="run.unread-setting",
        summary="A setting has a name that somebody reads.",
        check=_unread,
        at=(Moment.AUDIT,),
        fix="Write the name that is read.",
        milder="where the name is only like one that is read",
        source=("torch Module.requires_grad_", "torch Optimizer.add_param_group"),
    ),
    Rule(
        id="run.hidden-module",
        summary="What is to be trained is registered.",
        check=_hidden,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Hold them in nn.ModuleList, nn.ModuleDict or nn.ParameterList; freeze what is not to be trained.",
        source=("torch ModuleList",),
    ),
    Rule(
        id="run.gradients-off",
        summary="Gradients are computed.",
        check=_no_gradients,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call torch.set_grad_enabled(True); use `with torch.no_grad():` where none are wanted.",
        source=("torch.set_grad_enabled",),
    ),
    Rule(
        id="run.no-group",
        summary="Processes that were launched together train one model.",
        check=_alone,
        at=(Moment.AUDIT,),
        needs=(Need.OPTIMIZERS,),
        fix="Call torch.distributed.init_process_group() before the model is wrapped, with the launcher's world size.",
        source=("torchrun",),
    ),
    Rule(
        id="run.raw-optimizer",
        summary="An optimizer that steps inside accumulate() is accelerate's.",
        check=_window,
        at=(Moment.AUDIT,),
        needs=(Need.GRADIENTS,),
        fix="Write optimizer = accelerator.prepare(optimizer), or `if accelerator.sync_gradients: optimizer.step()`.",
        source=("accelerate Accelerator.accumulate",),
    ),
    Rule(
        id="run.unused-window",
        summary="A count of micro-batches per step is used.",
        check=_unused_window,
        at=(Moment.AUDIT,),
        needs=(Need.GRADIENTS,),
        fix="Write `with accelerator.accumulate(model):` around the body of the loop, or drop the argument.",
        severity=Severity.WARNING,
        source=("accelerate Accelerator.accumulate",),
    ),
)
"""Reporting order: settings, modules, then the process and its windows."""
