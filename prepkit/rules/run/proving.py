"""What a window of training has done otherwise than plain torch does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import sqrt

from attrs import evolve

from prepkit.facts.proof import ProofFacts, counts, mean, norm
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some, spans
from prepkit.rules.rule import Hit, Moment, Rule
from prepkit.rules.run.averaging import LOCAL_SGD
from prepkit.rules.run.proof_causes import causes, steps_apart
from prepkit.rules.run.proof_fixes import fitted
from prepkit.rules.run.proof_gradients import (
    added_up,
    by_hand,
    clipped,
    cut_off,
    gradients,
    handed_back,
    made_otherwise,
    micro_batch,
    no_gradient,
    not_clipped,
    only_in,
    outputs,
    past_wrapper,
    slopes,
    tokens,
    unlike_losses,
    weights_by_rank,
    written,
)
from prepkit.rules.run.proof_steps import not_held, rounded_away, step_in_parts, step_size

_BY_RANK = (
    "Let all ranks compute alike: look for a hook, a scale, a mask or a branch by rank; else keep what a forward "
    "changes (a counter) in buffers, and draw from torch's generator."
)
_REPEATS = (
    "While you prove, keep what a forward changes (a counter) in buffers, and draw from torch's generator; where it "
    "has neither, look at what computes the forward, as an engine that changes outputs."
)
_IN_PARTS = (
    "Look at what splits an output of a cut layer by its width: a chunk of gate and value, or of query, key and value, "
    "splits this rank's part of a fused matrix. Cut each of them as a layer of its own, or order the rows by rank; and "
    "see that what all ranks hold alike draws alike."
)
_PATCHED = (
    "Write a forward that was put in another's place so that it uses its own module, as types.MethodType(function, "
    "module) does: a function over the module as it was computes with that also in a copy."
)
_UNSTEPPED = (
    "Call the wrapper, and step the optimizer that holds it behind its backward: while you prove, among the first 20 "
    "steps of the others."
)
_ASKED = "While you prove, step the plain sum of what torch.autograd.grad gives, or call loss.backward()."


def _first(facts: ProofFacts) -> Iterator[Hit]:
    yield from _ranks_apart(facts.first_apart, "has other first weights than rank 0")
    yield from _ranks_apart(facts.buffers_apart, "begins with other buffers than rank 0", "buffer")


def _moved(facts: ProofFacts) -> Iterator[Hit]:
    if facts.moved:
        said = f"Between the forward and the step something has changed {count(len(facts.moved), 'weight')}"
        yield Hit(at(facts.moved[0]), f"{said}: {some(facts.moved)}. The gradients are those of other weights.")


def _left_over(facts: ProofFacts) -> Iterator[Hit]:
    if facts.left:
        said = f"{count(len(facts.left), 'parameter')} had a gradient before the first backward of the step"
        yield Hit(at(facts.left[0]), f"{said}, to which the window has added: {some(facts.left)}.")
    unheld = {one.name for one in facts.steps if not one.held}  # which zero_grad() of the optimizer does not clear
    if kept := tuple(name for name in facts.kept if name not in unheld):
        said = f"{count(len(kept), 'parameter')} still had the gradient of this step when the next went backward"
        yield Hit(at(kept[0]), f"{said}, and adds to it: {some(kept)}.")


def _twice(facts: ProofFacts) -> Iterator[Hit]:
    if facts.twice:
        said = "The optimizer stepped once more over the same gradients"
        yield Hit("optimizer", f"{said}: nothing went backward to them between.")


def _decay(facts: ProofFacts) -> Iterator[Hit]:
    for why, names, decay in _decayed(facts):
        if decay:
            what = f"To the gradients of {count(len(names), 'parameter')} {why} were added, and the optimizer decays"
            yield Hit(at(names[0]), f"{what} by {decay:g} too: {some(names)}.")


def _decayed(facts: ProofFacts) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield what was added, to which gradients, and the optimizer's own decay of them."""
    decays = {one.name: one.decay for one in facts.gradients}
    for cause, names in causes(facts):
        for decay in dict.fromkeys(decays[name] for name in names) if cause.rule == "prove.decay" else ():
            yield cause.why, tuple(name for name in names if decays[name] == decay), decay


