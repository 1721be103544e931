"""Print what each error of the audit does: ``python -m tests.tools.harms``. One row: rule, harm, wrong, right."""

from __future__ import annotations

from tests.audit.harms import HARMS, Seen, seen
from tests.audit.harms_of_ranks import HARMS_OF_RANKS, seen_over_ranks
from tests.support.gang import gang_of


def number(value: Seen) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def table() -> str:
    """A table in Markdown, in the order of the programs."""
    lines = ["| rule | program | harm | wrong | right |", "|---|---|---|---|---|"]
    for harm in HARMS:
        wrong, right = (number(seen(make, harm.measure)) for make in (harm.make, harm.mended))
        lines.append(f"| {harm.rule} | {harm.make.__name__} | {harm.what} | {wrong} | {right} |")
    with gang_of(2) as pair:
        for at, one in enumerate(HARMS_OF_RANKS):
            wrong, right = map(number, pair.run(seen_over_ranks, at)[0])
            lines.append(f"| {one.rule} | {one.make.__name__} | {one.what} | {wrong} | {right} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
