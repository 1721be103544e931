"""What gradients and losses are told to be, in words: by cause, cleared, missing, or clipped otherwise than meant."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import sqrt
from operator import itemgetter

from prepkit.facts.proof import (
    NEAR,
    LossShare,
    ProofFacts,
    Slope,
    counts,
    kinds,
    near,
    norm,
    own_clip,
    tasks,
    weighted_by_samples,
)
from prepkit.findings.text import at, count, some, spans
from prepkit.rules.rule import Hit
from prepkit.rules.run.proof_causes import (
    AT_EACH,
    BY_EACH_RANK,
    BY_THE_RANKS,
    NONE_OF,
    OF_ITS_PART,
    OTHER_ON_EACH,
    OWN,
    UNLIKE,
    WHILE_SCALED,
    Cause,
    aim_of,
    causes,
    scaled_by_hand,
)
from prepkit.rules.run.proof_fixes import TORCH, wrapper

BY_HAND = ("prove.direction", "prove.ratio", "prove.micro-batch", "prove.decay")
"""Rules about what a program that puts gradients together itself may mean."""
ALMOST, LITTLE = 0.9, 0.3  # cosine and distance up to which a gradient is nearly the right one
_FREEZE = "Freeze by requires_grad_(False), since zeros are stepped too; else look for what sets them to zero."
_COUNTS = "Give mean_over the number of labels that count in this loss: (labels != -100).sum()."
_UNSCALE_FIRST = "Divide the gradients by that scale first, and clip them then."
_ELSEWHERE = (
    "Let the engine clip: Config(clip=pk.ClipNorm(...)), or gradient_clipping of DeepSpeed, which keeps gradients "
    "elsewhere than in param.grad."
)
_OF_A_RANK = "Look for what a rank does otherwise than others: a .detach(), a hook, a scale or a branch by rank."
_ONCE = "Go backward once over each loss: with retain_graph=True too, a second backward adds its gradients again."
_EMPTY = "Where a rank has no samples, let all sum their losses, and divide by the samples of all ranks."
_CUT = (
    "Drop what cuts it; where it is meant, say so by requires_grad_(False), and give the optimizer what trains alone."
)
_STILL = "Nothing, where they are to rest, as a teacher: requires_grad_(False) says so; else leave out no_grad()."
_CUT_OFF = "Look for a .detach(), a no_grad() or a hook in the forward; nothing, where that is meant."
_MOVED = (
    "Say so by requires_grad_(False), and give the optimizer what trains alone: decay and momentum go on over a "
    "gradient of zeros, as an engine or zero_grad(set_to_none=False) leaves one."
)
_REACHES = "Look for a .detach() or a no_grad() between the model and its loss."
_BEHIND = "Call zero_grad() behind step(), or before the backward."
_WRAP = (
    "Wrap the model before its optimizer is made, and call the wrapper: model = torch.nn.parallel."
    "DistributedDataParallel(model)."
)
_AS_OTHERS = "Average those too, as the others, behind the last backward: dist.all_reduce(param.grad), and divide."
_TIMES_RANKS = "Multiply the loss by the ranks, dist.get_world_size(), over which the wrapper averages."
_SYNC, _NO_SYNC = ": set_requires_gradient_sync(True)", ": no no_sync()"
_NOT_BEHIND = "Divide by nothing behind the dist.all_reduce: the loss is divided by the samples of all ranks."
_AT_END = (
    "Reduce gradients once, behind the last backward of the step, and divide by the ranks once: there, or at the loss."
)
_CLIP_ALL = (
    "Clip by the norm of the whole model: add up the squares of what is a rank's own over the ranks, and those of what "
    "all hold alike once."
)
OF_OTHERS = "divided by the ranks once too often, or what other ranks make of them does not come back"
_NOWHERE = "Divide by the accumulation in one place, and by the ranks in none: the wrapper averages over them."
_ONE_SEED = (
    "Draw what is added to gradients from a torch.Generator with one seed on all ranks, or send rank 0's: "
    "dist.broadcast(param.grad, src=0); and decide on all ranks alike what is cut or left out."
)


def by_hand(facts: ProofFacts) -> bool:
    """Return whether micro-batches were cleared, and no gradient is a sum of those after them.

    A program that clips or projects each micro-batch's gradients puts them together itself, and clears between, or asks
    for them by ``torch.autograd.grad``.
    """
    if facts.asked and any(cause.rule in BY_HAND for cause, _ in causes(facts)):
        return True
    told = [names for cause, names in causes(facts) if cause.rule == "prove.direction"]
    return facts.cleared > 0 and [len(names) for names in told] == [len(facts.gradients)]


def gradients(rule: str, facts: ProofFacts) -> Iterator[Hit]:
    """Each cause of this rule, and the gradients that it explains."""
    for cause, names in causes(facts):
        if cause.rule == rule and not (rule in BY_HAND and by_hand(facts)):
            who = "All gradients are" if len(names) == len(facts.gradients) else f"{_those(names, facts)} are"
            sums = BY_EACH_RANK in cause.why or AT_EACH in cause.why  # which are no multiple of what they should be
            shows = rule == "prove.ratio" or not (sums or near(cause.ratio, 1.0))
            ratio = f"{cause.ratio:{'.3f' if cause.ratio < 1e6 else '.3g'}} x what they should be" if shows else ""
            angle = f" (cosine {cause.cosine:.{4 if cause.cosine > ALMOST else 2}g}, off by {cause.off:.2g} of it)"
            why = cause.why + (angle if rule == "prove.direction" else "")
            why += ", and no wrapper holds the model" if cause.why == OWN and facts.raw else ""
            said = ": ".join(part for part in (ratio, why) if part)
            line = f" ({', '.join(facts.lines)})" if facts.lines else ""
            where = "gradients" if who.startswith("All") else at(names[0])
            yield Hit(where, f"{who} {said}{_early(rule, facts)}{line}.", _instead(rule, cause, names, facts))


def _early(rule: str, facts: ProofFacts) -> str:
    """Words for a step that came before its last micro-batch."""
    micros, meant = max(counts(facts).values()), facts.accumulation or 0
    stepped = f", and stepped after {micros} of the {meant} micro-batches of a step"
    return stepped if rule == "prove.not-averaged" and micros < meant else ""


def _instead(rule: str, cause: Cause, names: tuple[str, ...], facts: ProofFacts) -> str:
    """What to do where that is not what the rule says in general."""
    if rule == "prove.clipped-scaled" and cause.why.startswith(BY_EACH_RANK):
        return "Clip once the gradients are averaged, by one norm of all of them."
    if cause.why.startswith(WHILE_SCALED):
        return _UNSCALE_FIRST
    if rule == "prove.clipped-scaled" and cause.why.startswith(OF_ITS_PART) and TORCH not in facts.uses:
        return (
            "Clip by the norm of all parts: model.clip_grad_norm_ of FSDP1, of FSDP2 torch's clip_grad_norm_ over the "
            "model's own parameters, or ClipNorm in the config."
        )
    if rule == "prove.micro-batch" and cause.why.startswith("without the last") and facts.world > 1:
        known = TORCH in facts.uses and {"FSDP2": _SYNC, "": ", or reduce behind it"}.get(wrapper(facts), _NO_SYNC)
        said = known or f"{_SYNC},{_NO_SYNC[1:]}"
        return f"Let the last backward reduce{said}; clear after the step alone."
    if rule == "prove.not-averaged" and facts.raw and cause.why == OWN:
        return _WRAP if len(names) == len(facts.gradients) else _AS_OTHERS
    if AT_EACH in cause.why or cause.why.startswith(BY_THE_RANKS):
        return _AT_END if AT_EACH in cause.why else _TIMES_RANKS if not facts.raw else _NOT_BEHIND
    if rule == "prove.accumulation" and "average is taken too" in cause.why:
        return _NOWHERE
    if cause.why == OTHER_ON_EACH:
        return _ONE_SEED
    if _early(rule, facts):
        prepares = "accelerate" in facts.uses or TORCH not in facts.uses
        how = "give the optimizer to accelerator.prepare() too, or test for it" if prepares else "test for it"
        return f"Step at the last micro-batch alone: {how}."
    if cause.why.startswith(UNLIKE):
        return _OF_A_RANK
    if rule == "prove.direction" and cause.cosine > ALMOST and cause.off < LITTLE:
        return (
            "Look for what rounds or changes a little of each gradient: a hook, a cast, autocast around the backward."
        )
    return ""


def _those(names: tuple[str, ...], facts: ProofFacts) -> str:
    """Gradients by the module that they all lie in, or by some of their names."""
    every = [one.name for one in facts.gradients]
    parts = names[0].split(".")[:-1]
    for depth in range(len(parts), 0, -1):
        begin = ".".join(parts[:depth]) + "."
        if [name for name in every if name.startswith(begin)] == list(names):
            return f"The gradients of `{begin[:-1]}`"
    return f"The gradients of {len(names)} of {len(every)} parameters ({some(names)})"


def past_wrapper(facts: ProofFacts) -> Iterator[Hit]:
    """Losses that no output of the wrapper is in."""
    for cause, names in causes(facts):
        which = "all gradients" if len(names) == len(facts.gradients) else some(names)
        if cause.rule == "prove.past-wrapper" and not facts.beside:
            line = f" ({', '.join(facts.lines)})" if facts.lines else ""
            said = f"What `{facts.wrapper}` wraps, or a part of it, was called in its place{line}"
            yield Hit("gradients", f"{said}: {which} are each rank's own, and nobody averages them.")
        elif cause.rule == "prove.past-wrapper":
            said = f"A loss that no output of `{facts.wrapper}` is in went {', '.join(facts.beside)}"
            yield Hit("gradients", f"{said}: what it adds to {which} is each rank's own, and nobody averages it.")


def written(facts: ProofFacts) -> Iterator[str]:
    """Yield what is to be said of gradients that the program has changed behind the backward, alike on all ranks.

    That is a rule of its own (noise, signs), of which nobody can say that it is wrong.
    """
    if not facts.gradients:
        return
    told, aim = {name for _, names in causes(facts) for name in names}, aim_of(facts)
    if not told and (norm := aim.cut_to()) is not None:
        yield own_clip(norm)
    changed = [one.name for one in facts.gradients if one.name not in told and aim.as_left(one)]
    if changed:
        where = " alike on all ranks" if facts.world > 1 else ""
        said = (
            f"Backward has left {count(len(changed), 'gradient')} as they should be, and the program has changed them"
        )
        yield f"{said} since{where}: {some(changed)}; taken as meant, as noise or a rule of its own"


def micro_batch(facts: ProofFacts) -> Iterator[Hit]:
    """Micro-batches that do not count."""
    yield from gradients("prove.micro-batch", facts)
    if facts.doubled:
        said = f"A loss, or one of those that a loss is the sum of, went {', '.join(facts.doubled)} for the second time"
        yield Hit("loop", f"{said}: its gradients count twice.", _ONCE)
    if facts.wasted and not by_hand(facts):
        number = facts.wasted + max(counts(facts).values())
        line = f" ({', '.join(facts.lines)})" if facts.lines else ""
        what = f"Gradients of {facts.wasted} of the {number} micro-batches of a step were cleared before it"
        yield Hit("loop", f"{what}: it trains on the last alone, which counts as one of {number}{line}.")


def no_gradient(facts: ProofFacts) -> Iterator[Hit]:
    """Parameters that should have a gradient."""
    if facts.idle:
        said = "The optimizer has stepped twice over no gradient: each time they were cleared after the backward"
        yield Hit("loop", f"{said}, and nothing trains ({', '.join(facts.lines)}).", _BEHIND)
    for name in facts.detached:
        said = f"The optimizer of `{name}` has stepped over no gradient each time: no loss reaches it"
        yield Hit("loop", f"{said}, and it does not train.", _REACHES)
    for cause, names in causes(facts):
        if cause.rule == "prove.no-gradient":
            of_a_rank = cause.why.startswith(NONE_OF)
            had = cause.why if of_a_rank else f"a gradient of {cause.why}" if cause.why else "no gradient"
            said = f"{count(len(names), 'parameter')} had {had} when the optimizer stepped"
            what = f"{said}, and should have: {some(names)}."
            yield Hit(at(names[0]), what, _OF_A_RANK if of_a_rank else _FREEZE if cause.why else "")
    moved = {one.name for one in facts.steps if one.moved}
    for how, each in _by_what_cuts({name: how for name, how in cut(facts).items() if name in moved}):
        what = f"The loss is computed with {some(each)}, and {how} cuts the graph: plain torch gives no gradient, and"
        yield Hit(at(each[0]), f"{what} moves nothing. Here the step moves them, over zeros.", _MOVED, milder=True)
    for how, each in _by_what_cuts({name: how for name, how in warned(facts).items() if name not in moved}):
        what = f"The loss is computed with {some(each)}, and {how} cuts the graph: plain torch too gives no gradient"
        yield Hit(at(each[0]), f"{what}, and nothing trains what the optimizer holds.", _CUT, milder=True)


def _by_what_cuts(found: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    for how in dict.fromkeys(found.values()):
        yield how, [name for name, other in found.items() if other == how]


def cut(facts: ProofFacts) -> dict[str, str]:
    """Parameters that the forward cuts off, and that nothing else moves, as an average of others; and what cuts."""
    return {name: how for name, how in facts.cut if name not in {*facts.later, *facts.moved}}


def warned(facts: ProofFacts) -> dict[str, str]:
    """Those of them that the step moves, as by a decay, or that may be cut in a wrong place.

    ``no_grad()`` says itself that nothing is to be trained, as of a teacher, and the step leaves alone what has no
    gradient.
    """
    moved = {one.name for one in facts.steps if one.moved}
    return {name: how for name, how in cut(facts).items() if name in moved or not how.startswith("no_grad()")}


def clipped(facts: ProofFacts) -> Iterator[Hit]:
    """Clipping before gradients are whole, averaged and unscaled."""
    clip = facts.clip
    yield from gradients("prove.clipped-scaled", facts)
    if clip is not None and clip.early:
        what = (
            f"Gradients were clipped to {clip.most:g} before the last micro-batch of the step, which then adds to them."
        )
        yield Hit("gradients", what)
        return
    if (
        clip is None
        or clip.seen is None
        or clip.beyond
        or clip.parts
        or clip.power != 2
        or facts.beside
        or facts.first_apart
        or not facts.gradients
        or list(written(facts))
    ):
        return
    stepped = sqrt(sum(one.squares[0] for one in facts.gradients if one.squares))
    if near(stepped, min(clip.seen, clip.most)):
        return  # it was the norm of what is stepped, by whatever that was divided before
    length = norm(facts, tuple(a / aim_of(facts).clipping for a in aim_of(facts).sums))
    off = clip.seen / length if length else 1.0
    scale, by_hand = (facts.scale, False) if facts.scale > 1 else (scaled_by_hand(facts), True)
    if scale > 1 and near(off, scale):
        what = (
            f"Gradients were clipped to {clip.most:g} while they were scaled by {scale:g}: their norm seemed to "
            f"be {clip.seen:.4g}, and is {length:.4g}."
        )
        yield Hit("gradients", what, _UNSCALE_FIRST if by_hand else "")
    elif abs(off - 1) > 0.1 and not causes(facts):
        what = f"Gradients were clipped by a norm of {clip.seen:.4g}, and their norm is {length:.4g}."
        yield Hit("gradients", what, "" if clip.seen else _ELSEWHERE)


def not_clipped(facts: ProofFacts) -> Iterator[Hit]:
    """Clipping that the run asks for, and that has not happened."""
    yield from gradients("prove.not-clipped", facts)
    if facts.clip is not None and facts.clip.empty:
        said = f"The run clips to {facts.clip.most:g}, and gives no parameter to what clips"
        how = (
            "Give model.parameters(), or a list: a generator is empty once an optimizer, or another call, has read it."
        )
        yield Hit("gradients", f"{said}: nothing is clipped.", how)
    if facts.clip is not None and facts.clip.late:
        said = f"Gradients are clipped to {facts.clip.most:g} behind the step, which has taken them as they were"
        yield Hit("gradients", f"{said}: nothing is clipped.", "Clip behind the last backward, and before the step.")
    if facts.over:
        said = f"The gradients of {count(len(facts.over), 'parameter')} have larger elements than {facts.value:g}"
        yield Hit(at(facts.over[0]), f"{said}, to which the run clips them: {some(facts.over)}.")


def unlike_losses(facts: ProofFacts) -> Iterator[Hit]:
    """Ranks whose losses weigh more than those of others."""
    if (by := weights_by_rank(facts)) is not None:
        most, least = max(by, key=by.__getitem__), min(by, key=by.__getitem__)
        line = f" ({', '.join(facts.lines)})" if facts.lines else ""
        if by[least]:
            what = f"Every loss of rank {most} weighs {by[most] / by[least]:.2f} x one of rank {least}"
            yield Hit("loss", f"{what}, and is made over as many elements{line}.")
        else:
            none = tuple(rank for rank, weight in by.items() if not weight)
            what = f"The losses of rank {spans(none)} are multiplied by 0, and are made over as many elements as others"
            yield Hit("loss", f"{what}: their samples train nothing, and count in the mean over ranks{line}.", _EMPTY)


def tokens(facts: ProofFacts) -> Iterator[Hit]:
    """Samples that weigh more than others, and numbers of labels that are others."""
    by: dict[int, list[tuple[float, LossShare]]] = {}  # losses of several tasks are no samples of one
    for share in facts.shares:
        by.setdefault(share.kind if tasks(facts) > 1 else 0, []).append((abs(share.each or 0.0), share))
    found = [(max(every, key=itemgetter(0)), min(every, key=itemgetter(0))) for every in by.values()]
    apart = [(most, least) for most, least in found if most[0] > 1.01 * least[0]]
    if facts.miscounted:
        yield Hit("loss", f"{facts.miscounted}.", _COUNTS)
    unknown = any(share.each is None for share in facts.shares)
    if unknown or not apart or weights_by_rank(facts) or weighted_by_samples(facts):
        return
    most, least = apart[0]
    places = [f"micro-batch {one.micro} of rank {one.rank}" for _, one in (most, least)]
    ratio = most[0] / least[0] if least[0] > 0 else float("inf")
    alike = len({share.count for share in facts.shares}) == 1
    fix = "Give every loss of a step the same factor; override, where one is meant to weigh more." if alike else ""
    yield Hit("loss", f"A sample, or token that counts, in {places[0]} weighs {ratio:.2f} x one in {places[1]}.", fix)


def weights_by_rank(facts: ProofFacts) -> dict[int, float] | None:
    """The weight of an element in the losses of each rank, where it is each rank's own and nothing counts elements."""
    counted = {share.count for share in facts.shares}
    if len(counted) != 1 or None in counted:
        return None
    found: dict[int, float] = {}
    for share in facts.shares:
        weight = abs(share.each or 0.0)
        if abs(found.setdefault(share.rank, weight) - weight) > 0.01 * weight:
            return None
    return found if found and max(found.values()) > 1.01 * min(found.values()) else None


