"""Tests run inside a process that has collected them, by forks of it."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field, frozen

from tests.mutants import gangs, patch
from tests.mutants.mutant import Mutant
from tests.mutants.nursery import Ended, Note, Nursery
from tests.mutants.reach import Key, Lines, Run, Tracer, by_scope, standing

PROFILE = "mutants"
"""Name of the hypothesis profile: few examples, always the same, and no shrinking."""
IMPORT = "(import)"
"""Stands for a test where a mutant kept the tests from being collected."""
GANGS = frozenset({"gang2", "gang4"})
BATCH = 20
"""Tests that are surveyed in one process."""
KEPT = 200
"""After so many they are written to disk."""
BATCH_S = 3600.0
"""Seconds that they may take together."""


@frozen
class Killed:
    """A test failed."""

    test: str
    how: str


@frozen
class Survived:
    """No test failed."""


Verdict = Killed | Survived


@define(eq=False)  # pytest wants its plugins hashable
class Host:
    """A plugin of pytest: hands the collected session to ``act`` in place of running it, and hears of failures."""

    act: Callable[[Host, pytest.Session], None]
    failed: Killed | None = None
    items: dict[str, pytest.Item] = field(factory=dict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.act(self, session)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._hear(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._hear(report, IMPORT)

    def _hear(self, report: Any, name: str = "") -> None:
        if report.failed and self.failed is None:
            self.failed = Killed(name or report.nodeid, report.longreprtext.strip().rpartition("\n")[2][:300])


def collect(paths: Iterable[str], host: Host) -> int:
    """Collects these files and folders, and calls the host. The exit code of pytest."""
    return int(pytest.main([*paths, "-q", "-p", "no:cacheprovider", "--no-header"], plugins=[host]))


def settle(examples: int) -> None:
    """Makes hypothesis draw the same few examples each time. To be called before the tests are imported."""
    from hypothesis import Phase, settings

    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        PROFILE, max_examples=examples, deadline=None, derandomize=True, database=None, phases=phases
    )
    settings.load_profile(PROFILE)
    os.environ["HYPOTHESIS_PROFILE"] = PROFILE
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


# --- with a mutant -------------------------------------------------------------------------------------------------


def attempt(host: Host, tests: Sequence[str], limits: Mapping[str, float], note: Note) -> Verdict:
    """Runs tests in this process until one fails. One that takes more than its limit of CPU seconds ends it."""
    host.failed = None
    items = [host.items[test] for test in tests if test in host.items]
    if any(GANGS.intersection(getattr(item, "fixturenames", ())) for item in items):
        gangs.fork_workers()
    for item, following in zip(items, [*items[1:], None], strict=True):
        note(item.nodeid)
        signal.setitimer(signal.ITIMER_PROF, limits.get(item.nodeid, 60.0))
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        except BaseException as error:  # pytest's own exits, and what a mutant lets through
            return Killed(item.nodeid, f"{type(error).__name__}: {error}"[:300])
        if host.failed is not None:
            return host.failed
    return Survived()


def warm(host: Host, mutant: Mutant, tests: Sequence[str], limits: Mapping[str, float], note: Note) -> Verdict:
    """In a fork of the collected session: the mutated function takes the place of the other."""
    if not patch.put_in_place(mutant):
        raise LookupError(f"{mutant.place}: no function {mutant.scope} to put it into")
    return attempt(host, tests, limits, note)


def cold(mutant: Mutant, tests: Sequence[str], limits: Mapping[str, float], note: Note) -> Verdict:
    """In a fork that has not imported the package yet: the mutated module is imported, then the tests."""
    verdicts: list[Verdict] = []

    def act(host: Host, session: pytest.Session) -> None:
        verdicts.append(host.failed or attempt(host, tests, limits, note))

    note(IMPORT)
    patch.hook(mutant)
    signal.setitimer(signal.ITIMER_PROF, 120)
    code = collect(dict.fromkeys(test.partition("::")[0] for test in tests), Host(act))
    return verdicts[0] if verdicts else Killed(IMPORT, f"pytest ended with {code}")


# --- without one ---------------------------------------------------------------------------------------------------


def survey(
    host: Host, tests: Sequence[str], workers: int, tell: Callable[[str], None], keep: Callable[[dict[str, Run]], None]
) -> dict[str, Run]:
    """Each of these tests, with the lines that it runs, its time, and whether it passes here; kept."""
    standing()  # the children need not parse the package again
    nursery = Nursery()
    runs: dict[str, Run] = {}
    keys: dict[Key, Key] = {}  # equal ones are one, else they fill the memory
    waiting = _batches(host, tests)
    while waiting or nursery.children:
        while waiting and len(nursery.children) < workers:
            batch = waiting.pop(0)
            nursery.start(batch, partial(_surveyed, host, batch), BATCH_S)
        wait(nursery.wires, 1.0)
        for batch, found in nursery.ended():
            before = len(runs)
            done = found.notes if isinstance(found, Ended) else found
            runs |= {
                run.test: evolve(run, lines={keys.setdefault(key, key): v for key, v in run.lines.items()})
                for run in done
            }
            rest = tuple(test for test in batch if test not in runs)
            if rest:  # the first of them ended the process
                tell(f"{rest[0]} {found.how}")
                runs[rest[0]] = Run(test=rest[0], passed=False, seconds=0.0, gang=False, lines={})
            if rest[1:]:
                waiting.append(rest[1:])
            if len(runs) // KEPT > before // KEPT or not (waiting or nursery.children):
                keep(runs)
            tell(f"surveyed {len(runs)} of {len(tests)} tests")
    return runs


def _batches(host: Host, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Tests of one file, with or without worker processes."""
    found = []
    for _, group in groupby(names, key=lambda test: (test.partition("::")[0], _needs_gang(host, test))):
        tests = tuple(group)
        found += [tests[start : start + BATCH] for start in range(0, len(tests), BATCH)]
    return found


def _needs_gang(host: Host, test: str) -> bool:
    return bool(GANGS.intersection(getattr(host.items[test], "fixturenames", ())))


def _surveyed(host: Host, tests: Sequence[str], note: Note) -> list[Run]:
    folder = Path(tempfile.mkdtemp())
    os.environ[gangs.FOLDER] = str(folder)
    gangs.fork_workers()
    runs = []
    items = [host.items[test] for test in tests]
    for item, following in zip(items, [*items[1:], None], strict=True):
        patch.forget_results()
        host.failed = None
        began, tracer = _clocks(), Tracer()
        with tracer:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        gang = _needs_gang(host, item.nodeid)
        cpu_s, wall_s = (after - before for before, after in zip(began, _clocks(), strict=True))
        lines = by_scope(_joined(tracer.lines(), gangs.gathered(folder)))
        passed = host.failed is None
        run = Run(test=item.nodeid, passed=passed, seconds=wall_s if gang else cpu_s, gang=gang, lines=lines)
        note(run)
        runs.append(run)
    return runs


def _clocks() -> tuple[float, float]:
    times = os.times()
    return sum(times[:4]), time.monotonic()


def _joined(one: Lines, other: Lines) -> Lines:
    return {path: one.get(path, set()) | other.get(path, set()) for path in one.keys() | other.keys()}
