"""Print what each error of a running program does: ``python -m tests.tools.harms``: rule, harm, wrong, right."""

from __future__ import annotations

from collections.abc import Iterator

from tests.audit.harms import HARMS, Seen, seen
from tests.audit.harms_in_torch import SLIPS
from tests.audit.harms_of_ranks import HARMS_OF_RANKS, seen_over_ranks
from tests.audit.slips_of_ranks import SLIPS_OF_RANKS, both_ways
from tests.saving.test_harms import RESUME_HARMS
from tests.support.gang import gang_of
from tests.training import loop_harms
from tests.training.loop_harms_of_ranks import LOOP_HARMS_OF_RANKS, seen_on_rank

Row = tuple[str, str, Seen, Seen]


def number(value: Seen) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def rows() -> Iterator[Row]:
    """Rule, harm, and the numbers with the error and without it, of the last rank where there are two."""
    for harm in HARMS:
        yield harm.rule, harm.what, seen(harm.make, harm.measure), seen(harm.mended, harm.measure)
    for one in (*SLIPS, *RESUME_HARMS):
        yield one.rule, one.what, one.wrong(), one.right()
    for slip in loop_harms.LOOP_HARMS:
        yield slip.rule, slip.what, *loop_harms.seen(slip)
    with gang_of(2) as pair:
        for at, of_ranks in enumerate(HARMS_OF_RANKS):
            yield of_ranks.rule, of_ranks.what, *pair.run(seen_over_ranks, at)[-1]
        for at, by_hand in enumerate(SLIPS_OF_RANKS):
            yield by_hand.rule, by_hand.what, *pair.run(both_ways, at)[-1]
        for at, in_loop in enumerate(LOOP_HARMS_OF_RANKS):
            yield in_loop.rule, in_loop.what, *pair.run(seen_on_rank, at)[-1][1:]


def table() -> str:
    """A table in Markdown, sorted by rule."""
    lines = ["| rule | harm | wrong | right |", "|---|---|---|---|"]
    for rule, what, wrong, right in sorted(rows(), key=lambda row: row[0]):
        lines.append(f"| {rule} | {what} | {number(wrong)} | {number(right)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
