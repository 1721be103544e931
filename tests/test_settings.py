"""Every setting of a config arrives in the plan, and a planner that drops one is noticed."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit import planner
from prepkit.config import Config
from prepkit.config.origin import Origin
from prepkit.testing import tiny_facts
from tests.support.dropped_setting import NotPlannedError, Setting, dropping, planned, settings_of
from tests.support.settings import SETTINGS, SHOWN


def label(setting: Setting) -> str:
    """Name of a case."""
    return setting.name


@pytest.mark.parametrize("setting", SETTINGS, ids=label)
def test_a_setting_arrives_in_the_plan(setting: Setting) -> None:
    assert planned(setting) == setting.value


@pytest.mark.parametrize("setting", SETTINGS, ids=label)
def test_a_planner_that_drops_the_setting_is_noticed(setting: Setting) -> None:
    with dropping(setting.name) as met:
        try:
            seen: object = planned(setting)
        except NotPlannedError:
            seen = NotPlannedError
    assert met[setting.name], f"the config of the row leaves {setting.name} at its default"
    assert seen != setting.value, f"{setting.place} does not depend on {setting.name}"


def test_every_setting_has_a_row() -> None:
    proven = {setting.name for setting in SETTINGS} | SHOWN
    assert sorted(settings_of() - proven) == []
    assert sorted(proven - settings_of()) == []


def test_what_is_shown_with_a_plan_decides_nothing_in_it() -> None:
    origin = Origin(setting="precision", key="bf16", source="args.json", line=3, column=5)
    plain = planner.plan(Config(), tiny_facts()).unwrap()
    imported = planner.plan(Config(origins=(origin,)), tiny_facts()).unwrap()
    assert evolve(imported, config=plain.config, provenance=plain.provenance) == plain
    assert imported.config.origins == (origin,)
