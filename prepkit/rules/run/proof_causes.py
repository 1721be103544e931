"""Why gradients are not what plain torch makes of the same window: read off inner products alone.

Every cause is a sum of shares with factors of its own (all of them over the ranks: summed; one rank's: never averaged).
The first cause whose sum lies as near to what was recorded as rounding allows is told. How near that is, was measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from math import prod, sqrt

from attrs import evolve, frozen

from prepkit.facts.proof import (
    GradientProof,
    ProofFacts,
    Vector,
    along_weight,
    by_rank,
    by_samples,
    common_weight,
    counts,
    distance,
    divided,
    fitted,
    kinds,
    mean,
    mesh_groups,
    near,
    norm,
    of_micros,
    on_one_line,
    only,
    replicas_apart,
    square_of,
    written_norm,
)
from prepkit.findings.text import count, spans

MARGIN = 8.0
"""How much further than two replays from each other a right run may lie, which sums in another order or lower dtype."""
MOST_MEANT = 8
"""Factors of a loss's own that are looked at."""
NOTHING = 1e-6
"""Of what a gradient should be, so much is none."""
LEAST = 2
"""From which weight of a loss on it may be a scale."""
OF_ITS_PART = "scaled by each rank by a number of its own, as by the norm of the part that it holds"
NONE_OF = "no gradient of rank "
UNLIKE = "a sum in which a rank's part has another weight: "
OWN = "each rank's own: nobody averages them"
AT_EACH = " at each micro-batch"
BY_EACH_RANK = "clipped by each rank before they were averaged"
SUMS = ("prove.not-averaged", "prove.past-wrapper", "prove.part-of-ranks", "prove.micro-batch", "prove.direction")
"""Causes that make a gradient no multiple of what it should be."""
NO_NUMBER = "which no number of this run explains"
WHILE_SCALED = "clipped while they were scaled"
BY_THE_RANKS = "sums divided by the samples of all ranks, whose average is taken too"
OTHER_ON_EACH = "as they should be behind the backward, and the program has changed them since, other on each rank"


@frozen
class Cause:
    """Why a gradient is not what it should be."""

    rule: str
    why: str
    ratio: float = 1.0
    rank: int | None = None
    """Whose alone it is; None: not one rank's."""
    cosine: float = 1.0
    """Of the angle to what it should be."""
    off: float = 0.0
    """How far from that it is, over its norm."""
    group: tuple[int, ...] = ()
    """The ranks over which it was averaged, where they are not all."""


# --- what the shares should add up to ---------------------------------------------------------------------------------


def _own(facts: ProofFacts) -> Iterator[float]:
    """Weights that are right: 1, and those that the loss's own factors make, as of half a square."""
    each = {share.meant for share in facts.shares}
    meant = each.pop()[:MOST_MEANT] if len(each) == 1 else ()
    yield from (prod(some) for number in range(len(meant) + 1) for some in combinations(meant, number))


def _weighed(facts: ProofFacts) -> Cause | None:
    """What is wrong with the factor of the losses, if it is one of this run's own numbers; else it is meant."""
    weight, micros, world = common_weight(facts), divided(facts), facts.world
    if weight is None or facts.wasted or any(near(weight, by * own) for own in _own(facts) for by in {1, kinds(facts)}):
        return None  # where some were cleared, that explains the number
    known, weight = facts.accumulation is not None, weight / kinds(facts)
    if micros > 1 and near(weight, micros):
        or_ranks = f", or is multiplied by the {world} ranks" if micros == world else ""
        why = f"the loss is not divided by the {micros} micro-batches of a step{or_ranks}"
        return Cause("prove.accumulation", why, weight) if known or micros > 2 else None
    if micros > 1 and near(weight, 1 / micros):
        once = "" if known else f", or once by {micros**2}"
        twice = f"twice by the accumulation ({micros})"
        if micros == world and all(share.total for share in facts.shares):
            alike = len({share.count for share in facts.shares}) == 1
            return Cause("prove.averaged-twice", BY_THE_RANKS + f", or {twice}" * alike, weight)
        by_ranks = f", or by the {world} ranks, whose average is taken too" if micros == world else ""
        return Cause("prove.accumulation", f"the loss is divided {twice}{once}{by_ranks}", weight)
    if known and facts.accumulation != micros and near(weight * (facts.accumulation or 1), micros):
        why = f"the loss is divided by {facts.accumulation}, and a step has {count(micros, 'micro-batch')}"
        return Cause("prove.accumulation", why.replace("batchs", "batches"), weight)
    if world > 1 and near(weight, 1 / world):
        sums = all(share.total for share in facts.shares)
        why = BY_THE_RANKS if sums else f"the loss is divided by the {world} ranks, whose average is taken too"
        return Cause("prove.averaged-twice", why, weight)
    if world > 1 and near(weight, world):
        return Cause("prove.summed", f"the loss is multiplied by the {world} ranks, and gradients are averaged", weight)
    return None


