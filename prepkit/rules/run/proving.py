"""What a window of training has done otherwise than plain torch does it, and why: read off its proof.

Every cause is a sum of shares with factors of its own (all of them over the ranks: summed; one rank's: never averaged).
The first cause whose sum lies as near to what was recorded as rounding allows is told. How near that is, was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from math import isclose, sqrt

from attrs import frozen

from prepkit.facts.proof import GradientProof, ProofFacts, StepProof
from prepkit.findings import Severity
from prepkit.findings.text import at, count, some, spans
from prepkit.rules.rule import Hit, Moment, Rule

NEAR = 0.03
"""By which part a ratio may be off the number that explains it."""
MARGIN = 8.0
"""How much further than two replays from each other a right run may lie: it sums in another order, and may reduce in a
lower dtype."""

Vector = tuple[float, ...]


@frozen
class Cause:
    """Why a gradient is not what it should be."""

    rule: str
    why: str
    ratio: float = 1.0
    rank: int | None = None
    """Whose alone it is; None: not one rank's."""


# --- what the shares should add up to ---------------------------------------------------------------------------------


def counts(facts: ProofFacts) -> dict[int, int]:
    """Micro-batches of each rank."""
    found = dict.fromkeys(range(facts.world), 0)
    for share in facts.shares:
        found[share.rank] += 1
    return found


def _mean(facts: ProofFacts) -> Vector:
    """The average by definition: over the micro-batches of a rank, and over the ranks."""
    number = counts(facts)
    return tuple(1 / (facts.world * number[share.rank]) for share in facts.shares)


def _micros(facts: ProofFacts) -> int:
    return max(counts(facts).values(), default=1)


def _common_weight(facts: ProofFacts) -> float | None:
    """The factor that all losses carry; None: they carry different ones."""
    weights = [share.weight for share in facts.shares]
    return weights[0] if all(isclose(one, weights[0], rel_tol=1e-3) for one in weights) else None


def _weighed(facts: ProofFacts) -> Cause | None:
    """What is wrong with the factor of the losses, if it is one of this run's own numbers; else it is meant."""
    weight, micros, world = _common_weight(facts), _micros(facts), facts.world
    if weight is None or _near(weight, 1.0):
        return None
    known = facts.accumulation is not None
    if micros > 1 and _near(weight, micros):
        why = f"the loss is not divided by the {micros} micro-batches of a step"
        return Cause("prove.accumulation", why, weight) if known or micros > 2 else None
    if micros > 1 and _near(weight, 1 / micros):
        return Cause("prove.accumulation", f"the loss is divided twice by the accumulation ({micros})", weight)
    if known and facts.accumulation != micros and _near(weight * (facts.accumulation or 1), micros):
        why = f"the loss is divided by {facts.accumulation}, and a step has {count(micros, 'micro-batch')}"
        return Cause("prove.accumulation", why.replace("batchs", "batches"), weight)
    if world > 1 and _near(weight, 1 / world):
        return Cause(
            "prove.averaged-twice", f"the loss is divided by the {world} ranks, whose average is taken too", weight
        )
    if world > 1 and _near(weight, world):
        return Cause("prove.summed", f"the loss is multiplied by the {world} ranks, and gradients are averaged", weight)
    return None


def _clipping(facts: ProofFacts, aim: Vector) -> float:
    """By how much a clipping shrinks the gradients."""
    clip = facts.clip
    if clip is None:
        return 1.0
    norm = clip.seen if clip.seen is not None else _norm(facts, aim)
    return min(1.0, clip.most / (norm + 1e-6))


def _norm(facts: ProofFacts, sums: Vector) -> float:
    """Of all gradients together, if they are these sums of shares."""
    return sqrt(sum(_square(one.gram, sums) for one in facts.gradients))


# --- one gradient -----------------------------------------------------------------------------------------------------


def _square(gram: Sequence[Vector], sums: Vector) -> float:
    return max(
        sum(a * b * value for a, row in zip(sums, gram, strict=True) for b, value in zip(sums, row, strict=True)), 0.0
    )


def _distance(one: GradientProof, copy: int, sums: Vector) -> float:
    """Norm of what was recorded less a sum of shares."""
    cross = sum(a * dot for a, dot in zip(sums, one.dots[copy], strict=True))
    return sqrt(max(one.squares[copy] - 2 * cross + _square(one.gram, sums), 0.0))


