"""Whoever adds an engine, a precision, an optimizer spec or a mesh axis is told here which tables want a row.

Each message names the member, the table and the file. What a table says may be wrong; that it says nothing may not be.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from importlib import import_module
from pkgutil import iter_modules
from types import NoneType
from typing import TypeGuard, get_args, get_type_hints

import pytest
import torch
from attrs import evolve, fields, frozen, has
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample

import prepkit
from prepkit import config
from prepkit.config import Config, Engine, Mesh, Mixed, OptimizerSpec, Precision
from prepkit.config.engines import AXES
from prepkit.config.optimizer import OPTIMIZERS, SELECTS
from prepkit.config.optimizer import __all__ as exported
from prepkit.config.precision import PRECISIONS
from prepkit.objects.names import ROOTS
from prepkit.planner import PLANNERS
from prepkit.planner.sweep import ENGINES as SWEPT
from prepkit.predict import PREDICTORS
from prepkit.predict.optimizers import TORCH
from prepkit.resolve.engines import ENGINES
from prepkit.resolve.resolved import Resolved
from prepkit.testing import configs, tiny_facts

UNIONS = {"Engine": get_args(Engine), "Precision": get_args(Precision), "OptimizerSpec": get_args(OptimizerSpec)}


@frozen
class Table:
    """A table written by hand, and what it has to have a row for."""

    place: str
    rows: Collection[str]
    wanted: Collection[str]


def named(kinds: Iterable[type]) -> set[str]:
    return {kind.__name__ for kind in kinds}


SPECS = named(get_args(OptimizerSpec))
TABLES = (
    Table("ENGINES in prepkit/resolve/engines.py", named(ENGINES), named(get_args(Engine))),
    Table("PLANNERS in prepkit/planner/__init__.py", named(PLANNERS), named(get_args(Engine))),
    Table(
        "PREDICTORS in prepkit/predict/__init__.py, unless its row in ENGINES says predicted=False",
        named(PREDICTORS),
        named(kind for kind, traits in ENGINES.items() if traits.predicted),
    ),
    Table(
        "ENGINES in prepkit/planner/sweep.py, unless its row in prepkit/resolve/engines.py says predicted=False",
        named(type(engine) for engine in SWEPT.values()),
        named(kind for kind, traits in ENGINES.items() if traits.predicted),
    ),
    Table(
        "ROOTS in prepkit/objects/names.py, or root_wrapper in ENGINES in prepkit/resolve/engines.py",
        ROOTS,
        {traits.root_wrapper for traits in ENGINES.values()} - {""},
    ),
    Table("PRECISIONS in prepkit/config/precision.py", named(PRECISIONS), named(get_args(Precision))),
    Table(
        "Mixed in prepkit/config/precision.py, or compute_dtype=None in PRECISIONS there",
        named(get_args(Mixed)),
        named(kind for kind, traits in PRECISIONS.items() if traits.compute_dtype is not None),
    ),
    Table("OPTIMIZERS in prepkit/config/optimizer.py", named(OPTIMIZERS), SPECS),
    Table(
        "__all__ in prepkit/config/optimizer.py",
        [name for name in exported if name != "Group"],
        SPECS,
    ),
    Table("AXES in prepkit/config/engines.py", [axis.name for axis in AXES], [field.name for field in fields(Mesh)]),
)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.place)
def test_every_member_has_a_row_and_every_row_a_member(table: Table) -> None:
    missing, left_over = sorted(set(table.wanted) - set(table.rows)), sorted(set(table.rows) - set(table.wanted))
    assert not missing, f"{', '.join(missing)}: no row; add one to {table.place}"
    assert not left_over, (
        f"{', '.join(left_over)}: a row of nothing that is there any more; remove it from {table.place}"
    )


def test_every_created_optimizer_has_a_formula_for_its_state() -> None:
    missing = sorted(SPECS - set(TORCH))
    assert not missing, f"{', '.join(missing)}: no row in predict.optimizers; add one to TORCH in that file"


@pytest.mark.parametrize("spec", get_args(OptimizerSpec))
def test_the_fields_of_a_spec_are_options_of_the_torch_class_of_its_name(spec: type) -> None:
    kind = getattr(torch.optim, spec.__name__, None)
    assert kind is not None, f"torch.optim has no {spec.__name__}: name the spec in config/optimizer.py as torch does"
    options = inspect.signature(kind).parameters
    foreign = [field.name for field in fields(spec) if field.name not in (*options, *SELECTS)]
    assert not foreign, f"torch.optim.{spec.__name__} has no {', '.join(foreign)}: rename them in config/optimizer.py"


@pytest.mark.parametrize("kind", [kind for union in UNIONS.values() for kind in union if kind is not NoneType])
def test_every_member_of_a_union_of_the_config_is_public(kind: type) -> None:
    place = "prepkit/__init__.py or prepkit/optim.py, and in prepkit/config/__init__.py"
    shown = (getattr(module, kind.__name__, None) for module in (prepkit, prepkit.optim))
    assert kind in shown, f"{kind.__name__} is not public; import it in {place}"


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        (field, kind)
        for field, union in zip(("engine", "precision", "optimizer"), UNIONS.values(), strict=True)
        for kind in union
    ],
)
def test_every_member_of_a_union_of_the_config_is_drawn(field: str, kind: type) -> None:
    once = settings(max_examples=2000, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    try:
        find(configs(), lambda cfg: isinstance(getattr(cfg, field), kind), settings=once)
    except NoSuchExample:
        pytest.fail(f"{kind.__name__} is never drawn; add it to the {field} of prepkit/testing/strategies/configs.py")


@pytest.mark.parametrize("kind", get_args(Engine))
def test_the_traits_of_an_engine_agree_with_its_fields_and_its_axes(kind: type[Engine]) -> None:
    row, place = ENGINES[kind], f"the row of {kind.__name__} in ENGINES in prepkit/resolve/engines.py"
    assert row.has_units == ("wrap" in {field.name for field in fields(kind)}), f"has_units is wrong in {place}"
    unknown = {*row.other_axes, row.main_axis or ""} - {axis.name for axis in AXES} - {""}
    assert not unknown, f"{', '.join(sorted(unknown))}: no axis of a mesh, in {place}"


@pytest.mark.parametrize("axis", [axis.name for axis in AXES])
def test_some_engine_has_each_axis_and_says_how_a_parameter_lies_on_it(axis: str) -> None:
    kinds = [kind for kind, row in ENGINES.items() if axis in (row.main_axis, *row.other_axes)]
    assert kinds, f"{axis}: no engine has this axis; name it in other_axes of ENGINES in prepkit/resolve/engines.py"
    ones = evolve(Mesh(), **{field.name: 1 for field in fields(Mesh)})
    for kind in kinds:
        cfg = Config(engine=kind(), mesh=evolve(ones, **{axis: 4}) if ENGINES[kind].reads_mesh else None)
        try:
            layout = Resolved(cfg=cfg, facts=tiny_facts(world=4)).layout
        except KeyError as error:
            pytest.fail(
                f"{error}: no placement for this axis under {kind.__name__}; add it in prepkit/resolve/placements.py"
            )
        assert layout


def test_every_class_of_config_can_stand_in_a_config() -> None:
    """One that was written and is in no union would be offered and never taken."""
    modules = [import_module(f"prepkit.config.{found.name}") for found in iter_modules(config.__path__)]
    written = {cls for module in (config, *modules) for cls in vars(module).values() if is_config_class(cls)}
    reached: set[type] = set()
    ahead: list[object] = [Config]
    while ahead:
        kind = ahead.pop()
        ahead += get_args(kind)
        if is_config_class(kind) and kind not in reached:
            reached.add(kind)
            ahead += get_type_hints(kind).values()
    missing = named(written - reached)
    assert not missing, f"{', '.join(sorted(missing))}: in no field and no union of the config; add it to its union"


def is_config_class(value: object) -> TypeGuard[type]:
    return (
        isinstance(value, type)
        and has(value)
        and value.__module__.startswith("prepkit.config")
        and not value.__name__.endswith("Traits")
    )
