"""Prints which rule finds each planted error, and what an audit says of programs with nothing wrong.

``python -m tests.tools.audit`` takes a minute or two on two cores, and ends with 1 where an error is not found by the
rule that ``tests/audit/errors.py`` names, or a clean program has a finding above a note. Words after it choose
programs: ``python -m tests.tools.audit no_wrapper clean_plain_ddp``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing

from tests.audit.clean import CLEAN, CleanProgram
from tests.audit.errors import ERRORS, NOT_MADE, PlantedError
from tests.audit.programs import Outcome, audited
from tests.audit.test_loops import all_heard
from tests.audit.wrong_loops import LOOPS
from tests.support.deepspeed_cpu import own_extensions
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang, GangError


def outcome(gangs: dict[int, Gang], one: PlantedError | CleanProgram) -> Outcome | str:
    """What rank 0 has seen, or how the program failed."""
    try:
        seen: Outcome = gangs[one.ranks].run(audited, one.id)[0]
    except GangError as error:
        return str(error).strip().splitlines()[-1][:120]
    return seen


def table_of_errors(gangs: dict[int, Gang], words: Sequence[str]) -> int:
    print("| error | what is wrong | library | ranks | found by | seconds |\n|---|---|---|---|---|---|")
    missed = 0
    for one in ERRORS:
        if words and one.id not in words:
            continue
        seen = outcome(gangs, one)
        rules = sorted({rule for rule, _, _ in seen[1]}) if not isinstance(seen, str) else []
        found = one.rule in rules
        missed += not found
        others = [rule for rule in rules if rule != one.rule]
        said = seen if isinstance(seen, str) else f"{one.rule}{' and ' * bool(others)}{', '.join(others)}"
        by = said if found else f"NOT FOUND ({seen if isinstance(seen, str) else ', '.join(rules)})"
        seconds = f"{seen[0]:.3f}" if not isinstance(seen, str) else ""
        print(f"| {one.id} | {one.what} | {one.library} | {one.ranks} | {by} | {seconds} |", flush=True)
    for what, why in NOT_MADE if not words else ():
        print(f"| {what} | not made here: {why} | | | | |")
    return missed


def table_of_clean_programs(gangs: dict[int, Gang], words: Sequence[str]) -> int:
    print("\n| clean program | library | ranks | above a note | notes | seconds |\n|---|---|---|---|---|---|")
    wrong = 0
    for one in CLEAN:
        if words and one.id not in words:
            continue
        seen = outcome(gangs, one)
        if isinstance(seen, str):
            wrong += 1
            print(f"| {one.id} | {one.library} | {one.ranks} | DID NOT RUN: {seen} | | |", flush=True)
            continue
        above = [rule for rule, severity, _ in seen[1] if severity != "note"]
        notes = [rule for rule, severity, _ in seen[1] if severity == "note"]
        wrong += bool(above)
        row = (one.id, one.library, str(one.ranks), ", ".join(above) or "0", ", ".join(notes), f"{seen[0]:.3f}")
        print(f"| {' | '.join(row)} |", flush=True)
    return wrong


def table_of_loops(gangs: dict[int, Gang], words: Sequence[str]) -> int:
    """Whole loops up to their first step, as ``prepkit audit SCRIPT`` sees them."""
    print("\n| loop | library | ranks | has to be found | above a note |\n|---|---|---|---|---|")
    wrong = 0
    for one in LOOPS:
        if words and one.id not in words:
            continue
        try:
            found = gangs[one.ranks].run(all_heard, [one.id])[0][one.id]
        except GangError as error:
            wrong += 1
            print(f"| {one.id} | {one.library} | DID NOT RUN: {str(error).strip().splitlines()[-1][:120]} | | |")
            continue
        above = sorted({rule for rule, severity, _ in found if severity != "note"})
        wrong += one.rule not in above if one.rule else bool(above)
        print(f"| {one.id} | {one.library} | {one.ranks} | {one.rule} | {', '.join(above) or '0'} |", flush=True)
    return wrong


def main(words: Sequence[str]) -> int:
    os.environ["DS_ACCELERATOR"] = "cpu"
    own_extensions()
    with closing(ForkServers()) as servers, closing(Gang(1, servers)) as alone, closing(Gang(2, servers)) as pair:
        gangs = {1: alone, 2: pair}
        missed, wrong = table_of_errors(gangs, words), table_of_clean_programs(gangs, words)
        odd = table_of_loops(gangs, words)
    print(f"\n{missed} errors were not found, {wrong} clean programs were not clean, {odd} loops were judged wrongly")
    return 1 if missed or wrong or odd else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
