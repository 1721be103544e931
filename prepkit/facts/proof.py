"""One window of training beside its replay: what an optimizer was about to step, and what it should have been.

A *share* is the gradient of the loss of one micro-batch on one rank, replayed plainly in float64. What is recorded is
compared with sums of shares through inner products alone, so that the facts stay small whatever the model's size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isclose, sqrt

from attrs import frozen

ACCELERATED = "which torch runs on an accelerator alone"
OWN_COLLECTIVE = "which one process cannot do again alone"
COPIES = "an optimizer has stepped copies of the weights, which were put into the model behind it"
"""Words of why nothing is proven, by which a fix is chosen."""


@frozen(kw_only=True)
class LossShare:
    """One backward of one rank."""

    rank: int
    micro: int
    """Counted from 0."""
    weight: float = 1.0
    """The factor in the loss that was given to backward, times the micro-batches that are averaged, without the loss
    scale: 1 where each is divided by their number."""
    total: bool = False
    """Whether it is a sum over samples, which was divided by a number of the program's."""
    given: bool = False
    """Whether the backward was given gradients: of what loss, and by what it was divided, nobody knows."""
    meant: tuple[float, ...] = ()
    """Parts of the weight that may be the loss's own: multiplications by less than one, a mean of several losses."""
    operators: str = ""
    """Which operators have made the loss of the model's outputs."""
    count: float | None = None
    """Elements over which the loss is a mean or a sum, where its graph says so and the run does not weigh it."""
    rows: int = 0
    """Of what the model has returned: its samples, where they lie along the first dimension; 0: nobody knows."""
    each: float | None = None
    """The part that one sample, or one token that counts, has in the loss, where its graph says so and the run does not
    weigh it."""
    kind: int = 0
    """The first micro-batch of its rank whose loss is of this kind: made alike, of a model that was called alike."""
    added: int = 1
    """Of how many losses of one kind, each of a call of its own, it is the sum."""


@frozen(kw_only=True)
class GradientProof:
    """One parameter's recorded gradient and its shares, as inner products; one entry for each replica."""

    name: str
    numel: int
    gram: tuple[tuple[float, ...], ...]
    """Of the shares among each other."""
    dots: tuple[tuple[float, ...], ...] = ()
    """Per replica: of what was recorded with each share. Empty: no gradient was recorded."""
    squares: tuple[float, ...] = ()
    """Per replica: of what was recorded with itself."""
    holders: tuple[int, ...] = ()
    """Per replica: the first rank that holds it, or a part of it."""
    noise: float = 0.0
    """Norm of the difference of two replays, in the run's dtypes and in float64: what rounding does."""
    weight: tuple[float, ...] = ()
    """Of the weight itself with each share."""
    weight_square: float = 0.0
    along: tuple[float, ...] = ()
    """Per replica: of what was recorded with the weight."""
    decay: float = 0.0
    """The weight decay that the optimizer's options have for it."""
    before: tuple[GradientProof, ...] = ()
    """One, as the last backward has left it, without the loss scale, where the program has written into it since."""
    parts: tuple[GradientProof, ...] = ()
    """The first replica's parts, where ranks hold it in parts: each as a gradient of one replica, held by its rank."""


@frozen(kw_only=True)
class StepProof:
    """What the optimizer has made of one parameter, beside the same step taken plainly over the same gradient."""

    name: str
    held: bool = True
    """Whether the optimizer that stepped holds it."""
    along: float = 0.0
    """Inner product of both updates."""
    expected: float = 0.0
    """Square of the plain update."""
    moved: float = 0.0
    """Square of the update that was made."""
    noise: float = 0.0
    """Norm of the difference of the plain update in the run's dtypes and in float64."""
    dtype: str = "float32"
    """Of the weight that was stepped."""
    meant: int = 0
    """Elements that the plain step changes in float64."""
    lost: int = 0
    """Those of them that have stayed as they were."""
    by_parts: str = ""
    """The optimizer of no library that has stepped it part by part on the ranks, and plainly was asked for all of it at
    once; empty: one of torch's, or on one rank."""