def added_up(facts: ProofFacts) -> Iterator[str]:
    """Yield sums of losses that nobody has divided, where they may be micro-batches as well as tasks."""
    number = max(counts(facts).values(), default=1)
    if kinds(facts) > 2 and facts.accumulation is None and all(near(one.weight, number) for one in facts.shares):
        said = f"{number} backwards of losses that are made otherwise were added up"
        yield f"{said}: taken for those of several tasks, which are meant to be a sum; micro-batches are averaged"
    most = max(facts.shares, key=lambda one: one.added, default=None)
    if most is not None and most.added > 2 and near(most.weight, kinds(facts)):
        said = f"A loss is the sum of {most.added} losses, each of other samples by the same function"
        yield f"{said}: taken as meant; micro-batches are averaged, sum(losses) / {most.added}"


def made_otherwise(facts: ProofFacts) -> tuple[LossShare, LossShare] | None:
    """Losses of two ranks, each of which always has operators of its own."""
    by: dict[int, set[str]] = {}
    for share in facts.shares:
        by.setdefault(share.rank, set()).add(share.operators)
    first = next(iter(facts.shares), None)
    if first is None or any(len(each) > 1 for each in by.values()):
        return None
    return next(((first, other) for other in facts.shares if other.operators != first.operators), None)


