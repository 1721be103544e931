"""Which test runs which lines, and how long it takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from attrs import define, field, frozen

from tests.mutants.mutant import Mutant, digest
from tests.mutants.patch import PACKAGE, ROOT

Lines = dict[str, set[int]]
"""Line numbers by path, relative to the root."""


class Tracer:
    """Collects the lines of the package that run inside a ``with``; a tracer that stood before is pushed aside."""

    def __init__(self) -> None:
        import coverage

        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=[str(ROOT / PACKAGE / "*")])

    def __enter__(self) -> Self:
        self.coverage.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.coverage.stop()

    def lines(self) -> Lines:
        """What has run."""
        data = self.coverage.get_data()
        root = f"{ROOT}/"
        return {path.removeprefix(root): set(data.lines(path) or ()) for path in data.measured_files()}


@frozen(kw_only=True)
class Run:
    """What a test did without any mutant."""

    test: str
    passed: bool
    seconds: float
    gang: bool
    """Whether it needs worker processes."""
    lines: Mapping[str, tuple[tuple[int, int], ...]]
    """Ranges of lines by path, both ends included."""

    def runs(self, path: str, lines: Iterable[int]) -> bool:
        """Whether one of these lines was run."""
        return any(first <= line <= last for first, last in self.lines.get(path, ()) for line in lines)


@define(kw_only=True)
class Reach:
    """The runs of all tests of a group, and the lines that run when modules and tests are imported."""

    of: str = ""
    """Digest of everything that the runs depend on."""
    imports: Lines = field(factory=dict)
    runs: dict[str, Run] = field(factory=dict)

    def at_import(self, mutant: Mutant) -> bool:
        """Whether the mutated code runs before any test does."""
        return not self.imports.get(mutant.path, set()).isdisjoint(mutant.lines)

    def tests(self, mutant: Mutant) -> list[Run]:
        """Those that run the mutated code, the fastest first."""
        found = (run for run in self.runs.values() if run.passed and run.runs(mutant.path, mutant.lines))
        return sorted(found, key=lambda run: (run.seconds, run.test))

    def of_file(self, path: str) -> list[Run]:
        """Tests that run anything of a file."""
        found = (run for run in self.runs.values() if run.passed and path in run.lines)
        return sorted(found, key=lambda run: (run.seconds, run.test))


def ranges(lines: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ranges of consecutive numbers.

    >>> ranges({1, 2, 3, 7})
    ((1, 3), (7, 7))
    """
    found: list[tuple[int, int]] = []
    for line in sorted(lines):
        if found and found[-1][1] == line - 1:
            found[-1] = (found[-1][0], line)
        else:
            found.append((line, line))
    return tuple(found)


def sources(*folders: str) -> str:
    """Digest of all Python files of these folders and files."""
    roots = [ROOT / folder for folder in folders]
    files = sorted(file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py")))
    return digest("".join(f"{file.relative_to(ROOT)} {digest(file.read_bytes())}\n" for file in files))


def load(file: Path) -> Reach:
    """What ``save`` wrote; an empty one if there is none."""
    if not file.exists():
        return Reach()
    data = json.loads(file.read_text())
    return Reach(
        of=data["of"],
        imports={path: set(lines) for path, lines in data["imports"].items()},
        runs={run["test"]: _run(run) for run in data["runs"]},
    )


def _run(data: dict[str, Any]) -> Run:
    lines = {path: tuple((first, last) for first, last in spans) for path, spans in data.pop("lines").items()}
    return Run(**data, lines=lines)


def save(reach: Reach, file: Path) -> None:
    """As JSON."""
    runs = [
        {"test": run.test, "passed": run.passed, "seconds": run.seconds, "gang": run.gang, "lines": run.lines}
        for run in reach.runs.values()
    ]
    imports = {path: sorted(lines) for path, lines in reach.imports.items()}
    file.write_text(json.dumps({"of": reach.of, "imports": imports, "runs": runs}))
