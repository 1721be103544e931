"""Run the tests that a behaviour row cites with a planner that drops the row's setting.

``tests/test_settings.py`` proves each setting as far as the plan. This also runs the real programs that rows cite, for
all settings (``python -m tests.tools.dropped_settings``) or for those that are named (``... FSDP1.offload``). It
prints for each setting the cited tests that fail when it is dropped, and those that pass, which prove something else.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.support.behaviour_rows.settings import SETTINGS_OF
from tests.support.dropped_setting import VARIABLE
from tests.test_behaviour_rows import answered_by, written

ROOT = Path(__file__).parents[2]
OUTCOME = re.compile(r"(?m)^(PASSED|FAILED|ERROR) \S+::(\w+)")


def cited() -> dict[str, list[str]]:
    """Node ids of the tests that are cited by rows about a setting, by setting."""
    where = written()
    found: dict[str, set[str]] = defaultdict(set)
    for row, settings in SETTINGS_OF.items():
        names = (answer.removeprefix("test ") for answer in answered_by(row) if answer.startswith("test "))
        nodes = [f"{path}::{name}" for name in names for path in where[name]]
        for setting in settings:
            found[setting].update(nodes)
    return {setting: sorted(nodes) for setting, nodes in sorted(found.items())}


def outcomes(setting: str, nodes: list[str]) -> tuple[set[str], set[str]]:
    """Names of the tests of which some case fails, and of those of which none does."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "--tb=no", "-p", "no:cacheprovider", *nodes]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, VARIABLE: setting}, capture_output=True, text=True, check=False
    )
    lines = OUTCOME.findall(done.stdout)
    failed = {name for outcome, name in lines if outcome != "PASSED"}
    return failed, {name for _, name in lines} - failed


def main(wanted: list[str]) -> int:
    """Print the outcomes; 1 where no cited test notices a setting that is missing."""
    blind = []
    for setting, nodes in cited().items():
        if wanted and setting not in wanted:
            continue
        failed, passed = outcomes(setting, nodes) if nodes else (set(), set())
        print(f"{setting}: {len(failed)} of {len(nodes)} cited tests notice that it is dropped")
        for mark, names in (("fails ", failed), ("passes", passed)):
            for name in sorted(names):
                print(f"  {mark} {name}", flush=True)
        blind += [setting] * (not failed)
    if blind:
        print(f"noticed in the plan alone: {', '.join(blind)}")
    return bool(blind)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