def _clipping(facts: ProofFacts, aim: Vector) -> float:
    """By how much a clipping shrinks the gradients."""
    clip = facts.clip
    if clip is None or clip.empty or clip.late or clip.parts:
        return 1.0
    weighed = _weighed(facts)
    length = clip.seen if clip.seen is not None else norm(facts, aim) * (weighed.ratio if weighed else 1.0)
    return max(min(1.0, clip.most / (length + 1e-6)), NOTHING**5)  # by nothing it is divided


@lru_cache(maxsize=8)
def scaled_by_hand(facts: ProofFacts) -> float:
    """A number by which the program has multiplied its losses and divided their gradients again; 1: there is none."""
    weight = common_weight(facts)
    if weight is None or weight < LEAST or _weighed(facts) is not None:
        return 1.0
    sums = tuple(weight * a for a in mean(facts))
    square = sum(square_of(one.gram, sums) for one in facts.gradients if one.dots)
    cross = sum(a * dot for one in facts.gradients for a, dot in zip(sums, (one.dots or ((),))[0], strict=False))
    unscaled = bool(square) and near(cross / square * weight, _clipping(facts, sums))
    return weight if unscaled else 1.0


@frozen
class _Aim:
    """What every gradient should be, and how far off it may be."""

    facts: ProofFacts
    sums: Vector
    clipping: float
    scale: float
    """Norm of a typical element, in the root of the square."""

    def _by(self, holder: int) -> Vector:
        """The sums as this rank has clipped them, by the norm that it has seen itself."""
        each, clip = self.facts.shrunk, self.facts.clip
        as_one = clip is not None and not clip.parts and holder < len(each)
        by = each[holder] / each[0] if as_one and each[0] else 1.0
        return tuple(by * a for a in self.sums)

    def allowed(self, one: GradientProof) -> float:
        """Return how far from the sum a right gradient may lie."""
        typical = self.clipping * self.scale * sqrt(one.numel)
        rounding = self.facts.eps * (sqrt(square_of(one.gram, self.sums)) + 0.25 * typical)
        return MARGIN * (self.clipping * one.noise + rounding)

    def cause(self, one: GradientProof, copy: int) -> Cause | None:
        """Why one replica of a gradient is not what it should be; None: it is, or nobody can tell."""
        sums = self._by(one.holders[copy]) if len(one.dots) > 1 else self.sums
        allowed, size = self.allowed(one), sqrt(square_of(one.gram, sums))
        if distance(one, copy, sums) <= allowed or distance(one, copy, by_samples(self.facts, sums)) <= allowed:
            return None
        share = max(sqrt(one.gram[i][i]) for i in range(len(one.gram))) if one.gram else 0.0
        if max(size, share) < 3 * allowed and sqrt(one.squares[copy]) < 10 * allowed:
            return None  # there is nothing but rounding
        relative = allowed / size if size else 1.0
        if one.squares[copy] <= (NOTHING * size) ** 2:
            return Cause("prove.no-gradient", "zeros")
        ratio = fitted(one, copy, sums)
        if ratio > 0 and distance(one, copy, tuple(ratio * a for a in sums)) <= ratio * size * relative:
            parts = self.facts.clip is not None and self.facts.clip.parts
            if all(share.given for share in self.facts.shares) and near(ratio * divided(self.facts), 1.0):
                return None  # a stage that divides what it is given by the micro-batches
            if (parts and ratio < 1) or (near(ratio * _whole(self.facts), 1.0) and self.all_weigh_one()):
                return None
            found = _of_ratio(self.facts, ratio, self.clipping)
            return None if self._is_meant(found, one, ratio) else found
        plain = tuple(a / self.clipping for a in sums)
        for cause, other in (
            *_clipped_apart(self.facts, plain),
            *_parts(self.facts, sums, one.holders[copy]),
        ):
            ratio, length = fitted(one, copy, other), sqrt(square_of(one.gram, other))
            if cause.why.startswith(NONE_OF) and (not near(ratio, 1.0) or replicas_apart(one)):
                continue  # as it is behind a true average alone
            most = ratio * max(length * relative, allowed)
            if ratio > 0 and distance(one, copy, tuple(ratio * a for a in other)) <= most:
                return evolve(cause, ratio=1.0 if near(ratio, 1.0) else ratio)
        if one.parts and copy == 0 and (scaled := self.scaled_apart((one,), turned=True)):
            return scaled
        if (by := along_weight(one, copy, sums, allowed)) is not None:
            return Cause("prove.decay", f"{by / self.clipping:.2g} x the weights")
        return None if one.name in (*self.facts.outside, *self.facts.unreached) else self._turned(one, copy, sums)

    def _is_meant(self, found: Cause, one: GradientProof, ratio: float) -> bool:
        """Whether it is a limit: a loss over the weight, sums divided by what nobody knows, a norm of its own."""
        beside = found.rule == "prove.ratio" and one.name in self.facts.outside
        alike = found.why.startswith(NO_NUMBER) and self.all_by(ratio)
        return beside or (alike and (all(share.total for share in self.facts.shares) or self.cut_to() is not None))

    def _turned(self, one: GradientProof, copy: int, sums: Vector) -> Cause | None:
        """Of a gradient in another direction; None: that is told as a limit."""
        square, size = one.squares[copy] * square_of(one.gram, sums), sqrt(square_of(one.gram, sums))
        cosine = sum(a * d for a, d in zip(sums, one.dots[copy], strict=True)) / sqrt(square) if square else 0.0
        off = distance(one, copy, sums) / size if size else 0.0
        if self.as_left(one):
            return Cause("prove.direction", OTHER_ON_EACH, cosine=cosine, off=off) if replicas_apart(one) else None
        why = self._unlike(one, copy) or "no sum of the micro-batches' gradients"
        return Cause("prove.direction", why, cosine=cosine, off=off)

    def _unlike(self, one: GradientProof, copy: int) -> str:
        """Words for a sum in which each rank's part has a factor of its own; empty: it is none."""
        by = by_rank(one, copy, self.sums, self.facts)
        if by is None:
            return ""
        near_by = tuple(by[share.rank] * a for a, share in zip(self.sums, self.facts.shares, strict=True))
        if distance(one, copy, near_by) > max(1.0, *map(abs, by)) * self.allowed(one):
            return ""
        return UNLIKE + ", ".join(f"{factor:.2f} x of rank {rank}" for rank, factor in enumerate(by))

    def as_left(self, one: GradientProof) -> bool:
        """Return whether backward has left it as it should be, and the program has written into it since."""
        plain = evolve(self, sums=tuple(a / self.clipping for a in self.sums), clipping=1.0)
        left = [plain.cause(before, copy) for before in one.before for copy in range(len(before.dots))]
        return bool(left) and not any(left) and not self.facts.cleared

    def cut_to(self) -> float | None:
        """The norm to which the program has scaled all gradients, as nobody would find it by chance; None: to none."""
        most = max((one for one in self.facts.gradients if one.dots), key=lambda one: one.squares[0], default=None)
        ratio = 1.0 if most is None else fitted(most, 0, self.sums)
        return None if near(ratio, 1.0) or not self.all_by(ratio) else written_norm(self.facts)

    def all_weigh_one(self) -> bool:
        """Whether every gradient is such a multiple of its mean over ranks that all samples together weigh one."""
        whole = _whole(self.facts)
        return bool(whole) and self.all_by(1 / whole)

    def all_by(self, ratio: float) -> bool:
        """Whether every gradient is this multiple of what it should be."""
        seen = (one for one in self.facts.gradients if one.dots)
        told = (one for one in seen if sqrt(square_of(one.gram, self.sums)) > 3 * self.allowed(one))
        return all(near(fitted(one, 0, self.sums), ratio) for one in told)

    def scaled_apart(self, gradients: Sequence[GradientProof], *, turned: bool) -> Cause | None:
        """The cause where each rank has scaled what it holds of these by a number of its own; None: that is not so.

        ``turned``: whether some is no multiple of what it should be, so that the numbers differ, be it by little.
        """
        plain = tuple(a / self.clipping for a in self.sums)
        ratios, split = dict[int, float](), False
        for one in gradients:
            seen = set()
            for part in one.parts or (one,):
                size = sqrt(square_of(part.gram, plain))
                if len(part.dots) != 1 or size <= 3 * self.allowed(part):
                    continue
                ratio = fitted(part, 0, plain)
                off = distance(part, 0, tuple(ratio * a for a in plain))
                if off > ratio * self.allowed(part) / self.clipping:
                    return None
                if not near(ratio, ratios.setdefault(part.holders[0], ratio)):
                    return None
                seen.add(part.holders[0])
            split = split or len(seen) > 1
        clipped = all(near(ratio, dict(enumerate(self.facts.shrunk)).get(rank, 0.0)) for rank, ratio in ratios.items())
        alike = not turned and near(min(ratios.values(), default=1.0), max(ratios.values(), default=1.0))
        if len(ratios) < 2 or alike or not (split or clipped):
            return None
        if none := tuple(rank for rank, ratio in sorted(ratios.items()) if ratio <= NOTHING):
            return Cause("prove.no-gradient", f"zeros in the part of rank {spans(none)}")
        said = ", ".join(f"{ratio:.4g} x on rank {rank}" for rank, ratio in sorted(ratios.items())[:4])
        return Cause("prove.clipped-scaled", f"{OF_ITS_PART}: {said}")


