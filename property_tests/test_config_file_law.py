"""A config that is written as a file is read as the same config."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given

from prepkit.config import Config
from prepkit.findings import PlanRejected
from prepkit.formats.exporters.exported import WRITERS, config_text
from prepkit.formats.importers.native import read_config
from prepkit.testing.strategies.configs import configs


@given(config=configs())
def test_a_written_config_is_read_as_the_same(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    for suffix in WRITERS:
        file = tmp_path_factory.getbasetemp() / f"config{suffix}"
        try:
            text = config_text(config, str(file))
        except PlanRejected:
            text = ""
        assert text or suffix == ".toml", "only TOML has no null"
        if text:
            file.write_text(text)
            assert read_config(str(file)) == evolve(config, origins=())