def only_in(one: LossShare, other: LossShare) -> str:
    """Operators that have made the one loss alone, as ``Mul, NllLoss x 2``; empty: none."""
    theirs = other.operators.split(", ")
    return re.sub(r"Backward\d*", "", ", ".join(name for name in one.operators.split(", ") if name not in theirs))


def cut_off(facts: ProofFacts) -> Iterator[Hit]:
    """What the forward computes with, and what no gradient comes to."""
    told, quiet = cut(facts), cut(facts).keys() - warned(facts).keys()
    if still := [name for name in told if name in quiet]:
        said = (
            f"The forward computes with {some(still)} under {told[still[0]]}: no gradient comes to them, and the step"
        )
        yield Hit("proof", f"{said} leaves them as they are, as that of plain torch does.", _STILL)
    if off := [name for name in facts.cut_off if name not in told]:
        them = "it" if len(off) == 1 else "them"
        said = f"The forward computes with {some(off)}, and no gradient comes to {them}, also in the replay"
        yield Hit("proof", f"{said}: nothing trains {them}.", _CUT_OFF)


def outputs(facts: ProofFacts) -> Iterator[Hit]:
    """What the loop gets that the model does not return."""
    if facts.outputs and not weights_by_rank(facts):  # which it tells
        others = f" (and {count(len(facts.outputs) - 1, 'other')})" if len(facts.outputs) > 1 else ""
        untold = ". Gradients were not compared" if facts.unrepeated else ""
        yield Hit("outputs", f"What the loop gets is not what the model returns: {facts.outputs[0]}{others}{untold}.")


