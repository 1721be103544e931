"""Runs accelerate and prepkit over the same files and models, and prints where they differ and which row says so.

``python -m tests.tools.differential`` takes some minutes on two cores, and ends with 1 where a difference has no row of
``docs/deviations.md``. Words after it choose engines; ``--drawn 20 --seed 1`` draws so many cases more for each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.differential.case import Case, file_of
from tests.differential.deviations import CHANGES, OURS, THEIRS, Verdict, judged
from tests.differential.grid import ENGINES, drawn, grid
from tests.differential.sides import both
from tests.support.deepspeed_cpu import own_extensions
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang, GangError


def verdicts(cases: Iterable[Case], gangs: dict[int, Gang], folder: Path) -> Iterator[tuple[Case, Verdict]]:
    """Each case with what is to be said of it, over all ranks."""
    path = folder / "accelerate.json"
    for case in cases:
        path.write_text(json.dumps(file_of(case)))
        try:
            ranks = [judged(case, *seen) for seen in gangs[case.world].run_fresh(both, case, path)]
        except GangError as error:
            yield case, Verdict((), (str(error).strip().splitlines()[-1][:200],))
            continue
        rows = {row: None for rank in ranks for row in rank.rows}
        left = {line: None for rank in ranks for line in rank.unexplained}
        yield case, Verdict(tuple(rows), tuple(left), both_refuse=all(rank.both_refuse for rank in ranks))


KINDS = ("equal", "both refuse", "deviation by row", "unexplained")


def kind(verdict: Verdict) -> str:
    """The column in which a case is counted."""
    if verdict.unexplained:
        return "unexplained"
    return "deviation by row" if verdict.rows else "both refuse" if verdict.both_refuse else "equal"


def report(engines: list[str], number: int, seed: int) -> int:
    """Prints the tables; returns how many cases have a difference without a row, and rows no case."""
    by_row: dict[str, Counter[str]] = {engine: Counter() for engine in engines}
    counts: dict[str, Counter[str]] = {engine: Counter() for engine in engines}
    with (
        TemporaryDirectory() as folder,
        closing(ForkServers()) as servers,
        closing(Gang(1, servers)) as alone,
        closing(Gang(2, servers)) as pair,
    ):
        for engine in engines:
            cases = grid(engine) + drawn(engine, number, seed)
            for case, verdict in verdicts(cases, {1: alone, 2: pair}, Path(folder)):
                counts[engine][kind(verdict)] += 1
                by_row[engine].update(verdict.rows)
                for line in verdict.unexplained:
                    print(f"UNEXPLAINED {case}: {line}", flush=True)
    every = sum(counts.values(), Counter[str]())
    print(f"| engine | cases | {' | '.join(KINDS)} |\n|---|---|{'---|' * len(KINDS)}")
    for engine, count in {**counts, "all": every}.items():
        print(f"| {engine} | {count.total()} | {' | '.join(str(count[name]) for name in KINDS)} |")
    print(f"\n| row | {' | '.join(engines)} |\n|---|{'---|' * len(engines)}")
    for row in sorted({row for counter in by_row.values() for row in counter}):
        print(f"| {row} | {' | '.join(str(by_row[engine][row] or '') for engine in engines)} |")
    used = {row for counter in by_row.values() for row in counter}
    idle = {one.row for one in (*CHANGES, *THEIRS, *OURS)} - used if set(engines) == set(ENGINES) else set[str]()
    for row in sorted(idle):
        print(f"UNUSED {row}: it explains no case, and may go")
    return every["unexplained"] + len(idle)


def main() -> None:
    """Prints the tables, and ends with 1 where something is unexplained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="*", metavar="engine", help=", ".join(ENGINES))
    parser.add_argument("--drawn", type=int, default=8, help="cases drawn for each engine, besides the grid")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    own_extensions()
    sys.exit(bool(report(args.engines or list(ENGINES), args.drawn, args.seed)))


if __name__ == "__main__":
    main()
