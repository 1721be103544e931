"""FSDP1: meshes without shards, frozen parameters in a unit, and optimizers that need whole parameters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import evolve

from prepkit.config import BF16, FSDP1, Config, Mesh, Sharding
from prepkit.rules import check
from prepkit.testing.tiny import tiny_facts, tiny_model, tiny_optimizer
from tests.support.rule_findings import finding_of, rule_ids

FLAT = FSDP1(use_orig_params=False)


@pytest.mark.parametrize(
    ("mesh", "places"),
    [
        (None, []),
        (Mesh(replicate=4, shard=1), []),
        (Mesh(replicate=-1, shard=1), []),
        (Mesh(replicate=4, shard=-1), []),
        (Mesh(replicate=2, shard=-1), ["config.mesh.shard"]),
        (Mesh(replicate=2, shard=2), ["config.mesh.shard"]),
    ],
    ids=str,
)
def test_a_mesh_with_shards_is_refused_where_the_strategy_has_none(mesh: Mesh | None, places: Sequence[str]) -> None:
    found = check(Config(engine=FSDP1(sharding="NO_SHARD"), mesh=mesh), tiny_facts(world=4))
    assert [finding.where for finding in found if finding.rule == "fsdp1.mesh"] == places


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_copies_are_refused_where_the_strategy_cuts_over_all_ranks(sharding: Sharding) -> None:
    found = check(Config(engine=FSDP1(sharding=sharding), mesh=Mesh(replicate=2, shard=2)), tiny_facts(world=4))
    (finding,) = (finding for finding in found if finding.rule == "fsdp1.mesh")
    assert finding.where == "config.mesh.replicate"
    assert finding.what == f"replicate=2, but {sharding} cuts the model over all ranks once."


@pytest.mark.parametrize(
    ("frozen", "others"),
    [
        (("layers.0.attn.weight",), ""),
        (("layers.0.attn.weight", "layers.1.attn.weight"), " So does 1 other unit."),
        (("layers.0.attn.weight", "layers.1.attn.weight", "layers.2.attn.weight"), " So do 2 other units."),
    ],
)
def test_units_with_frozen_parameters_beside_trained_ones_are_counted(frozen: tuple[str, ...], others: str) -> None:
    facts = tiny_facts(tiny_model(blocks=3, frozen=frozen), world=2)
    found = finding_of("fsdp1.mixed-requires-grad", Config(engine=FLAT), facts)
    assert found.what.partition(" parameter is either.")[2] == others


@pytest.mark.parametrize("engine", [FLAT, FSDP1()], ids=["flat", "original"])
def test_a_unit_that_is_wholly_frozen_mixes_nothing(engine: FSDP1) -> None:
    model = tiny_model(frozen=("layers.0.attn.weight", "layers.0.mlp.weight"))
    assert rule_ids(Config(engine=engine), tiny_facts(model, world=2)) == []


@pytest.mark.parametrize(
    ("engine", "world", "fires"),
    [
        (FSDP1(), 1, 0),
        (FSDP1(), 2, 1),
        (FLAT, 1, 1),
        (FLAT, 2, 1),
        (FSDP1(sharding="NO_SHARD"), 2, 0),
        (evolve(FLAT, sharding="NO_SHARD"), 2, 1),
    ],
    ids=str,
)
def test_an_optimizer_that_reads_shapes_needs_whole_parameters(engine: FSDP1, world: int, fires: int) -> None:
    optimizer = tiny_optimizer(tiny_model(), "Muon", "torch.optim._muon")
    rules = rule_ids(Config(engine=engine), evolve(tiny_facts(world=world), optimizer=optimizer))
    assert rules.count("fsdp1.shaped-optimizer") == fires


@pytest.mark.parametrize("name", ["Adafactor", "LAMB", "Lamb", "LARS", "Lars", "Muon", "SOAP", "Shampoo"])
def test_optimizers_that_read_shapes_are_known_by_name_whoever_wrote_them(name: str) -> None:
    optimizer = tiny_optimizer(tiny_model(), name, "somebody.optim")
    rules = rule_ids(Config(engine=FSDP1()), evolve(tiny_facts(world=2), optimizer=optimizer))
    assert rules == ["fsdp1.shaped-optimizer"]


@pytest.mark.parametrize(
    ("frozen", "ignored", "fires"),
    [((), (), 1), (("embed.weight",), (), 0), ((), ("embed", "head"), 0)],
)
def test_a_tied_parameter_accumulates_in_16_bits_only_where_it_is_trained_in_a_unit(
    frozen: tuple[str, ...], ignored: tuple[str, ...], fires: int
) -> None:
    engine = FSDP1(sharding="NO_SHARD", ignored=ignored)
    facts = tiny_facts(tiny_model(tied=True, frozen=frozen), world=8)
    rules = rule_ids(Config(engine=engine, precision=BF16(), accumulation=2), facts)
    assert rules.count("fsdp1.tied-gradients") == fires