def slopes(facts: ProofFacts) -> Iterator[Hit]:
    """What gradients are, where all ranks have measured what they should be.

    One along which the loss does not change at all may stand for another, as of a rounding, and is told beside others.
    """
    found: dict[str, list[str]] = {}
    if scaled := _scaled(facts):
        said = f"All gradients are scaled by what the program does with them behind the backward: {scaled}"
        yield Hit("gradients", f"{said}, of what the average of all ranks' losses changes by.", _CLIP_ALL)
        return
    wrong = [one for one in facts.slopes if not (_adds_up(facts) and _is_whole(one, facts.world))]
    for one in wrong if any(one.ratios for one in wrong) else ():
        found.setdefault(_sloped(one, facts.world), []).append(_whose(one))
    for why, names in found.items():
        whose = "All gradients are" if len(names) == facts.measured else f"Gradients of {_parameters(names)} are"
        yield Hit(at(names[0].partition(" ")[0]), f"{whose} {why}: {some(names)}.")


def _scaled(facts: ProofFacts) -> str:
    """Return by what each rank has scaled all that it steps; empty: by nothing, or by the number of ranks."""
    by: dict[int, list[float]] = {}
    for one in facts.slopes if len(facts.slopes) == facts.measured else ():
        for rank, ratio in zip(one.ranks, one.ratios, strict=False):
            by.setdefault(rank, []).append(0.0 if one.turned else ratio)
    each = {rank: several[0] for rank, several in sorted(by.items())}
    one_each = all(near(ratio, each[rank]) for rank, several in by.items() for ratio in several)
    numbers = (0.0, 1 / facts.world, 1.0, facts.world)
    if not each or not one_each or any(all(near(ratio, number) for ratio in each.values()) for number in numbers):
        return ""
    return ", ".join(f"{ratio:.3g} x on rank {rank}" for rank, ratio in each.items())


