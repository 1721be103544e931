"""The table of checks as it stands in the docs: what ``tests.tools.accelerate_scripts`` has to find."""

from __future__ import annotations

from itertools import groupby

from tests.compat.scripts.check import Check
from tests.compat.scripts.table import CHECKS, NOT_RUN


def expected(check: Check, world: int) -> tuple[str, str]:
    """Outcome and reason on so many processes."""
    deviation = check.deviation(world)
    return ("passed", "") if deviation is None else ("deviation", deviation.why)


def counts() -> dict[str, int]:
    """Outcomes to numbers of rows, one for each check and number of processes."""
    outcomes = [expected(check, world)[0] for check in CHECKS for world in check.worlds]
    return {outcome: outcomes.count(outcome) for outcome in ("passed", "deviation")}


def markdown() -> str:
    """A row for each check, and for each outcome of it where one and two processes differ."""
    lines = ["| script | check | processes | outcome | reason |", "|---|---|---|---|---|"]
    for check in CHECKS:
        for (outcome, why), worlds in groupby(check.worlds, lambda world: expected(check, world)):  # noqa: B023
            ranks = ", ".join(map(str, worlds))
            lines.append(f"| {check.script} | `{check.title}` | {ranks} | {outcome} | {why} |")
    lines += [f"| {script} | `{what}` | | not run | {why} |" for script, what, why in NOT_RUN]
    number = counts()
    total = f"{number['passed']} passed, {number['deviation']} deviations with a reason, 0 unexplained."
    return "\n".join((*lines, "", f"Of {sum(number.values())} runs: {total}"))