def _fitted(one: GradientProof, copy: int, sums: Vector) -> float:
    """The factor with which the sum is nearest to what was recorded."""
    square = _square(one.gram, sums)
    return sum(a * dot for a, dot in zip(sums, one.dots[copy], strict=True)) / square if square else 0.0


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= NEAR * abs(other)


@frozen
class _Aim:
    """What every gradient should be, and how far off it may be."""

    facts: ProofFacts
    sums: Vector
    clipping: float
    scale: float
    """Norm of a typical element, in the root of the square."""

    def allowed(self, one: GradientProof) -> float:
        """How far from the sum a right gradient may lie."""
        typical = self.scale * sqrt(one.numel)
        rounding = self.facts.eps * (sqrt(_square(one.gram, self.sums)) + 0.25 * self.clipping * typical)
        return MARGIN * (self.clipping * one.noise + rounding)

    def cause(self, one: GradientProof, copy: int) -> Cause | None:
        """Why one replica of a gradient is not what it should be; None: it is, or nobody can tell."""
        allowed, size = self.allowed(one), sqrt(_square(one.gram, self.sums))
        if _distance(one, copy, self.sums) <= allowed:
            return None
        share = max(sqrt(one.gram[i][i]) for i in range(len(one.gram))) if one.gram else 0.0
        if max(size, share) < 3 * allowed and sqrt(one.squares[copy]) < 10 * allowed:
            return None  # there is nothing but rounding
        relative = allowed / size if size else 1.0
        ratio = _fitted(one, copy, self.sums)
        if ratio > 0 and _distance(one, copy, tuple(ratio * a for a in self.sums)) <= ratio * size * relative:
            return _of_ratio(self.facts, ratio, self.clipping, copy)
        for cause, sums in _parts(self.facts, self.sums, one.holders[copy]):
            ratio, length = _fitted(one, copy, sums), sqrt(_square(one.gram, sums))
            if ratio > 0 and _distance(one, copy, tuple(ratio * a for a in sums)) <= ratio * max(
                length * relative, allowed
            ):
                return Cause(cause.rule, cause.why, 1.0 if _near(ratio, 1.0) else ratio, cause.rank)
        square = one.squares[copy] * _square(one.gram, self.sums)
        cosine = sum(a * d for a, d in zip(self.sums, one.dots[copy], strict=True)) / sqrt(square) if square else 0.0
        return Cause("prove.direction", f"no sum of the micro-batches' gradients (cosine {cosine:.2f})")


def _of_ratio(facts: ProofFacts, ratio: float, clipping: float, copy: int) -> Cause:
    """The number of this run that explains a ratio."""
    del copy
    weighed = _weighed(facts)
    rest = ratio / weighed.ratio if weighed is not None else ratio
    if weighed is not None and _near(rest, 1.0):
        return Cause(weighed.rule, weighed.why, ratio)
    also = f", and {weighed.why}" if weighed is not None else ""
    world, micros, scale = facts.world, _micros(facts), facts.scale
    or_micros = f" (or multiplied by the {micros} micro-batches)" if micros == world else ""
    table: tuple[tuple[bool, float, str, str], ...] = (
        (clipping < 1, 1 / clipping, "prove.not-clipped", "never clipped"),
        (scale > 1, scale, "prove.scaled", f"stepped while they are scaled by {scale:g}: never unscaled"),
        (scale > 1, 1 / scale, "prove.scaled", f"unscaled twice, by {scale:g}"),
        (world > 1, world, "prove.summed", f"summed over the {world} ranks, not averaged{or_micros}"),
        (world > 1, 1 / world, "prove.averaged-twice", f"averaged twice over the {world} ranks"),
        (micros > 1, micros, "prove.accumulation", f"not divided by the {micros} micro-batches of a step"),
        (micros > 1, 1 / micros, "prove.accumulation", f"divided once more by the {micros} micro-batches of a step"),
    )
    for asked, number, rule, why in table:
        if asked and _near(rest, number):
            return Cause(rule, why + also, ratio)
    return Cause("prove.ratio", f"which no number of this run explains{also}", ratio)


