"""One meaning for one word: no two public classes or type aliases of the package share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SHARED = {
    "Check": "the type of functions of rules, and of converters of facts; no other folder imports either",
    "Kind": "each time the type of one field, used in its own module alone",
    "Piece": "in two files of the planner the type of its functions that make a few steps",
}
"""Names that stand for two things, and why they may."""

WITH_THEIR_MODULE = ("facts/loop.py", "loop/orders.py")
"""Events and orders of the loop, which are always written with their module: ``events.Step``, ``orders.Clip``."""


def public_types(path: Path) -> Iterator[str]:
    """Classes that the file defines, and aliases of types: ``Name = ...`` in capitals and small letters."""
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.ClassDef(name=name):
                names = [name]
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp()):
                names = [name]
            case _:
                names = []
        yield from (name for name in names if name[0].isupper() and not name.isupper())


def owners(root: Path) -> dict[str, list[str]]:
    """Name to the files that define it."""
    files: dict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        if str(path).endswith(WITH_THEIR_MODULE):
            continue
        for name in public_types(path):
            files[name].append(str(path.relative_to(root.parent)))
    return files


def test_no_two_public_types_share_a_name() -> None:
    shared = {name: files for name, files in owners(ROOT / "prepkit").items() if len(files) > 1 and name not in SHARED}
    told = [
        f"{name} is defined in {' and in '.join(files)}; give each meaning its own" for name, files in shared.items()
    ]
    assert not told, "\n".join(told)


def test_the_search_sees_classes_and_aliases(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class Size: ...\nclass _Own: ...\nMIB = 1 << 20\n")
    (tmp_path / "b.py").write_text("Size = tuple[int, ...]\nEither = int | str\nMADE = f(1)\n")
    assert {name: len(files) for name, files in owners(tmp_path).items()} == {"Size": 2, "Either": 1}
