"""Configs as files of prepkit's own: what is written is what is read."""

from __future__ import annotations

import pytest

from prepkit.config import FSDP2, Config, Mesh, Origin
from prepkit.findings import PlanRejected
from prepkit.formats.exporters.exported import config_text


def test_defaults_are_left_out_and_origins_are_comments() -> None:
    origin = Origin(setting="config.engine", key="distributed_type", source="a.yaml", line=3, column=1)
    text = config_text(Config(engine=FSDP2(), mesh=Mesh(replicate=2), origins=(origin,)), "c.toml")
    assert text == (
        '# engine from distributed_type in a.yaml:3:1\n\n[engine]\nkind = "FSDP2"\n\n[mesh]\nreplicate = 2\n'
    )


def test_an_extension_that_no_writer_has_is_refused() -> None:
    with pytest.raises(PlanRejected, match=r"extension is '.txt'"):
        config_text(Config(), "c.txt")