def _whole(facts: ProofFacts) -> float:
    """What all samples weigh together, averaged over the ranks: 1 in a mean; 0 where the losses do not say so."""
    known = [abs(one.each) * one.count for one in facts.shares if one.each is not None and one.count is not None]
    return sum(known) / (facts.world * scaled_by_hand(facts)) if len(known) == len(facts.shares) else 0.0


def _of_ratio(facts: ProofFacts, ratio: float, clipping: float) -> Cause:
    """The number of this run that explains a ratio."""
    weighed = _weighed(facts)
    rest = ratio / weighed.ratio if weighed is not None else ratio
    if weighed is not None and near(rest, 1.0):
        return Cause(weighed.rule, weighed.why, ratio)
    also = f", and {weighed.why}" if weighed is not None else ""
    world, micros, scale, by_hand = facts.world, divided(facts), facts.scale, scaled_by_hand(facts)
    early = _clipping(facts, tuple(by_hand * a for a in mean(facts))) / clipping
    or_micros, or_divided = (
        f" (or {how} by the {micros} micro-batches)" * (micros == world) for how in ("multiplied", "divided once more")
    )
    table: tuple[tuple[bool, float, str, str], ...] = (
        (by_hand > 1, early, "prove.clipped-scaled", f"{WHILE_SCALED} by {by_hand:g}"),
        (clipping < 1, 1 / clipping, "prove.not-clipped", "never clipped"),
        (scale > 1, scale, "prove.scaled", f"stepped while they are scaled by {scale:g}: never unscaled"),
        (scale > 1, 1 / scale, "prove.scaled", f"unscaled twice, by {scale:g}"),
        (world > 1, world, "prove.summed", f"summed over the {world} ranks, not averaged{or_micros}"),
        (world > 1, 1 / world, "prove.averaged-twice", f"averaged twice over the {world} ranks{or_divided}"),
        (micros > 1, micros, "prove.accumulation", f"not divided by the {micros} micro-batches of a step"),
        (micros > 1, 1 / micros, "prove.accumulation", f"divided once more by the {micros} micro-batches of a step"),
    )
    none = ("prove.ratio", NO_NUMBER)
    rule, why = next((told for asked, number, *told in table if asked and near(rest, number)), none)
    return Cause(rule, why + also, ratio)