def _after(facts: ProofFacts) -> Iterator[Hit]:
    told = facts.first_apart or causes(facts) or facts.options_apart or facts.state_apart
    if not (told or steps_apart(facts) or list(_uneven(facts))):
        over = ", over the same gradients" * bool(facts.gradients)  # else nobody has compared them
        yield from _ranks_apart(facts.after_apart, f"has other weights than rank 0 after the step{over}")


def _ranks_apart(apart: tuple[tuple[str, tuple[int, ...]], ...], what: str, kind: str = "parameter") -> Iterator[Hit]:
    ranks = sorted({rank for _, found in apart for rank in found})
    for rank in ranks:
        names = [name for name, found in apart if rank in found]
        yield Hit(at(names[0]), f"Rank {rank} {what}: {count(len(names), kind)}, {some(names)}.")


def _uneven(facts: ProofFacts) -> Iterator[Hit]:
    number = counts(facts)
    if len(set(number.values())) > 1 and not facts.beside:
        said = ", ".join(f"{most} on rank {rank}" for rank, most in number.items())
        yield Hit("loop", f"The ranks went backward over different numbers of micro-batches before the step: {said}.")


def _options(facts: ProofFacts) -> Iterator[Hit]:
    if facts.options_apart:
        yield Hit("optimizer", f"Ranks run with different options: {'; '.join(facts.options_apart[:3])}.")
    if facts.state_apart and not steps_apart(facts):
        what = f"Ranks step with different states: {'; '.join(facts.state_apart[:3])}"
        yield Hit("optimizer", f"{what}.", "Load or write the optimizer's state on all ranks alike, or on none.")


def _samples(facts: ProofFacts) -> Iterator[Hit]:
    who = "; ".join(f"ranks {spans(ranks)}" for ranks in facts.same_samples)
    if any(len(ranks) == facts.world for ranks in facts.same_samples):
        said = f"All {facts.world} ranks have read the same samples: their average is what one of them has"
        yield Hit("loaders", f"{said}.")
    elif who:
        yield Hit("loaders", f"Some ranks have read the same samples as others ({who}): these count as one of them.")


def _same_draws(facts: ProofFacts) -> Iterator[Hit]:
    if facts.same_draws:
        _, one, other = facts.same_draws[0]
        ranks = tuple(rank for rank, _, _ in facts.same_draws)
        on = f" on {'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}" if facts.world > 1 else ""
        what = f"Micro-batches {one} and {other}{on} were computed from the same state of torch's generator"
        yield Hit("loop", f"{what}: dropout leaves out the same elements in each of them.")


