"""What is mutated, by which tests it is tried, and the mutants that must die first. All tables are written by hand."""

from __future__ import annotations

import ast

from attrs import frozen

from tests.mutants.mutant import Mutant
from tests.mutants.patch import ROOT
from tests.mutants.walk import sites


@frozen(kw_only=True)
class Area:
    """Source files that are tested by the same tests."""

    folder: str
    near: tuple[str, ...]
    """Test files and folders that are tried first on what runs at import, because they are quick to import."""


@frozen(kw_only=True)
class Group:
    """Areas that share one sample."""

    name: str
    areas: tuple[Area, ...]
    tests: tuple[str, ...]
    """Files and folders whose tests are collected."""
    tables: tuple[str, ...] = ()
    """Those of them that read tables as data, and so run no function of the file that holds one."""
    sample: int
    share: float
    """The part of the sample that has to be killed."""


LAWS = ("property_tests/test_rule_laws.py", "property_tests/test_planner_laws.py")

PURE = Group(
    name="pure",
    areas=(
        Area(folder="prepkit/rules", near=("tests/rules", "tests/audit/test_rules.py", LAWS[0])),
        Area(folder="prepkit/planner", near=("tests/planner", LAWS[1])),
        Area(folder="prepkit/resolve", near=("tests/resolve", LAWS[0])),
        Area(folder="prepkit/predict", near=("tests/predict", "property_tests/test_predict_laws.py")),
        Area(folder="prepkit/codec", near=("tests/codec", "property_tests/test_codec_laws.py")),
        Area(
            folder="prepkit/interpreter",
            near=("tests/interpreter", "property_tests/test_interpreter_laws.py"),
        ),
    ),
    tests=(
        "tests/rules",
        "tests/planner",
        "tests/resolve",
        "tests/predict",
        "tests/codec",
        "tests/plan",
        "tests/findings",
        "tests/formats/importers",
        "tests/formats/test_schemas.py",
        "tests/audit/test_rules.py",
        "tests/proving/test_causes.py",
        "tests/render",
        "tests/cli",
        "tests/test_api.py",
        "tests/test_behaviour_rows.py",
        "tests/test_completeness.py",
        "tests/test_completeness_predict.py",
        "tests/test_doctests.py",
        "tests/test_odd_values.py",
        "tests/test_records.py",
        "tests/interpreter",
        "property_tests",
        "tests/applying/rehearse",
    ),
    tables=(
        "tests/rules/test_rules.py",
        "tests/rules/test_kinds.py",
        "tests/audit/test_rules.py",
        "tests/test_completeness",
        "tests/test_behaviour_rows.py",
        "tests/findings",
    ),
    sample=1000,
    share=0.95,
)
HANDLERS = Group(
    name="handlers",
    areas=(
        Area(
            folder="prepkit/applying/handlers",
            near=("tests/applying/handlers/test_no_way_back.py", "tests/applying/handlers"),
        ),
    ),
    tests=(
        *("tests/applying", "tests/loading", "tests/objects", "tests/observe", "tests/ranks", "tests/saving"),
        *("tests/training", "tests/test_doctests.py"),
    ),
    sample=200,
    share=0.85,
)
GROUPS = (PURE, HANDLERS)


@frozen(kw_only=True)
class Named:
    """A mutant that has to die, whatever the sample."""

    name: str
    folder: str
    """The text is looked for in all files below, so that it may move."""
    old: str
    new: str


NAMED: dict[str, tuple[Named, ...]] = {
    "pure": (
        Named(name="COLLECTIVES has another backend", folder="prepkit", old='"cuda": "nccl"', new='"cuda": "gloo"'),
    ),
    "handlers": (
        Named(
            name="move_do does nothing",
            folder="prepkit/applying/handlers",
            old="device = launcher.bind(step.device)\n    before = {",
            new="return {}\n    before = {",
        ),
        Named(
            name="sync_module_states is False",
            folder="prepkit/applying/handlers",
            old="sync_module_states=step.sync_module_states",
            new="sync_module_states=False",
        ),
    ),
}


def named(folder: str, old: str, new: str) -> Mutant:
    """The mutant that puts ``new`` for a text that stands once below a folder. Raises ``LookupError`` otherwise."""
    files = sorted((ROOT / folder).rglob("*.py"))
    hits = [(file, source) for file in files if old.encode() in (source := file.read_bytes())]
    if len(hits) != 1 or hits[0][1].count(old.encode()) != 1:
        raise LookupError(f"{old!r} stands in {[str(file) for file, _ in hits]}, not once below {folder}; mend NAMED")
    file, source = hits[0]
    start = source.index(old.encode())
    line = source[:start].count(b"\n") + 1
    path = str(file.relative_to(ROOT))
    lines = range(line, line + old.count("\n") + 1)
    scope = next((site.scope for site in sites(ast.parse(source)) if getattr(site.node, "lineno", 0) == line), "")
    return Mutant(
        path=path,
        scope=scope,
        operator="named",
        start=start,
        end=start + len(old.encode()),
        old=old,
        new=new,
        line=line,
        lines=tuple(lines),
    )