@frozen(kw_only=True)
class Slope:
    """One parameter whose gradient is not the slope of what all ranks lose on average, as their forwards show it."""

    name: str
    ranks: tuple[int, ...]
    """Those that hold it: one, where it is that rank's own."""
    ratios: tuple[float, ...]
    """What the gradient of each of them is, times the slope. Empty: the loss does not change with it."""
    averaged: bool = False
    """Whether the gradients of all ranks are alike, though each holds other weights."""
    turned: bool = False
    """Whether no number makes one of the other."""


@frozen(kw_only=True)
class HandedBack:
    """A stage of a pipeline that has gone backward with another gradient than that of what it had sent."""

    rank: int
    call: int
    """Whose output it has sent."""
    to: int
    """The rank that got it."""
    got: int
    """The call of that rank for which it got it."""
    of: int | None
    """The call of that rank whose gradient has come back in its place; None: of none."""


@frozen(kw_only=True)
class ClipProof:
    """A clipping of gradients by their norm."""

    most: float
    """The norm that is allowed."""
    seen: float | None = None
    """The norm that was found; None: who clipped did not show it."""
    power: float = 2.0
    """Of the norm."""
    beyond: bool = False
    """Whether it was taken over parameters of other models too."""
    parts: bool = False
    """Whether it was taken over some of the parameters alone, and others perhaps over the rest."""
    empty: bool = False
    """Whether it was given no parameter."""
    late: bool = False
    """Whether it came behind the step, and none before it."""
    early: bool = False
    """Whether it has shrunk gradients before the last micro-batch of the step."""


