"""Prints what verification catches, and what a failure at any place leaves behind: ``make faults``.

With names of engines as arguments, their rows of the second table only.
"""

from __future__ import annotations

import sys

from tests.support import failures_midway, planted_faults
from tests.support.gang import gang_of


def main() -> None:
    """Both tables, on standard output."""
    with gang_of(2) as gang:
        print(f"{planted_faults.table(gang)}\n")
    engines = sys.argv[1:] or list(failures_midway.ENGINES)
    print(failures_midway.table([outcome for engine in engines for outcome in failures_midway.all_outcomes(engine)]))


if __name__ == "__main__":
    main()