def _parts(facts: ProofFacts, sums: Vector, holder: int) -> Iterator[tuple[Cause, Vector]]:
    """Causes that leave something out, each with the sum of shares that it makes."""
    world, micros = facts.world, _micros(facts)
    for rank in range(world) if world > 1 else ():
        yield Cause("prove.not-averaged", "", rank=rank), _only(facts, sums, {rank})
    for group in _groups(world, holder):
        why = f"averaged over {'ranks'} {spans(group)} alone, {len(group)} of {world}"
        yield Cause("prove.part-of-ranks", why), _only(facts, sums, set(group))
    if micros > 1:
        last = micros - 1
        for by, rule, why in (
            (world, "prove.summed", f"summed over the {world} ranks at each micro-batch"),
            (1 / world, "prove.averaged-twice", f"averaged twice over the {world} ranks at each micro-batch"),
        ):
            again = tuple(a * by ** (micros - share.micro) for a, share in zip(sums, facts.shares, strict=True))
            if world > 1:
                yield Cause(rule, f"{why}, what was reduced before among it"), again
        for kept, why in (
            ({last}, "of the last micro-batch alone"),
            ({0}, "of the first micro-batch alone"),
            (set(range(last)), "without the last micro-batch"),
            (set(range(1, micros)), "without the first micro-batch"),
        ):
            if len(kept) < micros:
                yield Cause("prove.micro-batch", why), _of_micros(facts, sums, kept)
        if world > 1:
            own = tuple(
                a * world * (share.rank == holder) if share.micro < last else a
                for a, share in zip(sums, facts.shares, strict=True)
            )
            why = "averaged over the last micro-batch, and each rank's own over those before"
            yield Cause("prove.not-averaged", why), own


