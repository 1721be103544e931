"""Prints what verification catches, and what a failure at any place leaves behind: ``make faults``.

With names of engines as arguments, their rows of the second table only.
"""

from __future__ import annotations

import sys

from tests.support import fault_matrix, planted_faults
from tests.support.gang import Gang


def main() -> None:
    """Both tables, on standard output."""
    gang = Gang(2)
    try:
        print(f"{planted_faults.table(gang)}\n")
    finally:
        gang.close()
    engines = sys.argv[1:] or list(fault_matrix.ENGINES)
    print(fault_matrix.table([one for engine in engines for one in fault_matrix.all_outcomes(engine)]))


if __name__ == "__main__":
    main()
