"""Runs the checks of accelerate's own scripts through ``prepkit.compat.accelerate``, and prints what comes out.

``python -m tests.tools.accelerate_scripts`` takes some minutes on two cores, prints a row for each check and number of
processes, and ends with 1 where a row is neither passed nor a deviation that the table explains. Words after it choose
checks by a part of their name.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing

from tests.compat.scripts.run import row
from tests.compat.scripts.table import CHECKS, NOT_RUN
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang


def run(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Prints the rows; returns how many are unexplained."""
    outcomes: Counter[str] = Counter()
    say("| script | check | processes | outcome | reason |\n|---|---|---|---|---|")
    with closing(ForkServers()) as servers, closing(Gang(1, servers)) as alone, closing(Gang(2, servers)) as pair:
        gangs = {1: alone, 2: pair}
        for at, check in enumerate(CHECKS):
            for world in check.worlds:
                if not words or any(word in f"{check.script} {check.title}" for word in words):
                    made = row(gangs[world], at, check)
                    outcomes[made.outcome] += 1
                    say(str(made))
        for script, what, why in NOT_RUN if not words else ():
            say(f"| {script} | `{what}` | | not run | {why} |")
    say("\n" + ", ".join(f"{outcome}: {number}" for outcome, number in sorted(outcomes.items())))
    return outcomes["UNEXPLAINED"]


if __name__ == "__main__":
    sys.exit(min(1, run(sys.argv[1:], lambda text: print(text, flush=True))))
