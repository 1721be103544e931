"""Tables that count bytes have a row for every member of the union that they are about; what is missing is named."""

from __future__ import annotations

from typing import get_args

from prepkit.config import XLA, Engine, OptimizerSpec
from prepkit.plan.layout import Placement, sharded_dim
from prepkit.planner.sweep import ENGINES
from prepkit.predict import CHECKED, PREDICTORS
from prepkit.predict.not_predicted import COUNTED, LEFT_OUT
from prepkit.predict.optimizers import TORCH
from prepkit.predict.prediction import CATEGORIES, Category
from prepkit.steps import Step

NO_FORMULAS = {XLA}
"""Engines whose bytes nobody has measured: their plans say that nothing is predicted."""


def complete(members: set[object], rows: set[object], table: str) -> None:
    """Fails, saying what to edit, unless every member has its row and every row its member."""
    names = {str(getattr(member, "__name__", member)) for member in members}
    told = {str(getattr(row, "__name__", row)) for row in rows}
    parts = [f"{name} has no row in {table}" for name in sorted(names - told)]
    parts += [f"{name} is no longer there: take it out of {table}" for name in sorted(told - names)]
    assert not parts, "; ".join(parts)


def test_every_step_kind_is_counted_or_its_bytes_are_said_to_be_left_out() -> None:
    table = "COUNTED or LEFT_OUT of prepkit/predict/not_predicted.py"
    complete(set(get_args(Step)), {*COUNTED, *LEFT_OUT}, table)
    assert not set(COUNTED) & set(LEFT_OUT), f"in both of {table}"


def test_every_engine_has_formulas_or_is_listed_here_as_one_without() -> None:
    complete(set(get_args(Engine)) - NO_FORMULAS, set(PREDICTORS), "PREDICTORS of prepkit/predict/__init__.py")


def test_every_engine_with_formulas_says_with_which_releases_they_were_compared() -> None:
    predicted = {engine.__name__ for engine in PREDICTORS}
    complete(set(predicted), set(CHECKED), "CHECKED of prepkit/predict/__init__.py")


def test_every_engine_with_formulas_is_swept() -> None:
    swept = {type(engine) for engine in ENGINES.values()}
    complete(set(PREDICTORS), set(swept), "ENGINES of prepkit/planner/sweep.py")


def test_every_optimizer_that_a_config_can_name_has_a_formula_for_its_state() -> None:
    specs = {spec.__name__ for spec in get_args(OptimizerSpec)}
    complete(set(specs), set(TORCH) & specs, "TORCH of prepkit/predict/optimizers.py")


def test_every_category_of_bytes_has_its_place_in_the_order_in_which_they_are_shown() -> None:
    complete(set(get_args(Category)), set(CATEGORIES), "CATEGORIES of prepkit/predict/prediction.py")


def test_every_placement_says_which_dim_it_cuts_or_that_it_cuts_none() -> None:
    dims = {placement: sharded_dim(placement) for placement in get_args(Placement)}
    assert {placement for placement, dim in dims.items() if dim is None} == {
        "replicate", "off-mesh", "partition", "split"
    }, "UNCUT of prepkit/plan/layout.py"  # fmt: skip