def _parts(facts: ProofFacts, sums: Vector, holder: int) -> Iterator[tuple[Cause, Vector]]:
    """Causes that leave something out, each with the sum of shares that it makes."""
    world, micros = facts.world, max(counts(facts).values(), default=1)
    for rank in range(world) if world > 1 else ():
        rest = tuple(0.0 if share.rank == rank else a for a, share in zip(sums, facts.shares, strict=True))
        yield Cause("prove.no-gradient", f"{NONE_OF}{rank}"), rest
    for rank in range(world) if world > 1 else ():
        yield Cause("prove.not-averaged", "", rank=rank), only(facts, sums, {rank})
    for group in mesh_groups(world, holder):
        yield Cause("prove.part-of-ranks", "", group=group), only(facts, sums, set(group))
    if micros > 1:
        last = micros - 1
        for by, rule, why in (
            (world, "prove.summed", f"summed over the {world} ranks{AT_EACH}"),
            (1 / world, "prove.averaged-twice", f"averaged twice over the {world} ranks{AT_EACH}"),
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
                yield Cause("prove.micro-batch", why), of_micros(facts, sums, kept)
        if world > 1:
            own = tuple(
                a * world * (share.rank == holder) if share.micro < last else a
                for a, share in zip(sums, facts.shares, strict=True)
            )
            why = "averaged over the last micro-batch, and each rank's own over those before"
            yield Cause("prove.not-averaged", why), own
            for later in range(last):
                late = tuple(
                    a * world * (share.rank == holder) if share.micro > later else a
                    for a, share in zip(sums, facts.shares, strict=True)
                )
                why = "averaged before the last micro-batch, and each rank's own in it"
                if later < last - 1:
                    why = f"averaged up to micro-batch {later} of {micros}, and each rank's own in those behind it"
                yield Cause("prove.not-averaged", why), late


def _clipped_apart(facts: ProofFacts, sums: Vector) -> Iterator[tuple[Cause, Vector]]:
    """Each rank has clipped by a norm of its own, as before an average by hand; ``sums`` are not clipped."""
    each = facts.shrunk
    if each and max(each) > 1.001 * min(each):
        shrunk = tuple(a * each[share.rank] for a, share in zip(sums, facts.shares, strict=True))
        most = facts.clip.most if facts.clip is not None else 1.0
        hows = [f"from {most / by:.4g} on rank {rank}" for rank, by in enumerate(each[:4]) if 0 < by < 1]
        yield Cause("prove.clipped-scaled", f"{BY_EACH_RANK}: to a norm of {most:g} {', '.join(hows)}"), shrunk


# --- all of them ------------------------------------------------------------------------------------------------------


def aim_of(facts: ProofFacts) -> _Aim:
    """Return what every gradient of these facts should be."""
    plain, own = mean(facts), _weighed(facts) is None  # what is no number of this run is the loss's own
    by = scaled_by_hand(facts)
    average = tuple(
        a * (share.weight / by if own else kinds(facts)) for a, share in zip(plain, facts.shares, strict=True)
    )
    clipping = _clipping(facts, average)
    sums = tuple(clipping * a for a in average)
    numel = sum(one.numel for one in facts.gradients)
    return _Aim(facts, sums, clipping, norm(facts, average) / sqrt(numel) if numel else 0.0)


def causes(facts: ProofFacts) -> tuple[tuple[Cause, tuple[str, ...]], ...]:
    """Every cause with the parameters that it explains, in the order of the parameters. Pure."""
    every = _causes(facts)
    return tuple(one for one in every if one[0].why != OWN) if steps_apart(facts) else every


def steps_apart(facts: ProofFacts) -> bool:
    """Return whether ranks step by gradients of their own, as the program averages weights: behind some steps."""
    told = bool(facts.averages) and any(cause.why == OWN for cause, _ in _causes(facts))
    return facts.averaged_later or (told and not facts.beside)


@lru_cache(maxsize=8)
def _causes(facts: ProofFacts) -> tuple[tuple[Cause, tuple[str, ...]], ...]:
    if facts.beside:  # the shares are not all that was added up
        names = tuple(one.name for one in facts.gradients if replicas_apart(one))
        rule = "prove.past-wrapper" if facts.wrapper else "prove.not-averaged"
        return ((Cause(rule, OWN), names),) if names else ()
    if (
        facts.first_apart
        or facts.scales_apart
        or facts.averaged_later
        or not facts.shares
        or len(set(counts(facts).values())) > 1
    ):
        return ()  # what stands before explains it
    aim, found = aim_of(facts), dict[tuple[str, str], list[tuple[Cause, str]]]()
    right = False
    for one in facts.gradients:
        each = [aim.cause(one, copy) for copy in range(len(one.dots))]
        there = sqrt(square_of(one.gram, aim.sums)) > 3 * aim.allowed(one)
        right = right or (there and bool(one.dots) and not any(each))
        if not one.dots and there:
            each = [Cause("prove.no-gradient", "")]
        each = [_where(cause, one.holders[copy], each) for copy, cause in enumerate(each)] if one.dots else each
        for cause in dict.fromkeys(_merged(one, each, facts)):
            found.setdefault((cause.rule, cause.why.partition(":")[0]), []).append((cause, one.name))
    lacking = [key for key in found if key[1].startswith(NONE_OF)]
    if facts.world == len(lacking) == 2:  # of some each of both has its own alone
        for key in lacking:
            alone = Cause("prove.not-averaged", "", rank=1 - int(key[1].removeprefix(NONE_OF)))
            found["prove.not-averaged", key[1]] = [(alone, name) for _, name in found.pop(key)]
    _fold(found, {one.name for one in facts.gradients if on_one_line(one)})
    apart = ("prove.direction", "prove.clipped-scaled")
    turned = any(rule in apart and not why.startswith(WHILE_SCALED) for rule, why in found)
    if found and (scaled := aim.scaled_apart(facts.gradients, turned=turned)):
        return ((scaled, tuple(one.name for one in facts.gradients)),)
    return tuple(
        (_of_some(_typical([cause for cause, _ in every]), right), tuple(dict.fromkeys(name for _, name in every)))
        for every in found.values()
        if not (every[0][0].rule == "prove.direction" and facts.clip is not None and facts.clip.early)
    )


def _fold(found: dict[tuple[str, str], list[tuple[Cause, str]]], lines: set[str]) -> None:
    """Lays gradients on a line, which are a multiple of whatever they should be, to the one cause of others.

    Where that is no multiple, theirs by some number of this run, or of some rank, is one by chance.
    """
    told = [key for key in found if not key[1].startswith(NO_NUMBER)]
    wide = [key for key in found if not lines.issuperset(name for _, name in found[key])] or told
    if len(wide) != 1 or wide[0] not in told:
        return
    every, sums = found[wide[0]], wide[0][0] in SUMS
    for key in [key for key in found if key != wide[0]]:
        if key not in told or (sums and key[0] != "prove.no-gradient"):
            every += [(every[0][0], name) for _, name in found.pop(key)]


def _where(cause: Cause | None, holder: int, each: list[Cause | None]) -> Cause | None:
    """The cause with the rank on which it is so, where it is not so on all."""
    if cause is None or cause.rule != "prove.direction" or None not in each:
        return cause
    return evolve(cause, why=f"{cause.why} on rank {holder}")


def _typical(every: list[Cause]) -> Cause:
    """One cause for several gradients."""
    by = sorted(every, key=lambda cause: cause.ratio)
    worst, off = min(cause.cosine for cause in every), max(cause.off for cause in every)
    return evolve(by[len(by) // 2], cosine=worst, off=off)


def _of_some(cause: Cause, right: bool) -> Cause:
    """Return what divides a loss changes all of its gradients: where some are right, the number is one by chance."""
    if right and cause.rule == "prove.accumulation":
        return evolve(cause, rule="prove.ratio", why="and others are right: no factor of the loss explains it")
    return cause


def _merged(one: GradientProof, each: list[Cause | None], facts: ProofFacts) -> list[Cause]:
    """The causes of all replicas of one parameter, those of one rank's alone in one word."""
    there = [cause for cause in each if cause is not None and not cause.group]
    if parts := list(dict.fromkeys(cause for cause in each if cause is not None and cause.group)):
        over = " and over ranks ".join(dict.fromkeys(spans(cause.group) for cause in parts))
        there.append(evolve(parts[0], why=f"averaged over ranks {over} alone, {len(parts[0].group)} of {facts.world}"))
    alone = [
        (cause, holder) for cause, holder in zip(each, one.holders, strict=False) if cause and cause.rank is not None
    ]
    if not alone:
        return there
    owners, everywhere = {cause.rank for cause, _ in alone}, len(alone) == len(one.dots)
    if everywhere and len(alone) > 1 and all(cause.rank == holder for cause, holder in alone):
        why = OWN
    else:
        why = f"those of rank {' and '.join(str(owner) for owner in sorted(o for o in owners if o is not None))} alone"
        why += "" if everywhere else f", on rank {spans(tuple(holder for _, holder in alone))}"
    ratio = alone[0][0].ratio
    rest = [cause for cause in there if cause.rank is None]
    past = why == OWN and facts.wrapper
    return [Cause("prove.past-wrapper" if past else "prove.not-averaged", why, ratio), *rest]