def _adds_up(facts: ProofFacts) -> bool:
    """Return whether each rank's loss is its part of one, so that gradients are added up and divided by no ranks."""
    weights = [share.weight for share in facts.shares]
    parts = bool(weights) and near(sum(weights) / len(weights), 1 / facts.world)
    unknown = any(share.given or (share.total and share.count is None) for share in facts.shares)
    return len(facts.slopes) == facts.measured and (parts or unknown)


def _is_whole(one: Slope, world: int) -> bool:
    return bool(one.ratios) and not one.turned and all(near(ratio, world) for ratio in one.ratios)


def _parameters(names: list[str]) -> str:
    return count(len({name.partition(" ")[0] for name in names}), "parameter")


def _whose(one: Slope) -> str:
    """Return the parameter, with the rank whose own it is."""
    return f"{one.name} of rank {one.ranks[0]}" if len(one.ranks) == 1 else one.name


def _sloped(one: Slope, world: int) -> str:
    """Return what a gradient is."""
    should = "what the average of all ranks' losses changes by"
    if one.ratios and not any(one.ratios):
        return f"zero, and {should} is not: what crosses to other ranks brings nothing back"
    if one.averaged:
        return "alike on all ranks, each of which holds weights of its own there: a wrapper has averaged them"
    if one.ratios and max(one.ratios) - min(one.ratios) > NEAR * max(map(abs, one.ratios)):
        return f"other on each rank, and all hold the same weights: nobody averages them over the {world} ranks"
    for number, why in ((world, "added up over the ranks once too often"), (1 / world, OF_OTHERS)):
        if one.ratios and not one.turned and near(one.ratios[0], number):
            return f"{number:g} x {should}: {why}"
    return f"not {should}: a part that crosses to other ranks does not come back, or is changed on its way"


def handed_back(facts: ProofFacts) -> Iterator[Hit]:
    """What stages have gone backward with."""
    for rank in dict.fromkeys(one.rank for one in facts.handed_back):
        found = [one for one in facts.handed_back if one.rank == rank]
        first = found[0]
        made = f"what rank {first.to} has made of its call {first.of}" if first.of is not None else "something else"
        said = (
            f"What rank {rank} had sent from its call {first.call}, rank {first.to} has taken in its call {first.got}"
        )
        more = f" ({len(found)} calls are so)" if len(found) > 1 else ""
        yield Hit("gradients", f"{said}, and rank {rank} goes backward over it with {made}{more}.")
