"""What the shares of a window should add up to, and which sum of the ranks' shares a gradient is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prepkit.facts.proof import GradientProof, ProofFacts

Vector = tuple[float, ...]
MOST_RANKS = 8
"""Up to how many a sum is looked for in which each rank has a factor of its own."""
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


def _product(gram: Sequence[Vector], one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b * value for a, row in zip(one, gram, strict=True) for b, value in zip(other, row, strict=True))