@frozen(kw_only=True)
class ProofFacts:
    """One window of all ranks, and its replay on one process."""

    world: int
    shares: tuple[LossShare, ...]
    """In the order of every ``gram``."""
    gradients: tuple[GradientProof, ...] = ()
    steps: tuple[StepProof, ...] = ()
    """Empty: the optimizer's step was not replayed."""
    dtype: str = "float32"
    """The lowest floating dtype that the run has computed in."""
    eps: float = 2.0**-23
    """The rounding that is allowed beside ``noise``: that of the dtype in which gradients are sent, or a small part of
    that in which the run has computed."""
    scale: float = 1.0
    """What the loss was multiplied with against underflow."""
    accumulation: int | None = None
    """Micro-batches per step as a config or accelerate says; None: nobody says."""
    divides: int | None = None
    """Micro-batches over which a rank averages, where plan and loop say it: of a full window, even if this one was cut
    short or some had several backwards; None: as many as there were backwards."""
    clip: ClipProof | None = None
    shrunk: tuple[float, ...] = ()
    """By which factor each rank has clipped, by the norm that it saw; empty: not every one has shown it."""
    first_apart: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Parameters whose replicas differ before the step, with the ranks that part from the first one."""
    after_apart: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Likewise after it."""
    later: tuple[str, ...] = ()
    """Parameters that something has changed behind the step, before the window was over."""
    undone: tuple[tuple[str, int], ...] = ()
    """Those that are behind the step what they were before it, though a rank has stepped them, with that rank."""
    averaged_later: bool = False
    """Whether that has made those alike on all ranks which were apart after the step, by no rank's weights alone."""
    averages: str = ""
    """The line of the program that averages weights over ranks, behind this step or another; empty: none was seen."""
    buffers_apart: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Buffers that differ when the first window begins, with the ranks that part from the first one."""
    moved: tuple[str, ...] = ()
    """Parameters that something has changed between the first forward and the step."""
    left: tuple[str, ...] = ()
    """Parameters that had a gradient before the first backward of the window."""
    kept: tuple[str, ...] = ()
    """Parameters that still had their gradient when the next window went backward."""
    twice: bool = False
    """Whether the optimizer has stepped once more over the same gradients."""
    cleared: int = 0
    """Micro-batches of a rank whose gradients were cleared before the step."""
    wasted: int = 0
    """Those of them that are certainly of the same step: one accumulation, whose losses are divided by their number."""
    unstepped: tuple[str, ...] = ()
    """Why nothing is proven of other models that have had gradients, a sentence each."""
    detached: tuple[str, ...] = ()
    """Classes of other models whose optimizer has stepped over no gradient each time."""
    idle: bool = False
    """Whether the optimizer has stepped twice over gradients that were cleared after the backward; nothing else is
    known then."""
    doubled: tuple[str, ...] = ()
    """Lines in which a loss went backward that had done so before: ``backward at train.py:31``."""
    asked: bool = False
    """Whether the program has asked for gradients, and put them into their places itself."""
    value: float | None = None
    """To which each element of a gradient is clipped; None: to nothing."""
    over: tuple[str, ...] = ()
    """Parameters whose gradient has a larger element than that."""
    outside: tuple[str, ...] = ()
    """Parameters that the loss uses itself, beside the model's outputs."""
    unreached: tuple[str, ...] = ()
    """Parameters with a gradient with which a copy of the model does not compute."""
    cut_off: tuple[str, ...] = ()
    """Parameters that the forward computes with, and to which no gradient comes, in the run as in its replay."""
    cut: tuple[tuple[str, str], ...] = ()
    """Those of them to which one comes where the forward cuts no graph, with what does: ``detach() at train.py:31``."""
    beside: tuple[str, ...] = ()
    """Lines that went backward over weights of the model, and over no output of it: ``train.py:31``."""
    wrapper: str = ""
    """The class of what wraps the model there, or stands around the model that is called; empty: nothing does."""
    raw: bool = False
    """Whether nothing wraps or shards the model, or a part of it."""
    uses: tuple[str, ...] = ()
    """Tools that the program has made (``DDP``, ``accelerate``, ``loaders``), and ``torch``; empty: nobody knows."""
    scales_apart: bool = False
    """Whether ranks have scaled their losses by different numbers against underflow."""
    options_apart: tuple[str, ...] = ()
    """Options of the optimizer, and of the run, that ranks should have alike and have not, with who has what."""
    state_apart: tuple[str, ...] = ()
    """What an optimizer has of parameters from earlier steps that ranks should have alike and have not."""
    same_draws: tuple[tuple[int, int, int], ...] = ()
    """Ranks that have computed two micro-batches from the same state of the generator, with both: ``(rank, 0, 1)``."""
    same_samples: tuple[tuple[int, ...], ...] = ()
    """Ranks that have read the same, although each holds all of the model; those that did, together."""
    miscounted: str = ""
    """How a number of labels that was given is another than that of the loss, where that changes its weight."""
    lines: tuple[str, ...] = ()
    """Where the program went backward, and where it stepped: ``train.py:31``; empty: nobody knows."""
    unproven: str = ""
    """Why nothing could be replayed; empty: it could."""
    sends: bool = False
    """Whether that is since its forward sends to other ranks what trains."""
    measured: int = 0
    """Gradients that were compared with slopes, as all ranks can measure them together; 0: they were replayed."""
    slopes: tuple[Slope, ...] = ()
    """Those of them that are other than that."""
    handed_back: tuple[HandedBack, ...] = ()
    """Where stages that send each other tensors mistake what comes back."""
    outputs: tuple[str, ...] = ()
    """Outputs of the model to which something behind it has done what can be named, a sentence each."""
    unrepeated: str = ""
    """Which output of a forward the replay does not give again, so that gradients were not compared; empty: none."""
    in_parts: bool = False
    """Whether layers are cut over ranks, which were given the same."""
    unrepeated_on: tuple[int, ...] = ()
    """The ranks on which such outputs are, where those of rank 0, whose model is copied, repeat."""
    limits: tuple[str, ...] = ()
    """What this proof cannot see, a sentence each."""


# --- what the shares should add up to ---

Vector = tuple[float, ...]
MOST_RANKS = 8
"""Up to how many a sum is looked for in which each rank has a factor of its own."""
NEAR = 0.03
"""By which part a ratio may be off the number that explains it."""
ELEMENTS = 8
"""Of a gradient for each such factor: fewer are any sum."""


def counts(facts: ProofFacts) -> dict[int, int]:
    """Micro-batches of each rank."""
    found = dict.fromkeys(range(facts.world), 0)
    for share in facts.shares:
        found[share.rank] += 1
    return found


