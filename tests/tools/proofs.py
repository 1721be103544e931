"""Both tables of the proof by replay: planted errors and what is told of them, right programs and what is not.

``python -m tests.tools.proofs [NAME ...]``; exit code 1 where an error is missed or a right program is accused.
"""

from __future__ import annotations

import sys
from tempfile import TemporaryDirectory

from prepkit.findings import Finding, Severity
from prepkit.proving.proof import Proof
from tests.proving.right import RIGHT, Right
from tests.proving.window import proved
from tests.proving.wrong import ERRORS, Planted
from tests.support.gang import GangError, gang_of


def told(proof: Proof) -> list[Finding]:
    """What is more than a note."""
    return [finding for finding in proof.findings if finding.severity is not Severity.NOTE]


def holds(program: Planted | Right, found: list[Finding]) -> bool:
    """Whether the cause, and nothing else, is told; of a right program nothing."""
    if isinstance(program, Right):
        return not found
    return {one.rule for one in found} == {program.rule} and any(program.says in one.what for one in found)


def main(names: list[str]) -> int:
    """Prints a line for each program."""
    bad = 0
    for title, programs in (("planted errors", ERRORS), ("right programs", RIGHT)):
        chosen = [one for one in programs if not names or one.id in names or title.split()[0] in names]
        print(f"| {title} | ranks | as it should be | told |\n|---|--:|---|---|", flush=True)
        for ranks in sorted({one.ranks for one in chosen}):
            with gang_of(ranks) as gang, TemporaryDirectory() as folder:
                for one in (one for one in chosen if one.ranks == ranks):
                    try:
                        found = told(gang.run(proved, one.make, f"{folder}/{one.id}")[0])
                        said, good = "; ".join(f"{f.rule}: {f.what}" for f in found), holds(one, found)
                    except GangError as error:
                        lines = [line for line in str(error).splitlines() if "Error" in line or "prepkit/" in line]
                        said, good = " ".join(" ".join(lines[-6:]).split()), False
                    bad += not good
                    print(f"| {one.id} | {ranks} | {'yes' if good else 'NO'} | {said[:700]} |", flush=True)
    return bad > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
