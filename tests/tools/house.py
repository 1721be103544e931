"""Sizes of the package, and repetitions that had crept in before: ``python -m tests.tools.house``.

Each count has a ceiling, which ``tests/tools/test_house.py`` holds: lower it when the count has become smaller.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Callable, Iterator, Set
from functools import cache
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "prepkit"
RUNNING = ("ranks", "objects", "observe", "loading", "applying", "saving", "training", "auditing")
"""Rooms whose code runs beside a model."""
REFUSING = (*RUNNING, "interpreter", "proving", "api", "compat")
"""Rooms that refuse what a user's program does, and warn of it."""
ENGINES = frozenset({"Single", "DDP", "FSDP1", "FSDP2", "TensorParallel", "XLA", "DeepSpeed"})
TOLD = frozenset({"RunRefused", "PlanRejected", "CheckpointFailed"})
"""Exceptions that hold findings, and so do their subclasses."""
ARGUMENTS = frozenset({"TypeError", "ValueError", "AttributeError", "KeyError"})
"""What Python itself raises over an argument."""

COLLECTIVES = frozenset(
    {
        *("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list", "gather"),
        *("new_group", "reduce", "reduce_scatter", "scatter", "scatter_object_list"),
        *("batch_isend_irecv", "irecv", "isend", "recv", "send", "P2POp"),
        *("get_global_rank", "get_process_group_ranks", "get_rank", "get_world_size"),
    }
)
"""Of ``torch.distributed``: what sends to other ranks or asks who they are, which ``prepkit.ranks`` does for all."""


@frozen(kw_only=True)
class Count:
    """One number, and what it is compared with."""

    what: str
    now: int
    before: int | None
    """At commit 79f0bd9; None: it was not counted."""
    ceiling: int | None = None
    """A test fails above it; None: there is none."""


@cache
def modules() -> dict[Path, ast.Module]:
    """Every file of the package, parsed."""
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def walked(tree: ast.Module) -> tuple[ast.AST, ...]:
    """Every node of a file."""
    return tuple(ast.walk(tree))


@cache
def said(node: ast.expr) -> str:
    """As ``ast.unparse``, which takes long over names with dots, of which the package is full."""
    parts, inner = [], node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    return ".".join((inner.id, *reversed(parts))) if isinstance(inner, ast.Name) else ast.unparse(node)


def nodes(kind: type[ast.AST], rooms: tuple[str, ...] = ()) -> Iterator[ast.AST]:
    """All nodes of a kind, in the given rooms, or everywhere."""
    for path, tree in modules().items():
        if not rooms or path.relative_to(PACKAGE).parts[0].removesuffix(".py") in rooms:
            yield from (node for node in walked(tree) if isinstance(node, kind))


def raised(names: Callable[[str], bool]) -> int:
    """``raise X(...)`` in the running rooms, of the classes whose names are meant."""
    found = 0
    for node in nodes(ast.Raise, REFUSING):
        assert isinstance(node, ast.Raise)
        if isinstance(node.exc, ast.Call):
            found += names(said(node.exc.func).rpartition(".")[2])
    return found


@cache
def untold() -> frozenset[str]:
    """Exceptions of the package that hold no finding."""
    above = {
        node.name: {said(base).rpartition(".")[2] for base in node.bases}
        for node in nodes(ast.ClassDef)
        if isinstance(node, ast.ClassDef)
    }

    def is_under(name: str, roots: Set[str]) -> bool:
        return name in roots or any(is_under(base, roots) for base in above.get(name, ()))

    roots = {name for name in vars(builtins) if name.endswith(("Error", "Exception", "Exit"))}
    return frozenset(name for name in above if is_under(name, roots) and not is_under(name, TOLD))


def logged() -> int:
    """Calls of a logger that warn, which nobody can look up."""
    found = (said(node.func) for node in nodes(ast.Call, REFUSING) if isinstance(node, ast.Call))
    loud = (".warning", ".error", ".exception", ".critical")
    return sum(one.endswith(loud) and ("LOG" in one or "getLogger" in one) for one in found)


def calls(name: str, rooms: tuple[str, ...] = ()) -> int:
    """Calls of a function, by the last part of its name or all of it."""
    found = [said(node.func) for node in nodes(ast.Call, rooms) if isinstance(node, ast.Call)]
    return sum(one == name or one.endswith(f".{name}") for one in found)


def raw_collectives() -> int:
    """Uses of ``COLLECTIVES`` by way of ``dist``, ``torch.distributed`` or XLA's, outside of ``prepkit.ranks``."""
    found = 0
    for path, tree in modules().items():
        if path.relative_to(PACKAGE).parts[0] != "ranks":
            used = (said(node) for node in walked(tree) if isinstance(node, ast.Attribute))
            parts = (one.rpartition(".") for one in used)
            found += sum(name in COLLECTIVES and of in ("dist", "torch.distributed", "xm") for of, _, name in parts)
    return found


