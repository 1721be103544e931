"""Tries mutants, several at a time: in forks of a process that has collected the tests, or has yet to import."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Literal

from attrs import define, evolve, field, frozen

from tests.mutants.areas import Group
from tests.mutants.host import IMPORT, Host, Killed, Survived, Verdict, attempt, cold, warm
from tests.mutants.mutant import Mutant
from tests.mutants.nursery import Ended, Nursery
from tests.mutants.reach import Reach, Run

Way = Literal["warm", "cold"]


@frozen(kw_only=True)
class Attack:
    """Tests that are run in one child, in this order."""

    way: Way
    tests: tuple[str, ...]
    limits: dict[str, float]
    """CPU seconds by test."""
    wall_s: float


@define(kw_only=True)
class Trial:
    """A mutant that is being tried."""

    mutant: Mutant
    attacks: list[Attack]
    began: float
    suspect: Killed | None = None
    """A test that failed, while it is being seen whether it passes without the mutant."""


@define(kw_only=True)
class Score:
    """The driver. ``tell`` hears every verdict, with the seconds that it took."""

    host: Host
    group: Group
    reach: Reach
    control: Connection
    """To the process that has not imported the package."""
    workers: int
    budget_s: float
    """Seconds of tests that one attack may hold."""
    tell: Callable[[Mutant, Verdict, float], None]
    nursery: Nursery = field(factory=Nursery)
    trials: dict[str, Trial] = field(factory=dict)
    alibis: dict[str, bool] = field(factory=dict)
    """Tests that have killed, and whether they pass alone without a mutant; for ``(import)`` by path."""
    kills: dict[str, Counter[str]] = field(factory=lambda: defaultdict(Counter))
    """How many mutants of a file or scope each test has killed."""

    def run(self, mutants: Iterable[Mutant]) -> None:
        """Until every one has its verdict."""
        waiting = list(mutants)
        while waiting or self.trials:
            while waiting and len(self.trials) < self.workers:
                mutant = waiting.pop(0)
                attacks = list(attacks_on(mutant, self.reach, self.group, self.budget_s, self.kills))
                self.trials[mutant.id] = Trial(mutant=mutant, attacks=attacks, began=time.monotonic())
                self._next(self.trials[mutant.id])
            if self.trials:
                wait([self.control, *self.nursery.wires], min(1.0, self.nursery.patience_s))
            for key, value in [*self.nursery.ended(), *self._cold_news()]:
                self._heard(self.trials[key], value)

    def _cold_news(self) -> Iterator[tuple[str, Any]]:
        while self.control.poll():
            key, value, cpu_s = self.control.recv()
            self.nursery.cpu_s += cpu_s
            yield key, value

    def _next(self, trial: Trial) -> None:
        if not trial.attacks:
            self._settle(trial, Survived())
            return
        attack, key = trial.attacks[0], trial.mutant.id
        if attack.way == "warm":
            act = partial(warm, self.host, trial.mutant, attack.tests, attack.limits)
            self.nursery.start(key, act, attack.wall_s)
        else:
            self.control.send((key, trial.mutant, attack.tests, attack.limits, attack.wall_s))

    def _heard(self, trial: Trial, value: Any) -> None:
        verdict = _verdict(value, trial.mutant)
        if trial.suspect is not None:
            self._acquit(trial, verdict)
        elif verdict is None:  # the function cannot be exchanged in place
            trial.attacks = [evolve(attack, way="cold") for attack in trial.attacks]
            self._next(trial)
        elif isinstance(verdict, Survived):
            trial.attacks.pop(0)
            self._next(trial)
        else:
            self._doubt(trial, verdict)

    def _doubt(self, trial: Trial, killed: Killed) -> None:
        """A kill counts when the test passes without the mutant; each test is asked for that once."""
        alibi = self._alibi_name(trial, killed)
        if self.alibis.get(alibi):
            self._settle(trial, killed)
            return
        trial.suspect = killed
        attack = trial.attacks[0]
        if killed.test == IMPORT:
            same = evolve(trial.mutant, new=trial.mutant.old)
            self.control.send((trial.mutant.id, same, attack.tests[:1], attack.limits, attack.wall_s))
        else:
            act = partial(attempt, self.host, (killed.test,), attack.limits)
            self.nursery.start(trial.mutant.id, act, attack.wall_s)

    def _acquit(self, trial: Trial, verdict: Verdict | None) -> None:
        killed, trial.suspect = trial.suspect, None
        assert killed is not None, "only a suspect is asked for an alibi"
        alibi = self._alibi_name(trial, killed)
        self.alibis[alibi] = isinstance(verdict, Survived)
        if self.alibis[alibi]:
            self._settle(trial, killed)
            return
        if killed.test == IMPORT:
            raise RuntimeError(f"{trial.mutant.path} cannot be imported alone, without a mutant: {verdict}")
        self.reach.runs[killed.test] = evolve(self.reach.runs[killed.test], passed=False)
        trial.attacks = [_without(attack, killed.test) for attack in trial.attacks]
        self._next(trial)

    @staticmethod
    def _alibi_name(trial: Trial, killed: Killed) -> str:
        return f"{IMPORT} {trial.mutant.path}" if killed.test == IMPORT else killed.test

    def _settle(self, trial: Trial, verdict: Verdict) -> None:
        del self.trials[trial.mutant.id]
        if isinstance(verdict, Killed):
            self.kills[trial.mutant.path][verdict.test] += 1
            self.kills[f"{trial.mutant.path} {trial.mutant.scope}"][verdict.test] += 1
        self.tell(trial.mutant, verdict, time.monotonic() - trial.began)


def _without(attack: Attack, test: str) -> Attack:
    return evolve(attack, tests=tuple(name for name in attack.tests if name != test))


def _verdict(value: Any, mutant: Mutant) -> Verdict | None:
    """None: the mutant has to be imported. Raises ``RuntimeError`` when it is the machinery that failed."""
    if not isinstance(value, Ended):
        found: Verdict = value
        return found
    if "LookupError" in value.how:
        return None
    if value.how.startswith("raised") and "SyntaxError" not in value.how:
        raise RuntimeError(f"{mutant.id}\n{value.how}")
    return Killed(str(value.notes[-1]) if value.notes else IMPORT, value.how)


# --- which tests ---------------------------------------------------------------------------------------------------


def attacks_on(
    mutant: Mutant, reach: Reach, group: Group, budget_s: float, kills: dict[str, Counter[str]]
) -> Iterator[Attack]:
    """The children that try a mutant, the cheapest first; none if no test runs its code."""
    runs = reach.running(mutant)
    alone, gangs = [run for run in runs if not run.gang], [run for run in runs if run.gang]
    early = reach.at_import(mutant)
    if mutant.scope and alone:
        yield _attack("warm", _ordered(alone, mutant, kills), budget_s)
    if mutant.scope and gangs:
        yield _attack("warm", _ordered(gangs, mutant, kills), 3 * budget_s)
    if early or not mutant.scope:
        area = next(area for area in group.areas if mutant.path.startswith(area.folder))
        found = [run for run in reach.of_file(mutant.path) if not run.gang]
        near = [run for run in found if run.test.startswith(area.near)]
        far = [run for run in found if not run.test.startswith(area.near)]
        for some in (near, _readers(group, reach, {run.test for run in found}), far):
            if some:
                yield _attack("cold", _ordered(some, mutant, kills), 3 * budget_s)  # every test runs every table


def _readers(group: Group, reach: Reach, others: set[str]) -> list[Run]:
    """Tests that read tables, and are not among the others."""
    runs = (run for run in reach.runs.values() if run.passed and not run.gang)
    return [run for run in runs if run.test not in others and any(map(run.test.startswith, group.tables))]


def _ordered(runs: list[Run], mutant: Mutant, kills: dict[str, Counter[str]]) -> list[Run]:
    """Those that killed its neighbours first, then the fastest case of each test, then the next case of each."""
    scope, file = kills[f"{mutant.path} {mutant.scope}"], kills[mutant.path]
    seen: Counter[str] = Counter()
    turn: dict[str, int] = {}
    for run in sorted(runs, key=lambda run: (run.seconds, run.test)):
        function = run.test.partition("[")[0]
        turn[run.test] = seen[function]
        seen[function] += 1
    return sorted(runs, key=lambda run: (-scope[run.test], -file[run.test], turn[run.test], run.seconds, run.test))


def _attack(way: Way, runs: list[Run], budget_s: float) -> Attack:
    taken: list[Run] = []
    total = 0.0
    for run in runs:
        if not taken or total + run.seconds <= budget_s:
            taken.append(run)
            total += run.seconds
    limits = {run.test: 5 + 10 * run.seconds for run in taken}
    return Attack(way=way, tests=tuple(run.test for run in taken), limits=limits, wall_s=120 + 10 * total)


# --- the process that has not imported the package -------------------------------------------------------------------


def start_cold() -> Connection:
    """Forks the process that tries mutants of what runs at import; the wire to it. It ends with this process."""
    ours, theirs = Pipe()
    if os.fork() == 0:
        ours.close()
        try:
            _serve(theirs)
        finally:
            os._exit(0)
    theirs.close()
    return ours


def _serve(control: Connection) -> None:
    nursery = Nursery()
    while True:
        wait([control, *nursery.wires], min(1.0, nursery.patience_s))
        while control.poll():
            try:
                key, mutant, tests, limits, wall_s = control.recv()
            except EOFError:
                return
            nursery.start(key, partial(cold, mutant, tests, limits), wall_s)
        for key, value in nursery.ended():
            control.send((key, value, nursery.cpu_s))
            nursery.cpu_s = 0.0
