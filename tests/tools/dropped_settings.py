"""Run the tests that a behaviour row cites with a planner that drops the row's setting.

``tests/test_settings_in_torch.py`` proves each setting from the config to the library's call, and sees itself fail
without it. This runs every other test that a row cites too, those of several processes included: for all rows
(``python -m tests.tools.dropped_settings``), or for rows and settings that are named (``... M2-4 FSDP1.offload``). It
prints for each setting which cited tests fail when it is dropped, and which do not, since they prove something else.
``--alone`` leaves out tests that start other processes. All runs in one process: a test is collected once and run once
for each setting.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from attrs import define, field, frozen

from tests.support.behaviour_rows.settings import SETTINGS_OF
from tests.support.dropped_setting import dropping
from tests.test_behaviour_rows import answered_by, written

ROOT = Path(__file__).parents[2]
PROCESSES = {"gang2", "gang4", "fork_servers", "launch"}
"""Fixtures of tests that need other processes."""


@frozen
class Proof:
    """A setting that a row is about, and the tests that the row cites."""

    row: str
    setting: str
    tests: tuple[str, ...]
    """Node ids, without what parametrizes them."""


@cache
def proofs() -> tuple[Proof, ...]:
    """Every setting of every row."""
    where = written()
    return tuple(
        Proof(
            row, setting, tuple(dict.fromkeys(f"{path}::{name}" for name in cited(row) for path in where.get(name, ())))
        )
        for row, settings in SETTINGS_OF.items()
        for setting in settings
    )


def cited(row: str) -> list[str]:
    """Names of the tests that the row cites, by itself or by the rows that it points to."""
    return [answer.removeprefix("test ") for answer in answered_by(row) if answer.startswith("test ")]


@define
class Dropper:
    """A plugin of pytest that runs, for each setting, the tests that are cited about it."""

    wanted: tuple[Proof, ...]
    alone: bool
    """Whether to leave out tests of several processes."""
    seen: dict[tuple[str, str], bool] = field(factory=dict)
    """Whether a test fails without a setting, by setting and node id."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run each pair of a setting and a test once."""
        items: dict[str, list[Any]] = {}
        for item in session.items:
            items.setdefault(item.nodeid.partition("[")[0], []).append(item)
        for proof in self.wanted:
            for name in proof.tests:
                key = (proof.setting, name)
                if key not in self.seen and not (self.alone and _many(items[name])):
                    self.seen[key] = _any_fails(proof.setting, items[name])
        return True


def _any_fails(setting: str, items: list[Any]) -> bool:
    own = [item for item in items if f"[{setting}" in item.nodeid]  # a case of its own
    with dropping(setting):
        return any(_failed(item) for item in own or items)


def _many(items: list[Any]) -> bool:
    return any(PROCESSES & set(item.fixturenames) for item in items)


def _failed(item: Any) -> bool:
    item._initrequest()  # the same test again, with fixtures of its own
    # What is shared by a module is made anew for each setting, what is shared by the session (gangs) is kept.
    return any(report.failed for report in runtestprotocol(item, nextitem=item.session, log=False))


def run(wanted: Iterable[Proof], *, alone: bool) -> dict[tuple[str, str], bool]:
    """Whether each cited test fails without the setting, by setting and node id."""
    dropper = Dropper(tuple(wanted), alone)
    nodes = sorted({name for proof in dropper.wanted for name in proof.tests})
    options = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    code = pytest.main([*options, *nodes], plugins=[dropper])
    assert code in (0, 5), f"pytest ended with {code}"
    return dropper.seen


def main(arguments: list[str]) -> int:
    """Print what each cited test does; 1 where none of a row notices that a setting is missing."""
    names = {one for one in arguments if not one.startswith("--")}
    wanted = [proof for proof in proofs() if not names or {proof.row, proof.setting} & names]
    begun = time.monotonic()
    seen = run(wanted, alone="--alone" in arguments)
    blind = 0
    for proof in wanted:
        outcomes = {name: seen[proof.setting, name] for name in proof.tests if (proof.setting, name) in seen}
        blind += not any(outcomes.values())
        print(f"{proof.row} {proof.setting}: {sum(outcomes.values())} of {len(outcomes)} cited tests notice")
        for name, fails in sorted(outcomes.items()):
            print(f"  {'fails ' if fails else 'passes'} {name.partition('::')[2]}")
    print(f"{len(wanted) - blind} of {len(wanted)} proofs hold, {time.monotonic() - begun:.0f} s")
    return bool(blind)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
