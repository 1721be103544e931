"""Meshes: refused exactly when engine and world size do not allow them, with the nearest that do."""

from __future__ import annotations

from typing import Literal

import pytest
from attrs import evolve

from prepkit.config import DDP, FSDP1, FSDP2, Config, Mesh
from prepkit.rules import RULES
from prepkit.testing.tiny import tiny_facts
from tests.support.rule_findings import finding_of, rule_ids
from tests.support.rule_findings import mended as mended_by


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


LEAVE_IT_OUT = ("mesh.size-below-one", "mesh.two-rests")


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
@pytest.mark.parametrize(("world", "per_node"), [(8, 4), (8, 8), (6, 3), (6, 4), (7, 7), (16, 1), (1, 1)])
def test_a_mesh_of_no_sizes_is_left_out_and_what_has_no_mesh_then_is_given_one_or_another_strategy(
    sharding: Literal["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"], world: int, per_node: int
) -> None:
    facts = tiny_facts(world=world)
    facts = evolve(facts, env=evolve(facts.env, per_node=per_node))
    plain = Config(engine=FSDP1(sharding=sharding))
    for rule, mesh in zip(LEAVE_IT_OUT, (Mesh(replicate=0), Mesh(replicate=-1, shard=-1)), strict=True):
        mended = mended_by(rule, evolve(plain, mesh=mesh), facts)
        if "fsdp1.mesh" in rule_ids(plain, facts):
            assert mended == mended_by("fsdp1.mesh", plain, facts)
            assert not {"fsdp1.mesh", *LEAVE_IT_OUT}.intersection(rule_ids(mended, facts))
        else:
            assert mended == plain