def _groups(world: int, holder: int) -> Iterator[tuple[int, ...]]:
    """Groups of ranks, next to each other or in steps, among which a mesh may have averaged."""
    for size in range(2, world):
        if world % size == 0:
            first = holder - holder % size
            yield tuple(range(first, first + size))
            yield tuple(range(holder % (world // size), world, world // size))


def _only(facts: ProofFacts, sums: Vector, ranks: set[int]) -> Vector:
    more = facts.world / len(ranks)
    return tuple(a * more if share.rank in ranks else 0.0 for a, share in zip(sums, facts.shares, strict=True))


def _of_micros(facts: ProofFacts, sums: Vector, kept: set[int]) -> Vector:
    return tuple(a if share.micro in kept else 0.0 for a, share in zip(sums, facts.shares, strict=True))


# --- all of them ------------------------------------------------------------------------------------------------------


def _aim(facts: ProofFacts) -> _Aim:
    mean = _mean(facts)
    if _weighed(facts) is None:  # what is no number of this run is the loss's own
        mean = tuple(a * share.weight for a, share in zip(mean, facts.shares, strict=True))
    clipping = _clipping(facts, mean)
    sums = tuple(clipping * a for a in mean)
    numel = sum(one.numel for one in facts.gradients)
    return _Aim(facts, sums, clipping, _norm(facts, mean) / sqrt(numel) if numel else 0.0)


@lru_cache(maxsize=8)
def causes(facts: ProofFacts) -> tuple[tuple[Cause, tuple[str, ...]], ...]:
    """Every cause with the parameters that it explains, in the order of the parameters. Pure."""
    if facts.first_apart or not facts.shares or len(set(counts(facts).values())) > 1:
        return ()  # what stands before explains it
    aim, found = _aim(facts), dict[tuple[str, str], tuple[list[float], list[str]]]()
    for one in facts.gradients:
        each = [aim.cause(one, copy) for copy in range(len(one.dots))]
        if not one.dots and sqrt(_square(one.gram, aim.sums)) > 3 * aim.allowed(one):
            each = [Cause("prove.no-gradient", "")]
        for cause in dict.fromkeys(_merged(one, each)):
            ratios, names = found.setdefault((cause.rule, cause.why), ([], []))
            ratios.append(cause.ratio)
            names.append(one.name)
    return tuple(
        (Cause(rule, why, sorted(ratios)[len(ratios) // 2]), tuple(dict.fromkeys(names)))
        for (rule, why), (ratios, names) in found.items()
    )


def _merged(one: GradientProof, each: list[Cause | None]) -> list[Cause]:
    """The causes of all replicas of one parameter, those of one rank's alone in one word."""
    there = [cause for cause in each if cause is not None]
    alone = [
        (cause, holder) for cause, holder in zip(each, one.holders, strict=False) if cause and cause.rank is not None
    ]
    if not alone:
        return there
    owners = {cause.rank for cause, _ in alone}
    if len(one.dots) > 1 and all(cause.rank == holder for cause, holder in alone):
        why = "each rank's own: nobody averages them"
    else:
        why = f"those of rank {' and '.join(str(owner) for owner in sorted(o for o in owners if o is not None))} alone"
    ratio = alone[0][0].ratio
    rest = [cause for cause in there if cause.rank is None]
    return [Cause("prove.not-averaged", why, ratio), *rest]


def _gradients(rule: str, facts: ProofFacts) -> Iterator[Hit]:
    for cause, names in causes(facts):
        if cause.rule == rule:
            who = "All gradients are" if len(names) == len(facts.gradients) else f"{_those(names, facts)} are"
            ratio = "" if _near(cause.ratio, 1.0) else f"{cause.ratio:.3f} x what they should be"
            said = ": ".join(part for part in (ratio, cause.why) if part)
            yield Hit("gradients" if who.startswith("All") else at(names[0]), f"{who} {said}.")


def _those(names: tuple[str, ...], facts: ProofFacts) -> str:
    """Gradients by the module that they all lie in, or by some of their names."""
    every = [one.name for one in facts.gradients]
    parts = names[0].split(".")[:-1]
    for depth in range(len(parts), 0, -1):
        begin = ".".join(parts[:depth]) + "."
        if [name for name in every if name.startswith(begin)] == list(names):
            return f"The gradients of `{begin[:-1]}`"
    return f"The gradients of {len(names)} of {len(every)} parameters ({some(names)})"


def _no_gradient(facts: ProofFacts) -> Iterator[Hit]:
    for cause, names in causes(facts):
        if cause.rule == "prove.no-gradient":
            said = f"{count(len(names), 'parameter')} had no gradient when the optimizer stepped"
            what = f"{said}, and should have: {some(names)}."
            yield Hit(at(names[0]), what)


def _clipped(facts: ProofFacts) -> Iterator[Hit]:
    clip = facts.clip
    if clip is None or clip.seen is None or facts.first_apart or not facts.gradients or not facts.shares:
        return
    norm = _norm(facts, tuple(a / _aim(facts).clipping for a in _aim(facts).sums))
    off = clip.seen / norm if norm else 1.0
    if facts.scale > 1 and _near(off, facts.scale):
        what = (
            f"Gradients were clipped to {clip.most:g} while they were scaled by {facts.scale:g}: their norm seemed to "
            f"be {clip.seen:.4g}, and is {norm:.4g}."
        )
        yield Hit("gradients", what)
    elif abs(off - 1) > 0.1 and not causes(facts):
        yield Hit("gradients", f"Gradients were clipped by a norm of {clip.seen:.4g}, and their norm is {norm:.4g}.")


# --- before and after -------------------------------------------------------------------------------------------------


def _first(facts: ProofFacts) -> Iterator[Hit]:
    yield from _ranks_apart(facts.first_apart, "has other first weights than rank 0")


def _after(facts: ProofFacts) -> Iterator[Hit]:
    if not (facts.first_apart or causes(facts) or facts.options_apart or list(_uneven(facts))):
        yield from _ranks_apart(
            facts.after_apart, "has other weights than rank 0 after the step, over the same gradients"
        )


def _ranks_apart(apart: tuple[tuple[str, tuple[int, ...]], ...], what: str) -> Iterator[Hit]:
    ranks = sorted({rank for _, found in apart for rank in found})
    for rank in ranks:
        names = [name for name, found in apart if rank in found]
        yield Hit(at(names[0]), f"Rank {rank} {what}: {count(len(names), 'parameter')}, {some(names)}.")


def _uneven(facts: ProofFacts) -> Iterator[Hit]:
    number = counts(facts)
    if len(set(number.values())) > 1:
        said = ", ".join(f"{most} on rank {rank}" for rank, most in number.items())
        yield Hit("loop", f"The ranks went backward over different numbers of micro-batches before the step: {said}.")


def _options(facts: ProofFacts) -> Iterator[Hit]:
    if facts.options_apart:
        yield Hit("optimizer", f"Ranks step with different options: {'; '.join(facts.options_apart[:3])}.")


def _samples(facts: ProofFacts) -> Iterator[Hit]:
    if facts.same_samples:
        yield Hit(
            "loaders", f"All {facts.world} ranks have read the same samples: their average is what one of them has."
        )


def _not_held(facts: ProofFacts) -> Iterator[Hit]:
    if names := [one.name for one in facts.steps if not one.held]:
        yield Hit(
            at(names[0]), f"The optimizer did not step {count(len(names), 'parameter')} that train: {some(names)}."
        )
    still = [one.name for one in facts.steps if one.held and one.moved == 0 and one.expected > _step_allowed(one) ** 2]
    if still:
        what = f"The optimizer holds {count(len(still), 'parameter')} that its step has not changed: {some(still)}."
        yield Hit(
            at(still[0]), what, "Look at what stands between the optimizer and the model: a skipped or a patched step."
        )


def _step_allowed(one: StepProof) -> float:
    return MARGIN * one.noise + 1e-4 * sqrt(one.expected)


def _step_size(facts: ProofFacts) -> Iterator[Hit]:
    found: dict[str, list[str]] = {}
    for one in facts.steps:
        off = sqrt(max(one.moved - 2 * one.along + one.expected, 0.0))
        if one.held and one.moved and off > _step_allowed(one):
            ratio = one.along / one.expected if one.expected else float("inf")
            length = sqrt(one.moved * one.expected)
            turned = length and one.along / length < 0.99
            said = "another direction" if turned else f"{ratio:.3f} x"
            found.setdefault(said, []).append(one.name)
    for said, names in found.items():
        how = "in another direction than" if said == "another direction" else f"by {said} of what"
        what = f"{count(len(names), 'parameter')} moved {how} the optimizer's options and these gradients give"
        yield Hit(at(names[0]), f"{what}: {some(names)}.")


def _limits(facts: ProofFacts) -> Iterator[Hit]:
    for limit in facts.limits:
        yield Hit("proof", f"{limit}.")
    noise = sqrt(sum(one.noise**2 for one in facts.gradients))
    if facts.gradients and facts.shares and noise > 0.1 * _norm(facts, _mean(facts)):
        yield Hit(
            "proof",
            f"Rounding in {facts.dtype} alone changes the gradients by more than a tenth: small errors cannot be seen.",
        )


def _unproven(facts: ProofFacts) -> Iterator[Hit]:
    if facts.unproven:
        yield Hit("proof", f"{facts.unproven}.")


def _row(
    rule: str, summary: str, fix: str, check: Callable[[ProofFacts], Iterator[Hit]] | None = None, **more: Severity
) -> Rule:
    return Rule(
        id=rule,
        summary=summary,
        check=check or partial(_gradients, rule),
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
        "prove.first-weights",
        "Every rank begins with the same weights.",
        "Call torch.manual_seed with one number on all ranks before the model is made, or send rank 0's weights.",
        _first,
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
        _clipped,
    ),
    _row(
        "prove.not-clipped",
        "Gradients are clipped where the run says so.",
        "Call the clipping of the library that prepared the model, after the last backward and before the step.",
    ),
    _row(
        "prove.not-averaged",
        "Every gradient is the average of all ranks.",
        "Put what trains inside the wrapper, and leave no_sync() before the last backward of a step.",
    ),
    _row(
        "prove.part-of-ranks",
        "Gradients are averaged over all ranks that read other samples, and not over some.",
        "Give the wrapper a mesh or a group of all ranks that read other samples.",
    ),
    _row(
        "prove.micro-batch",
        "Every micro-batch of a step counts in its gradients.",
        "Clear gradients after the step alone, and step after the last micro-batch.",
    ),
    _row(
        "prove.ratio",
        "Gradients have the size that plain torch gives them.",
        "Look for a factor at the loss, in a hook, or in what averages; the ratio is the factor.",
    ),
    _row(
        "prove.direction",
        "Gradients are a sum of those of the micro-batches.",
        "Look at what changes weights, buffers or gradients between forward and step, and at layers that ranks share.",
    ),
    _row(
        "prove.no-gradient",
        "What takes part in the loss has a gradient.",
        "Look for a .detach() or no_grad() on the way, requires_grad, and zero_grad() after the backward.",
        _no_gradient,
    ),
    _row(
        "prove.options",
        "Ranks step with the same options.",
        "Make the optimizer and its scheduler alike on every rank; set no learning rate by rank.",
        _options,
    ),
    _row(
        "prove.not-stepped",
        "The optimizer steps everything that trains.",
        "Make the optimizer after the model is wrapped, from all parameters that train.",
        _not_held,
    ),
    _row(
        "prove.step-size",
        "Weights move as the optimizer's options say.",
        "Look for hooks of the optimizer, weights that are written after the step, and groups that lost their options.",
        _step_size,
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
        "Nothing: the rest was compared.",
        _limits,
        severity=Severity.NOTE,
    ),
)
"""Reporting order: what ranks begin with, what they read, gradients by their cause, then the step."""