def mean(facts: ProofFacts) -> Vector:
    """The average by definition: over the micro-batches of a rank, and over the ranks."""
    number = counts(facts)
    return tuple(1 / (facts.world * (facts.divides or number[share.rank])) for share in facts.shares)


def kinds(facts: ProofFacts) -> int:
    """The same where a window does not say by what it divides: the losses of one kind are averaged."""
    return tasks(facts) if facts.divides is None else 1


def tasks(facts: ProofFacts) -> int:
    """Return how many kinds of losses each rank has equally many of, as of several tasks.

    Where a window says by how many micro-batches it divides, a loss of each kind in every one of them.
    """
    each = {rank: Counter(one.kind for one in facts.shares if one.rank == rank) for rank in counts(facts)}
    numbers = {number for found in each.values() for number in found.values()}
    several = {len(found) for found in each.values()}
    regular = len(numbers) == len(several) == 1 and facts.divides in (None, *numbers)
    return several.pop() if regular else 1


def divided(facts: ProofFacts) -> int:
    """By how many micro-batches each loss is to be divided."""
    return facts.divides or max(counts(facts).values(), default=1) // kinds(facts)


def by_rank(one: GradientProof, copy: int, sums: Vector, facts: ProofFacts) -> Vector | None:
    """The factor of each rank's share with which their sum is nearest to what was recorded; None: any sum may be.

    The normal equations of these factors, by elimination.
    """
    world = facts.world
    if not 1 < world <= MOST_RANKS or one.numel < ELEMENTS * world or len(sums) != len(one.gram):
        return None
    at = [
        [a if share.rank == rank else 0.0 for a, share in zip(sums, facts.shares, strict=True)] for rank in range(world)
    ]
    rows = [[_product(one.gram, mine, other) for other in at] for mine in at]
    for row, mine in zip(rows, at, strict=True):
        row.append(sum(a * dot for a, dot in zip(mine, one.dots[copy], strict=True)))
    for first in range(world):
        if rows[first][first] <= 1e-6 * max(_product(one.gram, mine, mine) for mine in at):
            return None  # a rank has no share, or that of another
        for row in rows[:first] + rows[first + 1 :]:
            by = row[first] / rows[first][first]
            row[:] = [value - by * other for value, other in zip(row, rows[first], strict=True)]
    return tuple(row[-1] / row[rank] for rank, row in enumerate(rows))


def by_samples(facts: ProofFacts, sums: Vector) -> Vector:
    """The sums where each rank's part is weighted by its samples; the same where nobody knows their number."""
    each = [(share.rank, share.count or share.rows) for share in facts.shares]
    has = {rank: sum(number for of, number in each if of == rank) for rank, _ in each}
    whole = sum(has.values()) / facts.world
    return tuple(has[rank] / whole * a for (rank, _), a in zip(each, sums, strict=True)) if all(has.values()) else sums


def weighted_by_samples(facts: ProofFacts) -> bool:
    """Return whether gradients are nearer to a mean over all samples than to one over ranks."""
    plain, every = mean(facts), [one for one in facts.gradients if one.dots]
    by = by_samples(facts, plain)

    def off(one: GradientProof, sums: Vector) -> float:
        return distance(one, 0, tuple(fitted(one, 0, sums) * a for a in sums))

    return bool(every) and all(off(one, by) < 0.5 * off(one, plain) for one in every)


def common_weight(facts: ProofFacts) -> float | None:
    """The factor that all losses carry; None: they carry different ones."""
    weights = [share.weight for share in facts.shares]
    return weights[0] if all(isclose(one, weights[0], rel_tol=1e-3) for one in weights) else None


