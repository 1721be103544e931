"""What each rule of the loop looks at: a few fields of a ``Turn``; () where the rule holds."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from prepkit.facts import loop as events
from prepkit.facts.loop import Gradients, Turn
from prepkit.findings.text import count
from prepkit.rules.rule import Hit

_NONE: tuple[Hit, ...] = ()
_CALLS: dict[type, str] = {
    events.Backward: "ready.backward()",
    events.Step: "ready.step()",
    events.LeftOut: "ready.skip()",
    events.Saved: "ready.save()",
    events.Resuming: "ready.resume()",
    events.AccumulateEntered: "ready.accumulate()",
    events.EvaluationEntered: "ready.evaluating()",
    events.ForwardRan: "ready.model(...)",
    events.Cleared: "optimizer.zero_grad()",
}
INSTEAD = "write ready.backward(loss) and ready.step() in the place of loss.backward() and optimizer.step()"


def called(event: Any) -> str:
    """The call that made an event, as a user types it."""
    return (
        event.call
        if isinstance(event, events.Called | events.SteppedByHand)
        else _CALLS.get(type(event), type(event).__name__)
    )


def _hit(turn: Turn, what: str, fix: str = "") -> tuple[Hit, ...]:
    return (Hit(called(turn.event), what, fix),)


# --- calls that have no place where the loop is ---


def closed(turn: Turn) -> tuple[Hit, ...]:
    if not turn.state.closed:
        return _NONE
    return _hit(turn, f"{called(turn.event)} was called after ready.close(), which has let go of the wrapper.")


def evaluating(turn: Turn) -> tuple[Hit, ...]:
    if not turn.state.evaluating:
        return _NONE
    return _hit(turn, f"{called(turn.event)} was called inside ready.evaluating(), where nothing has a gradient.")


def averages_applied(turn: Turn) -> tuple[Hit, ...]:
    if not turn.state.averages:
        return _NONE
    return _hit(
        turn,
        f"{called(turn.event)} was called inside ema.applied(), where averages are in the place of the weights that "
        "are trained.",
    )


def saved_evaluating(turn: Turn) -> tuple[Hit, ...]:
    if not (turn.state.evaluating and turn.plan.swaps_weights):
        return _NONE
    return _hit(
        turn,
        f"{called(turn.event)} was called inside ready.evaluating(), where an optimizer or a module that does more in "
        "eval mode may have put other weights in the place of those that are trained.",
    )


def evaluated_in_micro_batch(turn: Turn) -> tuple[Hit, ...]:
    plan = turn.plan
    if not (turn.state.backwards and (plan.loses_gradients or plan.engine_steps)):
        return _NONE
    what = f"ready.evaluating() was entered between ready.backward() and ready.step(), and {plan.engine} may lose the"
    return _hit(turn, f"{what} gradients of a window in a forward.")


def unfinished(turn: Turn) -> tuple[Hit, ...]:
    if not (pending := turn.state.pending):
        return _NONE
    begun = f"{pending} of {turn.plan.accumulation} micro-batches of this window have run"
    if isinstance(turn.event, events.Saved):
        return _hit(turn, f"{begun}, and a checkpoint holds no gradients.")
    return _hit(
        turn,
        f"{begun}, and their gradients belong to what is replaced.",
        "Resume before the first ready.backward(), or after a ready.step() that returned True.",
    )


def inside_batch(turn: Turn) -> tuple[Hit, ...]:
    batches = turn.state.batches
    if batches.loader is None or batches.last or not 0 < batches.trained < batches.expected:
        return _NONE
    made = f"the batch in use has made {batches.trained} of {count(batches.expected, 'micro-batch')}"
    return _hit(turn, f"{made}, and a resume goes on with the next batch: nobody would train the rest of this one.")


# --- backward ---


def leads_nowhere(turn: Turn) -> tuple[Hit, ...]:
    if turn.event.leads:
        return _NONE
    return _hit(
        turn,
        "no gradient leads from this loss to the model: it was detached, or computed under torch.no_grad() or from "
        "frozen parameters alone.",
    )


def engine_counts(turn: Turn) -> tuple[Hit, ...]:
    if not (turn.event.more and turn.plan.engine_steps):
        return _NONE
    return _hit(turn, f"more=True was given, and {turn.plan.engine} counts micro-batches by their backward.")


def weighed_on_some_ranks(turn: Turn) -> tuple[Hit, ...]:
    if turn.event.alike:
        return _NONE
    mine = "gives one" if turn.event.weighed else "gives none"
    return _hit(turn, f"some ranks give ready.backward a mean_over=... and some do not: this rank {mine}.")


def weighed_in_some_losses(turn: Turn) -> tuple[Hit, ...]:
    if turn.state.weighed is None or turn.state.weighed == turn.event.weighed:
        return _NONE
    return _hit(
        turn,
        "some losses of this window say mean_over=... and some do not, so that their weights are not known.",
    )


def weighed_in_vain(turn: Turn) -> tuple[Hit, ...]:
    if not turn.event.weighed:
        return _NONE
    if turn.event.more:
        return _hit(turn, "mean_over weighs the one loss of a micro-batch, and more=True announces another.")
    if turn.state.stepping:
        return _hit(
            turn, "mean_over weighs losses within a window, and a closure makes the gradients of one step anew."
        )
    return _hit(turn, f"{turn.plan.no_mean_over}.") if turn.plan.no_mean_over else _NONE


def left_over(turn: Turn) -> tuple[Hit, ...]:
    state = turn.state
    if turn.event.gradients is not Gradients.THERE or state.backwards or state.micro_batches:
        return _NONE
    return _hit(
        turn,
        "gradients are in the model before the first ready.backward() of a window, as after a loss.backward() by hand, "
        "and would be added to those of the window.",
    )


def backward_twice(turn: Turn) -> tuple[Hit, ...]:
    state = turn.state
    if not state.backwards or state.more or (turn.event.gradients is Gradients.NONE and not turn.plan.engine_steps):
        return _NONE
    if not (turn.plan.clears or turn.plan.engine_steps):  # the script says by its steps where a micro-batch ends
        return _NONE
    return _hit(turn, "ready.backward() was called again without ready.step() since.")


def lost_inside_window(turn: Turn) -> tuple[Hit, ...]:
    state = turn.state
    if turn.event.gradients is not Gradients.NONE or not (state.micro_batches or (state.backwards and state.more)):
        return _NONE
    return _hit(
        turn,
        "the gradients of this window's first backwards are gone: zero_grad() was called inside it, or they were set "
        "to None.",
    )


def failed(turn: Turn) -> tuple[Hit, ...]:
    if not turn.state.failed or turn.state.stepping:
        return _NONE
    return _hit(turn, f"{called(turn.event)} came after a ready.backward() that has raised, and has left gradients.")


def window_lost(turn: Turn) -> tuple[Hit, ...]:
    state = turn.state
    if not (state.failed and state.micro_batches):
        return _NONE
    what = f"ready.backward() has raised in micro-batch {state.micro_batches + 1} of {turn.plan.accumulation}"
    lost = count(state.micro_batches, "micro-batch")
    return _hit(turn, f"{what}, after some gradients were added: {lost} before it left out as well.")


def past_wrapper(turn: Turn) -> tuple[Hit, ...]:
    if turn.state.armed or not (turn.plan.wrapper_averages and turn.event.averages):
        return _NONE
    return _hit(
        turn,
        "DistributedDataParallel averages one backward per forward of its own, and none has run since the last "
        "backward: these gradients would be each rank's alone.",
    )


def written(turn: Turn) -> tuple[Hit, ...]:
    if turn.event.gradients is not Gradients.WRITTEN or not turn.plan.clears:
        return _NONE
    return _hit(
        turn,
        "the gradients of a window were written beside ready.backward() and ready.step(), as clip_grad_norm_() and a "
        "loss.backward() by hand do.",
    )


def written_scaled(turn: Turn) -> tuple[Hit, ...]:
    if turn.event.gradients is not Gradients.WRITTEN or not turn.plan.loss_scaled:
        return _NONE
    return _hit(
        turn,
        "the gradients of a window were written beside ready.backward() and ready.step(), while they are still "
        "multiplied by the loss scale of float16.",
    )


def forward_loses(turn: Turn) -> tuple[Hit, ...]:
    event = turn.event
    if event.grad or not (turn.state.backwards and event.averages and turn.plan.loses_gradients):
        return _NONE
    return _hit(
        turn,
        f"a forward without gradients ran between ready.backward() and ready.step(), where {turn.plan.engine} loses "
        "the gradients of the window.",
    )


# --- step ---


def nothing_to_step(turn: Turn) -> tuple[Hit, ...]:
    if turn.plan.optimizer:
        return _NONE
    return _hit(turn, "there is no optimizer to step: the plan was made without one.")


def closure_wanted(turn: Turn) -> tuple[Hit, ...]:
    if turn.event.closure or not turn.plan.wants_closure:
        return _NONE
    return _hit(turn, f"{turn.plan.wants_closure} asks for gradients several times a step.")


def closure_has_no_place(turn: Turn) -> tuple[Hit, ...]:
    if not turn.event.closure:
        return _NONE
    plan = turn.plan
    if plan.engine_steps:
        return _hit(turn, "the engine steps the optimizer by itself and takes no closure.", "Call ready.step().")
    if not plan.loss_scaled and plan.accumulation == 1:
        return _NONE
    why = "a loss scale" if plan.loss_scaled else f"accumulation={plan.accumulation}"
    return _hit(turn, f"a closure makes the gradients of one step anew, which does not go with {why}.")


def without_backward(turn: Turn) -> tuple[Hit, ...]:
    if turn.state.backwards or turn.event.closure:
        return _NONE
    return _hit(
        turn,
        "ready.step() was called without ready.backward(loss) since the last step; gradients of a loss.backward() by "
        "hand are not divided by the number of micro-batches, not scaled under float16, and not taken by DeepSpeed.",
    )


def cleared_before_step(turn: Turn) -> tuple[Hit, ...]:
    if not turn.state.cleared or turn.event.closure:
        return _NONE
    return _hit(
        turn,
        "optimizer.zero_grad() was called between ready.backward() and ready.step(), which would train nothing.",
    )


def more_announced(turn: Turn) -> tuple[Hit, ...]:
    if not turn.state.more or turn.event.closure:
        return _NONE
    return _hit(
        turn,
        "ready.backward(loss, more=True) has announced another backward of this micro-batch, and ready.step() came "
        "first.",
    )


def never_averaged(turn: Turn) -> tuple[Hit, ...]:
    if turn.event.closure or turn.state.averaged or not (turn.plan.averages and turn.ends):
        return _NONE
    if not turn.plan.clears and (turn.state.averaging or turn.state.forced is False):
        return _NONE  # a script that steps inside ``no_sync``, as accelerate's LocalSGD does
    if turn.state.averaging:
        name = "DistributedDataParallel" if turn.plan.wrapper_averages else turn.plan.engine
        off = "set_requires_gradient_sync(False)" if turn.plan.engine == "FSDP2" else "no_sync()"
        return _hit(turn, f"{name} has not averaged the last gradients of this window, because its {off} was used.")
    return _hit(
        turn,
        "this micro-batch came to be the last of its window after its ready.backward(), which has left each rank its "
        "own gradients: ready.accumulate(last=True) was entered, or another batch was read, too late.",
        "Read the batch, and enter `with ready.accumulate(last=True):`, before the forward.",
    )


def gone_at_end(turn: Turn) -> tuple[Hit, ...]:
    if turn.event.gradients is not Gradients.NONE:
        return _NONE
    return _hit(
        turn,
        "no parameter has a gradient: something has set them to None between ready.backward() and ready.step(), as "
        "model.zero_grad() does.",
    )


def scheduler_stepped(turn: Turn) -> tuple[Hit, ...]:
    if turn.event.moved is None:
        return _NONE
    before, now = turn.event.moved
    return _hit(turn, f"the scheduler was stepped beside ready.step(), from {before} to {now}.")


def scheduler_at_end(turn: Turn) -> tuple[Hit, ...]:
    if not turn.event.at_end:
        return _NONE
    return _hit(turn, "the scheduler has come to its total_steps: it ticks no more, and the learning rate stays.")


# --- what others do to the optimizer ---


def cleared_inside_window(turn: Turn) -> tuple[Hit, ...]:
    if not turn.state.micro_batches or turn.state.stepping or turn.state.failed:
        return _NONE
    return _hit(
        turn,
        "optimizer.zero_grad() was called inside an accumulation window, whose first micro-batches it would throw "
        "away.",
    )


def left_out_inside_window(turn: Turn) -> tuple[Hit, ...]:
    state = turn.state
    if not (state.micro_batches and state.backwards) or state.failed:
        return _NONE
    return _hit(
        turn,
        f"ready.skip() was called after ready.backward() in micro-batch {state.micro_batches + 1} of "
        f"{turn.plan.accumulation}, whose gradients are added to those before it already.",
    )


def closed_inside_window(turn: Turn) -> tuple[Hit, ...]:
    state, plan = turn.state, turn.plan
    if not state.pending or turn.event.failing or state.closed or not plan.clears:
        return _NONE
    what = f"{count(state.pending, 'micro-batch')} of {plan.accumulation} waited for the end of their window"
    return _hit(turn, f"{what}, and their gradients are stepped by nobody.")


def stepped_by_hand(turn: Turn) -> tuple[Hit, ...]:
    if not turn.state.used or turn.event.inner:
        return _NONE
    plan = turn.plan
    whole = plan.accumulation == 1 and not (plan.engine_steps or plan.clips or plan.loss_scaled or plan.ticks)
    hit = Hit(called(turn.event), f"{called(turn.event)} was called after ready.backward().")
    return (evolve(hit, milder=whole and turn.event.averaged and not turn.state.weighed),)


def inner_stepped(turn: Turn) -> tuple[Hit, ...]:
    if not turn.event.inner:
        return _NONE
    return _hit(
        turn,
        f"the {turn.event.inner} that was given to build_plan was stepped by hand, and under DeepSpeed its step "
        "reaches no weight.",
    )


def own_loop_unaveraged(turn: Turn) -> tuple[Hit, ...]:
    if turn.event.averaged or turn.state.used or turn.event.inner:
        return _NONE
    return _hit(
        turn,
        "optimizer.step() was called without ready.backward(loss), and no gradient of this rank has been averaged with "
        f"those of the others: the plan has {turn.plan.accumulation} micro-batches to a window, and only ready.step() "
        "says which of them ends it.",
    )


def own_loop_left_out(turn: Turn) -> tuple[Hit, ...]:
    plan = turn.plan
    if turn.state.used or turn.event.inner:
        return _NONE
    left: dict[str, str] = {}
    if plan.accumulation > 1:
        change = "leave out global_batch" if plan.global_batch else "write Config(accumulation=1)"
        left[f"one step for {plan.accumulation} micro-batches"] = change
    if plan.clips and not plan.engine_steps:  # which clips
        left[f"clipping by {plan.clips}"] = "write Config(clip=None)"
    if not turn.event.scaled:
        left["the loss scale of float16"] = "call ready.scaler.scale(loss) and ready.scaler.step(optimizer)"
    if not left:
        return _NONE
    return _hit(
        turn,
        f"{called(turn.event)} was called and ready.backward(loss) never, so that what the plan gives to "
        f"ready.backward() and ready.step() is not done: {'; '.join(left)}.",
        f"{INSTEAD[0].upper()}{INSTEAD[1:]}; for a loop of your own, which does that itself, "
        f"{' and '.join(left.values())}.",
    )


def not_counted(turn: Turn) -> tuple[Hit, ...]:
    state = turn.state
    if not state.by_hand or state.used or not getattr(turn.event, "counts", True):
        return _NONE
    return _hit(
        turn,
        f"{called(turn.event)} takes the number of steps from ready.steps, which counts those of ready.step() alone, "
        "and only optimizer.step() was called.",
    )


# --- windows and passes ---


def read_ahead(turn: Turn) -> tuple[Hit, ...]:
    if turn.plan.accumulation == 1 or not turn.state.batches.late:
        return _NONE
    return _hit(
        turn,
        "a batch is trained after its loader has come to its end, as in `for batch in list(loader):` and with a "
        f"prefetcher that reads one batch ahead: the window of {turn.plan.accumulation} micro-batches ended with the "
        "batch that was read last, not with the one that is trained last.",
    )


def more_micro_batches(turn: Turn) -> tuple[Hit, ...]:
    batches = turn.state.batches
    if turn.plan.accumulation == 1 or batches.late or not batches.at_end or batches.trained < batches.expected:
        return _NONE
    return _hit(
        turn,
        f"the last batch of a pass makes more than {count(batches.expected, 'micro-batch')}, which is what most before "
        "it made, or one where none was read yet, and its window has ended.",
    )


def over_pass(turn: Turn) -> tuple[Hit, ...]:
    state = turn.state
    if turn.plan.accumulation == 1 or not state.over_pass:
        return _NONE
    return _hit(
        turn,
        f"a window of {turn.plan.accumulation} micro-batches goes on over the end of a pass, whose last batch was left "
        "out, or made fewer micro-batches than those before it: the gradients are stepped with those of the next pass.",
    )
