"""What ``import prepkit as pk`` shows: the names at the top, the namespaces, and the stubs that type checkers read."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest
import torch

import prepkit as pk
from prepkit import config, errors, processes

PACKAGE = Path(pk.__file__).parent
ROOT = PACKAGE.parent
LAZY = (pk, errors, processes)
SPACES = ("data", "ddp", "errors", "fp8", "optim", "processes", "rules", "tp", "track", "wrap")
INNER = {
    "DistributedOperationException": "accelerate's own name, in prepkit.compat.accelerate",
    "AsksRanks": "ends a forward that is asked once more, which is then not asked",
    "FirstStep": "ends a script inside prepkit audit",
    "HalfDone": "raised by a handler for the interpreter, which reports it in ApplyHalted",
    "HeaderError": "becomes a finding or the cause of an ApplyHalted",
    "DoesNotFit": "goes from a process of a trial to who has started it, who refuses by name",
    "ProcessDied": "documented as RuntimeError",
    "CannotReplay": "becomes a finding",
    "CannotStep": "becomes a finding",
    "RanksApart": "ends a script inside prepkit audit",
    "Misread": "becomes a finding",
    "MisfitError": "becomes a finding",
    "NeedsValues": "documented as RuntimeError",
    "NoAnswer": "the cause of a RankFailed or an ApplyHalted",
    "NotJsonError": "becomes a finding",
    "TooManyValues": "becomes a finding",
    "Unknown": "ends a look at the text of a loss, of which nothing is told then",
    "NotPlain": "becomes a finding",
    "NotKnown": "becomes a finding",
    "NotOffered": "in prepkit.compat.accelerate",
    "_Unknown": "ends one rule's check inside prepkit check",
    "ScriptEnded": "ends a script inside prepkit audit",
    "TooLarge": "becomes a finding, or a ValueError of pk.prove",
    "WindowDone": "ends a script inside prepkit audit --prove",
    "StillWaits": "likewise, at its first step, where DDP waits for what never comes",
    "Unfit": "becomes a NotKnown",
}
"""Exceptions that no user of ``pk`` has to catch, and why."""


def stubbed(module: ModuleType) -> dict[str, str]:
    """Names in the module's stub to the modules that they come from; a namespace comes from the package."""
    path = Path(str(module.__file__)).with_suffix(".pyi")
    names: dict[str, str] = {}
    for statement in ast.parse(path.read_text()).body:
        match statement:
            case ast.ImportFrom(module=str(home), names=aliases):
                assert all(alias.asname == alias.name for alias in aliases), "type checkers re-export `x as x` only"
                names |= {alias.name: home for alias in aliases}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names[name] = "here"
    return names


@pytest.mark.parametrize("module", LAZY, ids=lambda module: module.__name__)
def test_a_type_checker_sees_the_names_that_python_does(module: ModuleType) -> None:
    shown = {name: home for home, of in module.NAMES.items() for name in of}
    shown |= {home.rpartition(".")[2]: "prepkit" for home, of in module.NAMES.items() if not of}
    if module is pk:
        shown["__version__"] = "here"
    assert stubbed(module) == shown
    assert dir(module) == sorted(shown.keys() - {"__version__"})


def test_every_name_arrives_and_there_are_no_more_than_a_person_can_look_through() -> None:
    for name in dir(pk):
        assert getattr(pk, name) is not None
    assert set(SPACES) <= set(dir(pk))
    assert len(dir(pk)) <= 66, "group them"
    assert isinstance(pk.__version__, str)


@pytest.mark.parametrize("space", SPACES)
def test_a_namespace_arrives_without_torch(space: str) -> None:
    program = (
        f"import sys, prepkit as pk; dir(pk.{space}); assert 'torch' not in sys.modules, 'torch'\n"
        "assert 'prepkit.planner' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_nothing_is_both_at_the_top_and_in_a_namespace_but_what_a_user_catches() -> None:
    inside = {name for space in SPACES if space != "rules" for name in dir(getattr(pk, space)) if name[0].isupper()}
    assert inside & set(dir(pk)) == {"PlanRejected", "RunRefused"}


def test_every_class_of_a_config_has_a_place() -> None:
    shown = {name for module in (pk, *(getattr(pk, space) for space in SPACES)) for name in dir(module)}
    classes = {
        name for name, value in vars(config).items() if isinstance(value, type) and hasattr(value, "__attrs_attrs__")
    }
    assert classes - shown == {"CompileOption", "Origin"}, "the first is written as a mapping, the second by importers"


def test_what_was_renamed_or_moved_says_where_it_is() -> None:
    for name, now in {
        "NoClip": "write clip=None",
        "SendWeights": "write pk.BroadcastWeights",
        "Example": "write pk.ExampleInputs",
        "AdamW": "write pk.optim.AdamW",
        "RankFailed": "write pk.errors.RankFailed",
        "RULES": "write pk.rules.RULES",
        "together": "write pk.processes.together",
        "JsonLines": "write pk.track.JsonLines",
    }.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}'; {now}$"):
            getattr(pk, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = pk.nonsense  # type: ignore[attr-defined]


def test_every_exception_that_a_user_must_catch_is_among_the_errors() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.ClassDef):
                module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
                if any(
                    base.endswith(("Error", "Exception", "SystemExit", "RunRefused"))
                    for base in map(ast.unparse, statement.bases)
                ):
                    found.add((statement.name, module))
    names = {name for name, _ in found}
    assert names - set(dir(errors)) == set(INNER), (
        "add it to prepkit/errors.py and errors.pyi, or to INNER with a reason"
    )
    assert set(dir(errors)) - names <= {"FindingWarning"}


def test_no_public_module_is_forgotten_by_the_top() -> None:
    rooms = {module.name for module in pkgutil.iter_modules(pk.__path__) if not module.ispkg}
    inner = {"__main__", "court", "later", "version"}
    assert rooms - inner == set(SPACES) - {"rules"}
    for space in SPACES:
        assert getattr(pk, space) is importlib.import_module(f"prepkit.{space}")


def test_the_page_of_a_prepared_run_has_its_members_and_no_others() -> None:
    """Checked on an instance, as the page is read by people who type what stands there."""
    ready = pk.apply(pk.build_plan(pk.Config(intent=pk.Intent.INFERENCE), torch.nn.Linear(2, 2)))
    text = (ROOT / "docs" / "reference" / "api.md").read_text().partition("## Prepared")[2]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`([\w.]+)", cell)}
    for name in named:
        attrgetter(name)(ready)
    assert {name.partition(".")[0] for name in named} == {name for name in dir(ready) if not name.startswith("_")}