def mesh_groups(world: int, holder: int) -> Iterator[tuple[int, ...]]:
    """Groups of ranks, next to each other or in steps, among which a mesh may have averaged."""
    for size in range(2, world):
        if world % size == 0:
            first = holder - holder % size
            yield tuple(range(first, first + size))
            yield tuple(range(holder % (world // size), world, world // size))


def only(facts: ProofFacts, sums: Vector, ranks: set[int]) -> Vector:
    """The sums over these ranks alone, averaged over them."""
    more = facts.world / len(ranks)
    return tuple(a * more if share.rank in ranks else 0.0 for a, share in zip(sums, facts.shares, strict=True))


def of_micros(facts: ProofFacts, sums: Vector, kept: set[int]) -> Vector:
    """The sums over these micro-batches of each rank alone."""
    return tuple(a if share.micro in kept else 0.0 for a, share in zip(sums, facts.shares, strict=True))


def near(value: float, other: float) -> bool:
    """Return whether a number explains a ratio."""
    return abs(value - other) <= NEAR * abs(other)


def norm(facts: ProofFacts, sums: Vector) -> float:
    """Of all gradients together, if they are these sums of shares."""
    return sqrt(sum(square_of(one.gram, sums) for one in facts.gradients))


def written_norm(facts: ProofFacts) -> float | None:
    """The norm of all gradients that are stepped, if somebody would write it, as 1 or 0.5; None: it is another."""
    return as_written(sqrt(sum(one.squares[0] for one in facts.gradients if one.squares)))


def as_written(norm: float) -> float | None:
    """A norm, if somebody would write it, as 1 or 0.5; None: it is another."""
    written = float(f"{norm:.1g}")
    return written if norm and isclose(norm, written, rel_tol=1e-4) else None


def own_clip(norm: float) -> str:
    """Words for a norm to which a program has scaled all of its gradients itself."""
    return f"the program has scaled all gradients to a norm of {norm:g}: taken for a clip of its own"


def square_of(gram: Sequence[Vector], sums: Vector) -> float:
    """Of the norm of a sum of shares of one gradient."""
    return max(_product(gram, sums, sums), 0.0)


def _product(gram: Sequence[Vector], one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b * value for a, row in zip(one, gram, strict=True) for b, value in zip(other, row, strict=True))


def distance(one: GradientProof, copy: int, sums: Vector) -> float:
    """Norm of what was recorded less a sum of shares."""
    cross = sum(a * dot for a, dot in zip(sums, one.dots[copy], strict=True))
    return sqrt(max(one.squares[copy] - 2 * cross + square_of(one.gram, sums), 0.0))


def along_weight(one: GradientProof, copy: int, sums: Vector, allowed: float) -> float | None:
    """By what the weight itself was added to a sum of shares, if that is all that is wrong with it; None: it is not."""
    if not one.weight_square or not one.along or one.numel < 2:  # of one element anything is a multiple
        return None
    along = one.along[copy] - sum(a * dot for a, dot in zip(sums, one.weight, strict=True))
    by, off = along / one.weight_square, distance(one, copy, sums)
    rest = sqrt(max(off**2 - by**2 * one.weight_square, 0.0))
    return by if by > 0 and rest <= max(allowed, 1e-3 * off) else None


def replicas_apart(one: GradientProof) -> bool:
    """Return whether ranks have stepped other gradients of one parameter than each other."""
    return any(
        not isclose(mine, first, rel_tol=1e-5, abs_tol=1e-12)
        for copy in range(1, len(one.dots))
        for mine, first in zip((one.squares[copy], *one.dots[copy]), (one.squares[0], *one.dots[0]), strict=True)
    )


def fitted(one: GradientProof, copy: int, sums: Vector) -> float:
    """The factor with which the sum is nearest to what was recorded."""
    square = square_of(one.gram, sums)
    return sum(a * dot for a, dot in zip(sums, one.dots[copy], strict=True)) / square if square else 0.0


ONE_LINE = 1e-5
"""Of the square of a share, so much beside a line is rounding."""


def on_one_line(one: GradientProof) -> bool:
    """Return whether all shares lie on one line, as those of one element, or of a bias before a layer of one output.

    Whatever is made of them is a multiple of what it should be.
    """
    along = max(one.gram, key=max, default=())
    at, most = (along.index(max(along)), max(along)) if along else (0, 0.0)
    return all(
        most * one.gram[i][i] - one.gram[at][i] ** 2 <= ONE_LINE * most * one.gram[i][i] for i in range(len(along))
    )
