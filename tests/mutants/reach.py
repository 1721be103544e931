"""Which test runs which lines of which function, and how long it takes.

Lines are counted from the function's first, and functions are known by their text: when other code changes, or a
function moves, what was measured before still holds. Of a function that has changed, all lines count as run.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Self

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


Ranges = tuple[tuple[int, int], ...]
"""Ranges of line numbers, both ends included."""
Key = tuple[str, str, str]
"""Path, qualified name and digest of the text of a function."""


@frozen(kw_only=True)
class Scope:
    """An outermost function or a method of a class, where it stands now."""

    path: str
    name: str
    first: int
    last: int
    key: Key
    """By which runs know it."""

    @property
    def text(self) -> str:
        """Digest of its source."""
        return self.key[2]


@cache
def scopes(path: str) -> dict[str, Scope]:
    """By qualified name. One that is defined twice reaches from the first to the last."""
    file = ROOT / path
    if not file.exists():
        return {}
    source = file.read_bytes()
    lines = source.splitlines()
    found: dict[str, Scope] = {}
    for name, node in _functions(ast.parse(source), ""):
        first = found[name].first if name in found else node.lineno
        last = node.end_lineno or node.lineno
        text = digest(b"\n".join(lines[first - 1 : last]))[:12]
        found[name] = Scope(path=path, name=name, first=first, last=last, key=(path, name, text))
    return found


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.stmt):
            yield from _functions(child, prefix)


def by_scope(lines: Lines) -> dict[Key, Ranges]:
    """The lines inside functions, counted from 0 at each function's first, by the function's key."""
    found: dict[Key, Ranges] = {}
    for path, numbers in lines.items():
        for scope in scopes(path).values():
            inside = {number - scope.first for number in numbers if scope.first <= number <= scope.last}
            if inside - {0}:  # the header alone runs at import
                found[scope.key] = ranges(inside)
    return found


@frozen(kw_only=True)
class Run:
    """What a test did without any mutant."""

    test: str
    passed: bool
    seconds: float
    gang: bool
    """Whether it needs worker processes."""
    lines: Mapping[Key, Ranges]


@define(kw_only=True)
class Reach:
    """The runs of all tests of a group, and the lines that run when modules and tests are imported."""

    imports: Mapping[Key, Ranges]
    runs: dict[str, Run]
    seen: frozenset[Key]
    """Functions that stood when all tests were measured; of others nothing is known."""
    _of_path: dict[str, set[str]] = field(init=False)
    _of_name: dict[tuple[str, str], set[Key]] = field(init=False)
    _of_text: dict[tuple[str, str], set[Key]] = field(init=False)
    _of_key: dict[Key, list[str]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._of_path, self._of_name, self._of_text = defaultdict(set), defaultdict(set), defaultdict(set)
        self._of_key = defaultdict(list)
        for run in self.runs.values():
            for key in run.lines:
                self._of_key[key].append(run.test)
        for key, tests in self._of_key.items():
            path, name, text = key
            self._of_path[path].update(tests)
            self._of_name[path, name].add(key)
            self._of_text[name, text].add(key)

    def at_import(self, mutant: Mutant) -> bool:
        """Whether the mutated function runs before any test does: what it has made then, closures too, is kept."""
        if not mutant.scope:
            return True
        scope = scopes(mutant.path)[mutant.scope]
        return any(spans and key[:2] == scope.key[:2] for key, spans in self.imports.items())

    def running(self, mutant: Mutant) -> list[Run]:
        """Tests that run the mutated function's code, the fastest first; of a new function, those of its file."""
        if not mutant.scope:
            return []
        scope = scopes(mutant.path)[mutant.scope]
        keys = self._of_text.get((scope.name, scope.text), set()) | self._of_name.get((scope.path, scope.name), set())
        if not keys and not any((path, name) == (scope.path, scope.name) for path, name, _ in self.seen):
            return self.of_file(mutant.path)
        tests = {test for key in keys for test in self._of_key[key]}
        return self._passing(test for test in tests if _hits(scope, mutant, self.runs[test].lines))

    def of_file(self, path: str) -> list[Run]:
        """Tests that run anything of a file; all tests for a file that is new."""
        return self._passing(self._of_path.get(path, self.runs))

    def _passing(self, tests: Iterable[str]) -> list[Run]:
        found = [self.runs[test] for test in tests if self.runs[test].passed]
        return sorted(found, key=lambda run: (run.seconds, run.test))


def _hits(scope: Scope, mutant: Mutant, lines: Mapping[Key, Ranges]) -> bool:
    """Whether the mutant's lines are among these, or the function is and has changed since."""
    for (path, name, text), spans in lines.items():
        if name != scope.name:
            continue
        if text != scope.text:
            if path == scope.path:
                return True
        elif any(first <= line - scope.first <= last for first, last in spans for line in mutant.lines):
            return True
    return False


def ranges(lines: Iterable[int]) -> Ranges:
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


def standing() -> frozenset[Key]:
    """All functions of the package."""
    paths = (str(file.relative_to(ROOT)) for file in (ROOT / PACKAGE).rglob("*.py"))
    return frozenset(scope.key for path in paths for scope in scopes(path).values())


def sources(*folders: str) -> str:
    """Digest of all Python files of these folders and files."""
    roots = [ROOT / folder for folder in folders]
    files = sorted(file for root in roots for file in ([root] if root.is_file() else root.rglob("*.py")))
    return digest("".join(f"{file.relative_to(ROOT)} {digest(file.read_bytes())}\n" for file in files))
