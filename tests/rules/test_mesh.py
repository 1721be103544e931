"""Meshes: refused exactly when engine and world size do not allow them, with the nearest that do."""

from __future__ import annotations

import pytest

from prepkit.config import DDP, FSDP2, Config, Mesh
from prepkit.rules import RULES
from prepkit.testing.tiny import tiny_facts
from tests.support.rule_findings import finding_of, rule_ids


@pytest.mark.parametrize(
    ("cfg", "world", "rules"),
    [
        (Config(engine=FSDP2(), mesh=Mesh(replicate=2)), 8, []),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=-1, shard=4)), 8, []),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=2, shard=4)), 8, []),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=5)), 8, ["mesh.not-world-size"]),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=-2, shard=0)), 8, ["mesh.size-below-one"] * 2),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=8)), 8, ["mesh.nothing-sharded"]),
        (Config(engine=DDP(), mesh=Mesh(replicate=8)), 8, []),
        (Config(engine=DDP(), mesh=Mesh(replicate=-1, shard=1)), 8, []),
        (Config(engine=DDP(), mesh=Mesh(replicate=3)), 8, ["mesh.not-world-size"]),
        (Config(engine=DDP(), mesh=Mesh(replicate=4, shard=1)), 8, ["mesh.not-world-size"]),
        (Config(engine=DDP(), mesh=Mesh(replicate=4, shard=2)), 8, ["mesh.ddp-does-not-shard"]),
        (Config(engine=DDP(), mesh=Mesh()), 8, ["mesh.ddp-does-not-shard"]),
        (Config(mesh=Mesh()), 1, []),
        (Config(mesh=Mesh(shard=2)), 1, ["mesh.single-has-none"]),
    ],
)
def test_a_mesh_is_refused_exactly_when_engine_and_world_size_do_not_allow_it(
    cfg: Config, world: int, rules: list[str]
) -> None:
    assert rule_ids(cfg, tiny_facts(world=world)) == rules


def test_a_mesh_that_does_not_multiply_is_told_the_nearest_ones_and_is_mended_to_the_first() -> None:
    cfg, facts = Config(engine=FSDP2(), mesh=Mesh(replicate=5, shard=8)), tiny_facts(world=24)
    assert (
        "Mesh(replicate=4, shard=6) or Mesh(replicate=3, shard=8)" in finding_of("mesh.not-world-size", cfg, facts).fix
    )
    (rule,) = [rule for rule in RULES if rule.id == "mesh.not-world-size"]
    assert rule.repair is not None
    assert rule.repair(cfg, facts).mesh == Mesh(replicate=4, shard=6)


def test_no_mesh_is_proposed_in_which_nothing_is_sharded() -> None:
    cfg = Config(engine=FSDP2(), mesh=Mesh(replicate=6, shard=2))
    fix = finding_of("mesh.not-world-size", cfg, tiny_facts(world=7)).fix
    assert "Mesh(replicate=1, shard=7)" in fix
    assert "replicate=7" not in fix
