"""The model as it arrives: device maps, models that are wrapped already."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import DDP, FSDP1, FSDP2, XLA, Compile, CompileBlocks, CompileModel, Config
from prepkit.facts import ArchitectureFacts, Env, Mark, UnitFact
from prepkit.testing.tiny import arrived, marked, tiny_facts, tiny_model
from tests.support.rule_findings import finding_of, rule_ids


@pytest.mark.parametrize("value", ["true", "1", "false"])
def test_only_the_config_keeps_a_device_map_and_a_variable_that_says_so_is_named(value: str) -> None:
    facts = tiny_facts(
        evolve(tiny_model(), device_map=(("embed", "cuda:0"), ("head", "cuda:1"))),
        world=2,
        variables=(("ACCELERATE_BYPASS_DEVICE_MAP", value),),
    )
    fix = finding_of("model.device-map", Config(engine=DDP()), facts).fix
    assert fix.endswith(f"keep_device_map=True. prepkit does not obey ACCELERATE_BYPASS_DEVICE_MAP={value}.")
    assert rule_ids(Config(engine=DDP(), keep_device_map=True), facts) == []
    assert rule_ids(Config(), evolve(facts, env=Env())) == []


@pytest.mark.parametrize("engine", [FSDP1(), FSDP2(), XLA()], ids=["fsdp1", "fsdp2", "xla"])
def test_only_ddp_keeps_a_model_that_is_spread(engine: FSDP1 | FSDP2 | XLA) -> None:
    spread = evolve(tiny_model(), device_map=(("embed", "cuda:0"), ("head", "cuda:1")))
    cfg, facts = Config(engine=engine, keep_device_map=True), tiny_facts(spread, world=2)
    assert "keep_device_map" not in finding_of("model.device-map", cfg, facts).fix


def test_a_device_map_of_one_entry_is_no_map() -> None:
    facts = tiny_facts(evolve(tiny_model(), device_map=(("", "cuda:1"),)), world=2)
    assert rule_ids(Config(engine=DDP()), facts) == []


def test_what_prepkit_has_made_of_a_model_is_said_when_it_comes_again() -> None:
    model = evolve(marked(tiny_model(), "prepared"), prepared="DDP, BF16, config 0123456789ab")
    finding = finding_of("model.already-wrapped", Config(), tiny_facts(model))
    assert "DDP, BF16, config 0123456789ab" in finding.what
    assert "ready.unwrap(" in finding.fix


def test_a_model_that_transformers_has_cut_is_told_how_fsdp2_cuts_the_same_layers() -> None:
    model = tiny_model()
    cut = tuple(evolve(p, cls="DTensor", placements=("shard(0)",)) if "layers" in p.name else p for p in model.params)
    parallel = evolve(model, params=cut, architecture=ArchitectureFacts(tp_size=2))
    finding = finding_of("model.sharded-parameters", Config(engine=FSDP2()), tiny_facts(parallel, world=4))
    assert "transformers has cut the layers over 2 ranks, and FSDP2 shards whole layers" in finding.what
    assert "write mesh=Mesh(shard=-1, tensor=2)" in finding.fix
    other = finding_of("model.sharded-parameters", Config(engine=DDP()), tiny_facts(parallel, world=4))
    assert other.what.endswith("and DDP takes plain ones.")


@pytest.mark.parametrize("mark", ["ddp", "fsdp1", "fsdp2", "deepspeed", "prepared"])
def test_a_model_that_is_wrapped_is_refused_whatever_wraps_it(mark: Mark) -> None:
    assert rule_ids(Config(), tiny_facts(marked(tiny_model(), mark))) == ["model.already-wrapped"]


@pytest.mark.parametrize("path", ["", "layers.0"])
@pytest.mark.parametrize("asked", [CompileModel(), CompileBlocks()], ids=["model", "blocks"])
def test_a_model_of_which_any_module_is_compiled_is_compiled_in_no_other_way(asked: Compile, path: str) -> None:
    facts = tiny_facts(marked(tiny_model(), "compiled", path))
    assert rule_ids(Config(compile=asked), facts) == ["model.already-compiled"]
    assert rule_ids(Config(), facts) == []


@pytest.mark.parametrize("mark", ["ddp", "fsdp1", "deepspeed", "prepared"])
def test_units_of_fully_shard_stand_and_every_other_wrapper_is_refused_beside_them(mark: Mark) -> None:
    units = arrived(tiny_model(), root=UnitFact(path="", ranks=2, reshard_after_forward=False))
    cfg = Config(engine=FSDP2())
    assert "model.already-wrapped" not in rule_ids(cfg, tiny_facts(units, world=2))
    assert "model.already-wrapped" in rule_ids(cfg, tiny_facts(marked(units, mark), world=2))


@pytest.mark.parametrize(("engine", "unwraps"), [("DDP", True), ("XLA", True), ("FSDP2", False), ("DeepSpeed", False)])
def test_what_an_engine_has_changed_in_place_is_to_be_built_anew(engine: str, unwraps: bool) -> None:
    seen = evolve(marked(tiny_model(), "prepared", ""), prepared=f"{engine}, BF16, config 0123456789ab")
    found = finding_of("model.already-wrapped", Config(), tiny_facts(seen))
    assert ("ready.unwrap(" in found.fix) == unwraps
    assert (f"{engine} has changed this one in place" in found.fix) != unwraps
