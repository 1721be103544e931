"""A config that another library's file can say is read back as it was; what a file cannot say is named, all of it."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from prepkit.config import Config, DeepSpeed, Mesh
from prepkit.facts import Facts
from prepkit.formats.exporters import EXPORTERS, export_config
from prepkit.formats.exporters.deepspeed import folded
from prepkit.formats.exporters.exported import differences, plain
from prepkit.formats.importers import import_config
from prepkit.testing.strategies.legal import legal

FOLDED = tuple(
    f"config.engine.{name}" for name in ("stage", "offload_optimizer", "offload_param", "micro_batch", "config")
)
"""Fields of ``DeepSpeed`` that are written into its JSON, or its section, and come back in one form."""


def _counted(config: Config, ranks: int) -> Config:
    """With the axis that takes what is left (-1) as the number of ranks that it has, as a file says it."""
    if config.mesh is None:
        return config
    sizes = {name: getattr(config.mesh, name) for name in ("replicate", "shard", "tensor")}
    left = ranks // prod(size for size in sizes.values() if size != -1)
    return evolve(config, mesh=Mesh(**{name: left if size == -1 else size for name, size in sizes.items()}))


def _clip(said: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if key == "gradient_clipping"}


@given(drawn=legal(), to=st.sampled_from(tuple(EXPORTERS)))
def test_a_legal_config_comes_back_but_for_what_is_named(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Config, Facts], to: str
) -> None:
    config, facts = drawn
    assert isinstance(config, Config)
    size = facts.env.world_size
    file = tmp_path_factory.getbasetemp() / f"config{EXPORTERS[to][1][0]}"
    made = export_config(config, to, file, partial=True, world_size=size)
    back = evolve(import_config(file, to).config, origins=())
    named = tuple(finding.where for finding in made.left_out)
    lost = [where for where, _, _ in differences(plain(_counted(config, size)), plain(back), "config")]
    assert all(where.startswith((*FOLDED, *named)) for where in lost), (lost, named)
    both = isinstance(config.engine, DeepSpeed) and isinstance(back.engine, DeepSpeed)
    if both and back.engine.config != "{}" and "config.engine.config" not in named:
        said = json.loads(config.engine.config)
        means = folded(config)
        if to == "transformers":  # which accumulates and clips by its own arguments
            means = {**folded(evolve(config, accumulation=1, clip=None)), "gradient_clipping": "auto", **_clip(said)}
        assert json.loads(back.engine.config) in (means, said), (to, back.engine)

    again = export_config(back, to, file, world_size=size)  # which it can say: nothing is refused
    assert evolve(import_config(file, to).config, origins=()) == back
    assert again.left_out == ()