def _limits(facts: ProofFacts) -> Iterator[Hit]:
    if facts.clip is not None and facts.clip.parts:
        said = "Gradients were clipped in parts, each by a norm of its own"
        yield Hit("proof", f"{said}: those that are too small were taken for clipped.")
    told = {*facts.outside, *(name for _, names, _ in _decayed(facts) for name in names)}
    if unreached := [name for name in facts.unreached if name not in told and not facts.unrepeated]:
        had = f"{count(len(unreached), 'parameter')} had a gradient, and a copy of the model computes without"
        yield Hit("proof", f"{had}: {some(unreached)}. That was not compared.", _PATCHED)
    yield from cut_off(facts)
    if (losses := made_otherwise(facts)) is not None:
        said = f"Rank {losses[0].rank} makes its loss by other operators than rank {losses[1].rank}"
        each = [
            f"{only} on rank {one.rank} alone" for one, other in (losses, losses[::-1]) if (only := only_in(one, other))
        ]
        yield Hit(
            "loss",
            f"{said}: {'; '.join(each)}.",
            "Look whether all ranks are to have one loss: a smoothing, a weight, a part.",
        )
    if steps_apart(facts):
        where = "behind the step" if facts.averaged_later else f"behind another step, as it seems ({facts.averages})"
        said = f"Each rank has stepped by gradients of its own, and the program averages weights {where}"
        yield Hit("proof", f"{said}: gradients were not compared over the ranks.", LOCAL_SGD)
    elif later := [name for name in facts.later if name not in dict(facts.undone)]:
        said = f"Behind the step something has changed {count(len(later), 'weight')}"
        yield Hit("proof", f"{said}: {some(later)}. What they have become was not compared.")
    for limit in (*facts.limits, *added_up(facts), *written(facts)):
        yield Hit("proof", f"{limit}.")
    if facts.cleared and not (facts.wasted or by_hand(facts)):
        were = f"Gradients of {count(facts.cleared, 'micro-batch')} of a rank were cleared before any step"
        yield Hit("proof", f"{were}: they train nothing, and what was proven are those after them.")
    added = [(why, names) for why, names, decay in _decayed(facts) if not decay]
    for why, names in added:
        yield Hit("proof", f"To {count(len(names), 'gradient')} {why} were added: taken for a decay that is meant.")
    if left := set(facts.outside).difference(*(names for _, names, _ in _decayed(facts))):
        yield Hit("proof", f"The loss uses {some(sorted(left))} beside the outputs: that part was not replayed.")
    if facts.beside and not list(past_wrapper(facts)):
        said = f"A loss with weights of the model, and no output of it, went {', '.join(facts.beside)}"
        yield Hit("proof", f"{said}: that part was not replayed, and gradients were not compared.")
    noise = sqrt(sum(one.noise**2 for one in facts.gradients))
    if facts.gradients and facts.shares and noise > 0.1 * norm(facts, mean(facts)):
        yield Hit(
            "proof",
            f"Rounding in {facts.dtype} alone changes the gradients by more than a tenth: small errors cannot be seen.",
        )


def _unproven(facts: ProofFacts) -> Iterator[Hit]:
    if by_hand(facts) and facts.asked:
        what = "What was stepped is no sum of the gradients that the program has asked torch.autograd.grad for"
        yield Hit("proof", f"{what}: it has put them together itself, or they are wrong.", _ASKED)
    elif by_hand(facts):
        what = f"The gradients of {count(facts.cleared, 'micro-batch')} were cleared, and what was stepped is no sum of"
        yield Hit("proof", f"{what} those after: the program has put them together itself, or they are wrong.")
    if facts.unproven:
        yield Hit("proof", f"{facts.unproven}.")
    for why in facts.unstepped:
        yield Hit("proof", f"{why}: nothing of it was proven.", _UNSTEPPED)
    if facts.unrepeated and not (facts.outputs or facts.options_apart or weights_by_rank(facts)):
        on = f" of rank {spans(facts.unrepeated_on)} does not repeat, and that of rank 0, which was copied, does"
        who = on if facts.unrepeated_on else " does not repeat"
        what = f"The forward{who}: {facts.unrepeated}. Gradients were not compared."
        if facts.in_parts:
            what += " Its layers are cut over ranks, and compute otherwise than they do whole."
        fix = _PATCHED if facts.unreached else _BY_RANK if facts.unrepeated_on else _REPEATS
        yield Hit("proof", what, _IN_PARTS if facts.in_parts else fix)


def _row(
    rule: str, summary: str, fix: str, check: Callable[[ProofFacts], Iterator[Hit]] | None = None, **more: Severity
) -> Rule:
    return Rule(
        id=rule,
        summary=summary,
        check=fitted(rule, check or partial(gradients, rule)),
        at=(Moment.PROVE,),
        fix=fix,
        severity=more.get("severity", Severity.ERROR),
        source=("TTrace, arXiv 2506.09280",),
    )


