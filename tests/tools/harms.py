"""Print what each error of the audit does: ``python -m tests.tools.harms``. One row: rule, harm, wrong, right."""

from __future__ import annotations

from tests.audit.harms import HARMS, Seen, seen


def number(value: Seen) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def table() -> str:
    """A table in Markdown, in the order of the programs."""
    lines = ["| rule | program | harm | wrong | right |", "|---|---|---|---|---|"]
    for harm in HARMS:
        wrong, right = (number(seen(make, harm.measure)) for make in (harm.make, harm.mended))
        lines.append(f"| {harm.rule} | {harm.make.__name__} | {harm.what} | {wrong} | {right} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