def engine_tests() -> int:
    """Engine classes in ``isinstance`` and in patterns of ``match``."""
    found = 0
    for node in nodes(ast.Call):
        if isinstance(node, ast.Call) and said(node.func) == "isinstance":
            names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
            found += bool(names & ENGINES)
    for node in nodes(ast.MatchClass):
        found += isinstance(node, ast.MatchClass) and said(node.cls).rpartition(".")[2] in ENGINES
    return found


def config_reads() -> int:
    """Places in the running rooms that read ``plan.config``."""
    reads = (said(node) for node in nodes(ast.Attribute, RUNNING))
    return sum(one.endswith("plan.config") for one in reads)


def single_callers() -> int:
    """Modules that exactly one other module of the package imports."""
    importers: Counter[str] = Counter()
    known = {_name(path) for path in modules()}
    for path, tree in modules().items():
        imported: set[str] = set()
        for node in walked(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        importers.update(imported & known - {_name(path)})
    return sum(importers[_name(path)] == 1 for path in modules() if not path.name.startswith("__"))


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def golden() -> tuple[Path, ...]:
    """Every golden text."""
    return tuple(path for path in ROOT.glob("tests/**/golden/**/*") if path.is_file())


@cache
def counts() -> tuple[Count, ...]:
    """All of them, in the order in which they are shown."""
    import prepkit
    from prepkit.training.prepared import Prepared

    lines = [len(path.read_text().splitlines()) for path in modules()]
    functions = sum(1 for kind in (ast.FunctionDef, ast.AsyncFunctionDef) for _ in nodes(kind))
    texts = golden()
    members = [name for name in dir(Prepared) if not name.startswith("_")]
    return (
        Count(what="files of the package", now=len(lines), before=526, ceiling=515),
        Count(what="lines of the package", now=sum(lines), before=58_804, ceiling=105_000),
        Count(what="functions", now=functions, before=3_650),
        Count(what="lines of the longest file", now=max(lines), before=513),
        Count(
            what="public names of prepkit",
            now=sum(not name.startswith("_") for name in dir(prepkit)),
            before=103,
            ceiling=63,
        ),
        Count(what="public members of Prepared", now=len(members), before=47, ceiling=25),
        Count(
            what="RuntimeError without an id in the rooms that refuse",
            now=raised(lambda name: name == "RuntimeError"),
            before=None,
            ceiling=4,
        ),
        Count(
            what="exceptions of our own without an id there",
            now=raised(untold().__contains__),
            before=None,
            ceiling=45,
        ),
        Count(what="errors of arguments there", now=raised(ARGUMENTS.__contains__), before=None, ceiling=111),
        Count(what="warnings without an id there", now=calls("warnings.warn", REFUSING), before=10, ceiling=0),
        Count(what="warnings of a logger there", now=logged(), before=None, ceiling=2),
        Count(what="is_initialized()", now=calls("is_initialized"), before=83, ceiling=2),
        Count(what="collectives outside of ranks", now=raw_collectives(), before=None, ceiling=0),
        Count(what="tests of an engine's class", now=engine_tests(), before=242, ceiling=140),
        Count(what="reads of plan.config there", now=config_reads(), before=19, ceiling=0),
        Count(what="files with one importer", now=single_callers(), before=229, ceiling=136),
        Count(what="golden files", now=len(texts), before=528, ceiling=121),
        Count(what="bytes of golden files", now=sum(path.stat().st_size for path in texts), before=4_100_000),
        Count(what="golden files with digests", now=sum(map(has_digests, texts)), before=240, ceiling=0),
    )


def has_digests(path: Path) -> bool:
    """More than three words of four hex digits after a colon or a blank, as digests were written."""
    return len(re.findall(r"(?<=[ :])(?!bf16)(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{4}\b", path.read_text())) > 3


def table() -> str:
    """The counts as Markdown."""
    rows = (f"| {one.what} | {one.now:,} | {_shown(one.before)} | {_shown(one.ceiling)} |" for one in counts())
    return "\n".join(("| what | now | at 79f0bd9 | ceiling |", "|---|--:|--:|--:|", *rows))


def ceilings() -> str:
    """The ceilings as Markdown, for the page about the inside."""
    held = (one for one in counts() if one.ceiling is not None)
    rows = (f"| {one.what} | {one.ceiling:,} | {_shown(one.before)} |" for one in held)
    return "\n".join(("| what | at most | at 79f0bd9 |", "|---|--:|--:|", *rows)) + "\n"


def _shown(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


if __name__ == "__main__":
    print(table())
