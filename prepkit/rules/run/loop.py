"""The order of a training loop: slips that would train wrongly without a word are refused in every window.

Each rule looks at a ``Turn``: an event that is about to count, where the loop is, and the constants of the run. Rules
are asked in every micro-batch, so that a check reads a few fields and returns () where it holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prepkit.facts import loop as events
from prepkit.findings import Severity
from prepkit.rules.rule import Moment, Need, Rule
from prepkit.rules.run import loop_checks as checks
from prepkit.rules.run.loop_checks import INSTEAD

__all__ = ["ASKED", "RULES"]

_BY_HAND = (
    "Config(loaders=pk.data.ShardLoaders(ends_window=False)) and end the last window by "
    "`with ready.accumulate(last=True):`"
)


def _rule(
    slug: str,
    summary: str,
    check: Any,
    fix: str,
    *,
    severity: Severity = Severity.ERROR,
    milder: str = "",
    stops: str = "",
    source: tuple[str, ...] = (),
) -> Rule:
    return Rule(
        id=f"loop.{slug}",
        summary=summary,
        check=check,
        fix=fix,
        severity=severity,
        at=(Moment.LOOP,),
        needs=(Need.LOOP,),
        milder=milder,
        overridable=not stops,
        stops=stops,
        source=source,
    )


_CLOSED = _rule(
    "closed",
    "Nothing is trained, saved or asked of other ranks after ready.close().",
    checks.closed,
    "Call it before ready.close(); to go on, prepare the model again, with build_plan and apply.",
    stops="the wrapper and its process group are gone",
)
_CLOSED_INSIDE = _rule(
    "closed-inside-window",
    "A run is closed between windows.",
    checks.closed_inside_window,
    "End the last window before: by `with ready.accumulate(last=True):` around the last micro-batch that is trained, "
    "or leave out none that is the last of a pass.",
    severity=Severity.WARNING,
)
_EVALUATING = _rule(
    "evaluating",
    "Nothing is trained inside ready.evaluating().",
    checks.evaluating,
    "End the with block first.",
)
_AVERAGES = _rule(
    "averages-applied",
    "Nothing is trained or saved while averages are in the place of the weights.",
    checks.averages_applied,
    "End the with block first.",
)
_SAVED_EVALUATING = _rule(
    "saved-evaluating",
    "Checkpoints are written and read outside of ready.evaluating().",
    checks.saved_evaluating,
    "End the with block first.",
)
_UNFINISHED = _rule(
    "unfinished-window",
    "Checkpoints are written and read between windows.",
    checks.unfinished,
    "Save after a ready.step() that returned True, when ready.loop.pending is 0.",
)
_INSIDE_BATCH = _rule(
    "saved-inside-batch",
    "Checkpoints are written when all micro-batches of a batch are over.",
    checks.inside_batch,
    "Save where a batch ends: let Config(accumulation=...) and the micro-batches of a batch divide each other.",
    severity=Severity.WARNING,
)
_WRITTEN = _rule(
    "gradients-written",
    "Nobody but the loop writes gradients.",
    checks.written,
    "Where it clips remove it: write Config(clip=pk.ClipNorm(1.0)), or ClipValue, by which ready.step() clips; add "
    "losses up for one ready.backward(loss). A mask of param.grad that is the same on every rank may stay.",
    severity=Severity.WARNING,
)
_NOT_COUNTED = _rule(
    "steps-not-counted",
    "What is saved and logged has the number of steps that were taken.",
    checks.not_counted,
    f"{INSTEAD[0].upper()}{INSTEAD[1:]}.",
    severity=Severity.WARNING,
)

_FAILED = _rule(
    "backward-failed",
    "A backward that has raised is followed by ready.skip().",
    checks.failed,
    "Call ready.skip() where the exception is caught, on every rank, as in `except torch.OutOfMemoryError:`.",
)
_LOST = _rule(
    "window-lost",
    "A backward that has raised is the first of its window.",
    checks.window_lost,
    "Nothing is to be done: the window begins anew. Smaller micro-batches, or accumulation=1, lose less.",
    severity=Severity.WARNING,
)

_BEFORE_BACKWARD = (
    _CLOSED,
    _FAILED,
    _AVERAGES,
    _EVALUATING,
    _rule(
        "loss-leads-nowhere",
        "The loss of ready.backward() leads to parameters that are trained.",
        checks.leads_nowhere,
        "Give ready.backward() what ready.model(...) has led to.",
        stops="torch has nothing to run a backward of",
    ),
    _rule(
        "engine-counts-backwards",
        "Engines that count micro-batches by their backward get one for each.",
        checks.engine_counts,
        "Add the losses up for one ready.backward(loss).",
        source=("W-25",),
        stops="the engine's windows would no longer be those of the loop",
    ),
    _rule(
        "weighed-on-some-ranks",
        "All ranks weigh their losses by tokens, or none does.",
        checks.weighed_on_some_ranks,
        "Give mean_over on every rank, 0 where a rank has no token, or on none.",
        stops="ranks would wait for each other's tokens for ever",
    ),
    _rule(
        "weighed-in-vain",
        "Losses are weighed where gradients can be divided once, at the end of the window.",
        checks.weighed_in_vain,
        "Leave out mean_over; where a micro-batch has several losses, add them up for one.",
        stops="there is no place where the gradients could be divided",
    ),
    _rule(
        "weighed-in-some-losses",
        "All losses of a window are weighed by tokens, or none is.",
        checks.weighed_in_some_losses,
        "Give mean_over to each ready.backward of a window, on every rank, or to none.",
        stops="the number that the gradients are divided by is not known",
    ),
    _rule(
        "gradients-left-over",
        "A window begins without gradients.",
        checks.left_over,
        "Remove that call, and add losses up for one ready.backward(loss); where the gradients are left over from "
        "before, call ready.optimizer.zero_grad() first.",
    ),
    _rule(
        "backward-twice",
        "Each micro-batch has one backward, or says that more follow.",
        checks.backward_twice,
        "Write ready.step() after every micro-batch, also where it does not end a window: it counts them. Where one "
        "micro-batch has several losses, add them up for one backward, or write ready.backward(loss, more=True) for "
        "all but the last.",
    ),
    _rule(
        "gradients-lost",
        "Gradients stay until the end of their window.",
        checks.lost_inside_window,
        "Remove that: ready.step() clears the gradients at the end of each window.",
    ),
    _WRITTEN,
    _rule(
        "past-the-wrapper",
        "DDP's forward runs before each backward that averages.",
        checks.past_wrapper,
        'Call ready.model(...) itself; for another method than forward write Config(entry_points=("<method>",)) and '
        "call ready.model.<method>(...).",
        source=("torch Reducer::prepare_for_backward",),
    ),
)
_BEFORE_STEP = (
    _CLOSED,
    _FAILED,
    _AVERAGES,
    _EVALUATING,
    _rule(
        "nothing-to-step",
        "There is an optimizer where ready.step() is called.",
        checks.nothing_to_step,
        "Build the plan with optimizer=..., or with Config(optimizer=AdamW(...)), or leave out ready.step() for "
        "inference.",
        stops="there is no optimizer",
    ),
    _rule(
        "closure-wanted",
        "An optimizer that asks for gradients several times a step gets a closure.",
        checks.closure_wanted,
        "Write ready.step(closure), where closure computes the loss, calls ready.backward(loss) and returns the loss.",
        stops="the optimizer raises without one",
    ),
    _rule(
        "closure-without-place",
        "A closure is given where one step makes its gradients anew.",
        checks.closure_has_no_place,
        "Leave out the closure, or plan without it: accumulation=1, and another precision than float16.",
        stops="the gradients of other micro-batches, or their scale, would be lost",
    ),
    _rule(
        "step-without-backward",
        "Each micro-batch has a ready.backward() before its ready.step().",
        checks.without_backward,
        "Write ready.backward(loss) in the place of loss.backward(); leave out both for a batch without a loss, and "
        "end a window early with ready.accumulate(last=True).",
    ),
    _rule(
        "cleared-before-step",
        "Gradients stay between ready.backward() and ready.step().",
        checks.cleared_before_step,
        "Remove that call: ready.step() clears the gradients at the end of each window. To leave a batch out, call "
        "ready.skip() in the place of its ready.step().",
    ),
    _rule(
        "backward-announced",
        "A backward that was announced by more=True comes before the step.",
        checks.more_announced,
        "Leave out more=True for the last loss.",
    ),
    _rule(
        "never-averaged",
        "The last backward of a window averages its gradients over the ranks.",
        checks.never_averaged,
        "Leave it to ready.step() and Config(accumulation=...) which micro-batches average.",
    ),
    _rule(
        "gradients-gone",
        "There is a gradient at the end of a window.",
        checks.gone_at_end,
        "Remove that call: ready.step() clears the gradients at the end of each window.",
    ),
    _rule(
        "scaled-gradients-written",
        "Nobody but the loop writes gradients that are multiplied by a loss scale.",
        checks.written_scaled,
        "Remove that call: write Config(clip=pk.ClipNorm(1.0)), or ClipValue, by which ready.step() clips, and add "
        "losses up for one ready.backward(loss).",
    ),
    _WRITTEN,
    _rule(
        "scheduler-stepped",
        "The scheduler is stepped by ready.step() alone.",
        checks.scheduler_stepped,
        "Remove scheduler.step(), or write Config(scheduler_ticks=0) and step it yourself.",
    ),
    _rule(
        "scheduler-at-end",
        "A scheduler that ends, such as OneCycleLR, has a tick for every step.",
        checks.scheduler_at_end,
        "Make it for all optimizer steps, those of every pass, times Config(scheduler_ticks=...).",
        severity=Severity.WARNING,
        source=("W-16",),
    ),
    _rule(
        "batches-read-ahead",
        "Batches are trained as they are read.",
        checks.read_ahead,
        f"Write `for batch in ready.loaders[0]:`, or {_BY_HAND}. What was read ahead is not read again after a resume.",
        severity=Severity.WARNING,
    ),
    _rule(
        "last-batch-cut-otherwise",
        "The last batch of a pass makes as many micro-batches as those before it.",
        checks.more_micro_batches,
        f"Let every batch make as many, or write {_BY_HAND}.",
        severity=Severity.WARNING,
    ),
    _rule(
        "window-over-pass",
        "A window ends with its pass.",
        checks.over_pass,
        f"To step them with their own, write {_BY_HAND}.",
        severity=Severity.WARNING,
    ),
)
_BEFORE_HAND = (
    _rule(
        "inner-optimizer-stepped",
        "What is stepped by hand under DeepSpeed is DeepSpeed's optimizer.",
        checks.inner_stepped,
        f"{INSTEAD[0].upper()}{INSTEAD[1:]}, or step ready.optimizer in a loop of your own.",
    ),
    _rule(
        "stepped-by-hand",
        "Once ready.backward() is called, ready.step() steps the optimizer.",
        checks.stepped_by_hand,
        "Write ready.step() in its place: it averages over the ranks, clips, steps, ticks the scheduler, clears the "
        "gradients at the end of each window and counts it in ready.steps.",
        milder="where ready.step() would do nothing else: accumulation=1, no clip, no loss scale, no ticks",
    ),
    _rule(
        "own-loop-unaveraged",
        "A loop of one's own steps gradients that are averaged over the ranks.",
        checks.own_loop_unaveraged,
        f"{INSTEAD[0].upper()}{INSTEAD[1:]}. For a loop of your own write Config(accumulation=1).",
    ),
    _rule(
        "own-loop-leaves-out",
        "What the plan gives to ready.backward() and ready.step() is done.",
        checks.own_loop_left_out,
        INSTEAD,
        severity=Severity.WARNING,
    ),
)
_BEFORE_CLEARING = (
    _LOST,
    _rule(
        "cleared-inside-window",
        "Gradients are cleared between windows.",
        checks.cleared_inside_window,
        "Remove that call: ready.step() clears the gradients at the end of each window.",
    ),
)
_BEFORE_SKIP = (
    _CLOSED,
    _LOST,
    _rule(
        "skipped-inside-window",
        "A micro-batch is left out before its gradients are added to others.",
        checks.left_out_inside_window,
        "Look at the loss before ready.backward(loss), and call ready.skip() in its place.",
    ),
)
_BEFORE_EVALUATION = (
    _FAILED,
    _rule(
        "evaluated-before-step",
        "An evaluation begins between micro-batches.",
        checks.evaluated_in_micro_batch,
        "End the micro-batch by ready.step() first, because not every engine keeps its gradients through a forward.",
    ),
)
_BEFORE_FORWARD = (
    _rule(
        "forward-loses-gradients",
        "No forward without gradients runs where FSDP1 holds averaged ones.",
        checks.forward_loses,
        "Move it after ready.step().",
        source=("torch 2.13 FullyShardedDataParallel",),
    ),
)

ASKED: Mapping[type, tuple[Rule, ...]] = {
    events.Backward: _BEFORE_BACKWARD,
    events.Step: _BEFORE_STEP,
    events.ForwardRan: _BEFORE_FORWARD,
    events.Cleared: _BEFORE_CLEARING,
    events.SteppedByHand: _BEFORE_HAND,
    events.LeftOut: _BEFORE_SKIP,
    events.EvaluationEntered: _BEFORE_EVALUATION,
    events.Saved: (_CLOSED, _AVERAGES, _SAVED_EVALUATING, _FAILED, _UNFINISHED, _INSIDE_BATCH, _NOT_COUNTED),
    events.Resuming: (_CLOSED, _AVERAGES, _SAVED_EVALUATING, _FAILED, _UNFINISHED),
    events.AccumulateEntered: (_CLOSED,),
    events.Called: (_CLOSED, _NOT_COUNTED),
    events.Closed: (_CLOSED_INSIDE,),
}
"""The rules that are asked before an event counts, in reporting order; events that are not here always count."""

RULES: tuple[Rule, ...] = tuple(dict.fromkeys(rule for rules in ASKED.values() for rule in rules))
"""Every rule of the loop, once."""