RULES: tuple[Rule, ...] = (
    _row(
        "prove.unproven",
        "A window could be recorded, and replayed plainly.",
        "Give tensors and plain data to the model, and whole outputs; else compare by hand what the text names.",
        _unproven,
        severity=Severity.WARNING,
    ),
    _row(
        "prove.outputs",
        "The loop gets what the model returns.",
        "Look for what stands around the model: hooks of a wrapper, an output dtype, a gather or a slice of outputs; "
        "what is meant, as a temperature, belongs into the model or the loss.",
        outputs,
        severity=Severity.WARNING,
    ),
    _row(
        "prove.first-weights",
        "Every rank begins with the same weights.",
        "Call torch.manual_seed with one number on all ranks before the model is made, or send rank 0's weights.",
        _first,
    ),
    _row(
        "prove.slope",
        "Where a forward sends what trains to other ranks, gradients are the slopes of what all ranks lose.",
        "Look at what brings gradients back from other ranks: behind a gather or a sum of activations they are to be "
        "added up over the ranks that took them (torch.distributed.nn.functional does), each once; what all ranks hold "
        "alike is averaged, and what is a rank's own divided by the ranks.",
        slopes,
    ),
    _row(
        "prove.handed-back",
        "A stage goes backward over what it has sent with the gradient of that.",
        "Take gradients in the order in which activations were sent: a stage that keeps them in a list takes the first "
        "(pop(0)) where the next one goes backward in that order.",
        handed_back,
    ),
    _row(
        "prove.left-over",
        "No gradient is left from before when a window begins.",
        "Call optimizer.zero_grad() after every step, and after every backward that is not to be stepped.",
        _left_over,
    ),
    _row(
        "prove.moved",
        "Weights stay as they are from the first forward of a window to its step.",
        "Change weights behind the step alone: swap averages back before training, decay in the optimizer.",
        _moved,
    ),
    _row(
        "prove.uneven",
        "Every rank goes backward over as many micro-batches before a step.",
        "Let no rank skip a batch that others train on; give all loaders the same length, with drop_last.",
        _uneven,
    ),
    _row(
        "prove.same-samples",
        "Ranks that hold the whole model read different samples.",
        "Give each loader a DistributedSampler, or let the library that prepares the model prepare it too.",
        _samples,
        severity=Severity.WARNING,
    ),
    _row(
        "prove.same-draws",
        "Each micro-batch draws numbers of its own.",
        "Seed once, before the loop: torch.manual_seed, or what puts a generator back, belongs to no micro-batch.",
        _same_draws,
        severity=Severity.WARNING,
    ),
    _row(
        "prove.unlike-losses",
        "A loss weighs as much on one rank as on another.",
        "Make the loss alike on every rank: one reduction, one divisor, which depends on no rank.",
        unlike_losses,
    ),
    _row(
        "prove.tokens",
        "Each sample, or token that counts, weighs as much as any other of the step.",
        "Divide the sum of the losses by the tokens of all ranks and micro-batches: mean_over= in ready.backward, "
        "num_items_in_batch in transformers; else override, where a mean of means is meant.",
        tokens,
        severity=Severity.WARNING,
    ),
    _row(
        "prove.summed",
        "Gradients are averaged over the ranks.",
        "Divide by the number of ranks where the sum is made: in the communication hook, or the all_reduce by hand.",
    ),
    _row(
        "prove.averaged-twice",
        "Gradients are divided by the number of ranks once.",
        "Leave the division to the wrapper: DDP, FSDP and DeepSpeed average by themselves.",
    ),
    _row(
        "prove.accumulation",
        "The micro-batches of a step are averaged: each loss is divided by their number once.",
        "Divide by the accumulation in one place: in the loop, or by accelerate, DeepSpeed or prepkit.",
    ),
    _row(
        "prove.scaled",
        "Gradients are unscaled once before they are stepped.",
        "Step by scaler.step(optimizer), and call scaler.unscale_(optimizer) at most once, before clipping.",
    ),
    _row(
        "prove.clipped-scaled",
        "Gradients are clipped by their own norm: unscaled, averaged, and whole.",
        "Call scaler.unscale_(optimizer) before clip_grad_norm_; clip after the last backward, over all parameters.",
        clipped,
    ),
    _row(
        "prove.not-clipped",
        "Gradients are clipped where the run says so.",
        "Call the clipping of the library that prepared the model, after the last backward and before the step.",
        not_clipped,
    ),
    _row(
        "prove.not-averaged",
        "Every gradient is the average of all ranks.",
        "Put what trains inside the wrapper, and leave no_sync() before the last backward of a step.",
    ),
    _row(
        "prove.past-wrapper",
        "Every loss is made of what the wrapper returns.",
        "Call the wrapped model, model(x), and not what it wraps; or average such a gradient yourself.",
        past_wrapper,
    ),
    _row(
        "prove.part-of-ranks",
        "Gradients are averaged over all ranks that read other samples, and not over some.",
        "Give the wrapper a mesh or a group of all ranks that read other samples.",
    ),
    _row(
        "prove.micro-batch",
        "Every micro-batch of a step counts in its gradients.",
        "Clear gradients after the step alone, step after the last micro-batch, and leave no_sync() before that; a "
        "DeepSpeed engine counts by itself: call its step() after each backward.",
        micro_batch,
    ),
    _row(
        "prove.ratio",
        "Gradients have the size that plain torch gives them.",
        "Look for a factor at the loss, in a hook, or in what averages; the ratio is the factor.",
    ),
    _row(
        "prove.decay",
        "Weights decay once: by the optimizer, or by what is added to the loss or to the gradients.",
        "Set weight_decay=0 in the optimizer, or add nothing of the weights yourself.",
        _decay,
        severity=Severity.WARNING,
    ),
    _row(
        "prove.direction",
        "Gradients are a sum of those of the micro-batches.",
        "Look at what changes weights, buffers or gradients between forward and step, at layers that ranks share, and "
        "at checkpointed layers that draw other numbers when they are recomputed.",
    ),
    evolve(
        _row(
            "prove.no-gradient",
            "What takes part in the loss has a gradient.",
            "Look for a .detach() or no_grad() on the way, requires_grad, and zero_grad() after the backward.",
            no_gradient,
        ),
        milder="where plain torch gives none either, as the forward cuts the graph",
    ),
    _row(
        "prove.stepped-twice",
        "An optimizer steps once over the gradients of a window.",
        "Call step() once: a trainer, an engine or a scaler calls it by itself.",
        _twice,
    ),
    _row(
        "prove.options",
        "Ranks step with the same options and state, in the same precision and modes.",
        "Make the optimizer, its scheduler, autocast and train() alike on every rank; set no learning rate by rank.",
        _options,
    ),
    _row(
        "prove.not-stepped",
        "The optimizer steps everything that trains.",
        "Make the optimizer after the model is wrapped, from all parameters that train.",
        not_held,
    ),
    _row(
        "prove.step-size",
        "Weights move as the optimizer's options say.",
        "Look for hooks of the optimizer, weights that are written after the step, and groups that lost their options.",
        step_size,
    ),
    _row(
        "prove.step-in-parts",
        "A step over the parts of weights that ranks hold is the step over the whole weights.",
        "What takes a matrix whole (a norm over it, orthogonalization, rows and columns) has to see it whole: gather "
        "the gradient (param.grad.full_tensor()), compute the update, and keep this rank's part of it "
        "(distribute_tensor(update, param.device_mesh, param.placements)).",
        step_in_parts,
    ),
    _row(
        "prove.rounded-away",
        "A weight moves where its optimizer moves it.",
        "Keep weights in float32 and compute in bfloat16: torch.autocast, a MixedPrecisionPolicy, or Config(precision="
        "pk.BF16()).",
        rounded_away,
        severity=Severity.WARNING,
    ),
    _row(
        "prove.after-apart",
        "Every rank has the same weights after a step.",
        "Look for what a rank does alone between the backward and the end of the step.",
        _after,
    ),
    _row(
        "prove.limit",
        "Everything that was recorded could be replayed.",
        "Look at that yourself; the rest was compared.",
        _limits,
        severity=Severity.NOTE,
    ),
)
"""Reporting order: what ranks begin with, what they read, gradients by their cause, then the step."""
