"""Kills ``examples/whole_run.py`` at drawn moments, goes on under the same engine and under another, and compares.

``python -m tests.tools.killed_and_resumed`` takes some ten minutes on two cores, prints a table, and ends with 1 where
a loss, a norm or an evaluation is not that of a run that nobody killed: to the bit on the same engine, 1e-5 on another.
``--seed 7`` draws other moments; words after it choose the engines that are killed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

from attrs import frozen

from tests.support.deepspeed_cpu import own_extensions
from tests.support.fork_server import ForkServers
from tests.support.gang import Gang
from tests.support.whole_run import STEPS, WORLDS, Curve, Kill, curve, difference, kill, train

CLOSE = 1e-5
"""Relative difference of any value between two engines."""


@frozen(kw_only=True)
class Case:
    """One run: killed under one engine, gone on with under another."""

    engine: str
    kill: Kill
    then: str


@frozen(kw_only=True)
class Seen:
    """What became of a case."""

    unfinished: bool
    """Whether the kill has left a checkpoint that was being written."""
    difference: float
    """The largest relative one to the run that nobody killed."""
    well: bool


def cases(engines: list[str], seed: int) -> Iterator[Case]:
    """Each engine is killed while it trains, while it saves, and with all its ranks; then goes on, also elsewhere."""
    draw = random.Random(seed)
    for engine in engines:
        world = WORLDS[engine]
        ways: tuple[tuple[Literal["training", "saving"], bool], ...]
        ways = (("training", False), ("saving", False), ("training", True), ("saving", True))
        for when, everyone in ways[: None if world > 1 else 2]:
            at = draw.randrange(3, STEPS) if when == "training" else draw.randrange(1, 6)
            victims = tuple(range(world)) if everyone else (draw.randrange(world),)
            longest = 0.03 if when == "training" else 0.008  # a save of so small a model takes some 10 ms
            how = Kill(victims=victims, when=when, at=at, after_s=longest * draw.random())
            others = [other for other in WORLDS if other != engine]
            for then in (engine, draw.choice(others)):
                yield Case(engine=engine, kill=how, then=then)


def run(engines: list[str], seed: int, say: Callable[[str], None]) -> int:
    """Prints a row per case; returns how many are not as they should be."""
    wrong = 0
    with closing(ForkServers()) as servers, tempfile.TemporaryDirectory() as folder:
        gangs = {world: Gang(world, servers) for world in sorted(set(WORLDS.values()))}
        calm: dict[str, Curve] = {}
        say("| engine | killed | unfinished | goes on under | largest difference | |\n|---|---|---|---|---|---|")
        for number, case in enumerate(cases(engines, seed)):
            seen = _one(case, Path(folder, str(number)), gangs, calm, Path(folder))
            wrong += not seen.well
            torn, verdict = "yes" if seen.unfinished else "", "as it should be" if seen.well else "WRONG"
            say(f"| {case.engine} | {case.kill} | {torn} | {case.then} | {seen.difference:.1e} | {verdict} |")
        for gang in gangs.values():
            gang.close()
    return wrong


def _one(case: Case, folder: Path, gangs: dict[int, Gang], calm: dict[str, Curve], shelf: Path) -> Seen:
    if case.engine not in calm:
        gangs[WORLDS[case.engine]].run_fresh(train, case.engine, str(shelf / case.engine), None, timeout=60)
        calm[case.engine] = curve(shelf / case.engine)
    kill(gangs[WORLDS[case.engine]], case.engine, folder, case.kill)
    unfinished = any(folder.glob("*.partial"))
    gangs[WORLDS[case.then]].run_fresh(train, case.then, str(folder), None, timeout=60)
    apart = difference(calm[case.engine], curve(folder))
    return Seen(unfinished=unfinished, difference=apart, well=apart <= (0.0 if case.then == case.engine else CLOSE))


def main() -> int:
    """Returns 1 where something is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("engines", nargs="*", help=", ".join(WORLDS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    own_extensions()
    return min(1, run(args.engines or list(WORLDS), args.seed, lambda text: print(text, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
