"""What tables and small sums of the resolved config say: engines, optimizers, loaders, checkpoints, units."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from prepkit.config import (
    BF16,
    DDP,
    FSDP1,
    FSDP2,
    XLA,
    Config,
    DeepSpeed,
    Engine,
    KeepLoaders,
    Mesh,
    OffloadToCPU,
    ShardLoaders,
    Single,
    TensorParallel,
)
from prepkit.facts import ClassFact, Env, ModelFacts, ModuleFact, ParamFact
from prepkit.facts.checkpoint import KeyMapping, StoredTensor, WeightConverter
from prepkit.plan.layout import Placement
from prepkit.resolve.checkpoint import assemble, lacking, unmatched
from prepkit.resolve.engines import ENGINES
from prepkit.resolve.loaders import is_divided, split
from prepkit.resolve.modules import repeated_blocks
from prepkit.resolve.optimizer_table import FAILS, places
from prepkit.resolve.resolved import Resolved
from prepkit.resolve.tensor_parallel import tensor_parallel_size
from prepkit.resolve.units import every_batch_norm, ignored_params, shards_packed
from prepkit.testing import tiny_facts, tiny_loader, tiny_model


def test_dtensors_are_made_by_engines_that_cut_single_parameters() -> None:
    makes = {engine.__name__: row.makes_dtensors for engine, row in ENGINES.items()}
    assert makes == {
        "Single": False, "DDP": False, "FSDP1": False, "FSDP2": True, "TensorParallel": True, "XLA": False,
        "DeepSpeed": False,
    }  # fmt: skip


# --- optimizers under engines --------------------------------------------------------------------------------------

UNDER: dict[str, Config] = {
    "FSDP1": Config(engine=FSDP1()),
    "FSDP1, flat": Config(engine=FSDP1(use_orig_params=False)),
    "FSDP2": Config(engine=FSDP2()),
    "FSDP2, offloaded": Config(engine=FSDP2(offload=OffloadToCPU())),
    "FSDP2 over parts": Config(engine=FSDP2(), mesh=Mesh(tensor=2)),
    "TensorParallel": Config(engine=TensorParallel()),
    **{f"ZeRO {stage}": Config(engine=DeepSpeed(stage=stage)) for stage in range(4)},
    "DDP": Config(engine=DDP()),
    "Single": Config(engine=Single()),
    "XLA": Config(engine=XLA()),
}
FLAT, DTENSOR, STEPPED = {"FSDP1", "FSDP1, flat"}, {"FSDP2", "FSDP2, offloaded"}, {"ZeRO 1", "ZeRO 2", "ZeRO 3"}
PARTS = {"FSDP2 over parts", "TensorParallel"}


@pytest.mark.parametrize(
    ("name", "raises", "otherwise"),
    [
        ("torch.Adafactor", DTENSOR | PARTS, FLAT | STEPPED),
        ("transformers.Adafactor", DTENSOR | PARTS, FLAT | STEPPED),
        ("torch.Muon", FLAT | STEPPED, set()),
        ("torch.Rprop", DTENSOR | PARTS, set()),
        ("torch.SparseAdam", FLAT | DTENSOR | {"FSDP2 over parts", "ZeRO 0"} | STEPPED, set()),
    ],
)
def test_optimizers_fail_under_these_engines(name: str, raises: set[str], otherwise: set[str]) -> None:
    found = {(under, FAILS[name].get(place, "")) for under, cfg in UNDER.items() for place in places(cfg)}
    expected = {(under, "raises") for under in raises} | {(under, "trains otherwise") for under in otherwise}
    assert {(under, how) for under, how in found if how} == expected


# --- loaders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ({}, True),
        ({"sampler": "custom"}, True),
        ({"sampler": "sequential"}, False),
        ({"foreign": True}, False),
        ({"iterable": True}, False),
        ({"own_iteration": True}, False),
        ({"stateful": True}, False),
    ],
    ids=str,
)
def test_one_rank_divides_only_what_then_has_another_order(changes: dict[str, Any], alone: bool) -> None:
    loader = tiny_loader(**changes)
    assert is_divided(ShardLoaders(), loader, 1) is alone
    assert is_divided(ShardLoaders(), loader, 2)
    assert not is_divided(KeepLoaders(), loader, 2)


# --- checkpoints ---------------------------------------------------------------------------------------------------

RECIPE = WeightConverter(sources=("experts.*.up", "experts.*.gate"), stack=0, join=1)


def stored(number: int, shape: tuple[int, ...], source: int = 0, name: str = "up") -> StoredTensor:
    place = KeyMapping(name="experts", recipe=0, source=source, number=number)
    return StoredTensor(
        key=f"experts.{number}.{name}", dtype="int8", shape=shape, file=0, start=0, length=1, place=place
    )


def test_tensors_of_other_shapes_make_no_stack() -> None:
    made = assemble("experts", (stored(0, (2, 5)), stored(1, (2, 5)), stored(2, (3, 5))), RECIPE)
    assert made.wrong == "`experts.0.up` is [2, 5], `experts.2.up` is [3, 5]"
    assert (made.shape, made.blocks) == ((), ())
    alike = assemble("experts", (stored(0, (2, 5)), stored(1, (2, 5))), RECIPE)
    assert (alike.wrong, alike.shape) == ("", (2, 2, 5))


def test_patterns_that_no_key_matches_are_named_and_a_tensor_without_a_recipe_has_none() -> None:
    ups = (stored(0, (2, 5)), stored(1, (2, 5)))
    gates = (stored(0, (2, 5), 1, "gate"), stored(1, (2, 5), 1, "gate"))
    assert unmatched(assemble("experts", ups, RECIPE)) == ("experts.*.gate",)
    assert unmatched(assemble("experts", gates, RECIPE)) == ("experts.*.up",)
    assert unmatched(assemble("experts", (*ups, *gates), RECIPE)) == ()
    assert unmatched(assemble("experts", ups[:1], None)) == ()


# --- modules and units ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [True, False])
def test_repeated_modules_without_a_forward_are_no_blocks(runs: bool) -> None:
    classes = tuple(ClassFact(name=name, module="m", has_forward=name == "LM" or runs) for name in ("LM", "Group"))
    lists = ClassFact(name="ModuleList", module="m", has_forward=False)
    modules = (("", 0), ("groups", 2), ("groups.0", 1), ("groups.1", 1))
    model = ModelFacts(
        classes=(*classes, lists), modules=tuple(ModuleFact(path=path, cls=cls) for path, cls in modules), params=()
    )
    assert [block.paths for block in repeated_blocks(model)] == ([("groups.0", "groups.1")] if runs else [])


@pytest.mark.parametrize("engine", [FSDP1(ignored=("head",)), FSDP2(ignored=("head",)), FSDP2(ignored=("embed",))])
def test_a_tied_parameter_is_ignored_wherever_it_is(engine: FSDP1 | FSDP2) -> None:
    assert ignored_params(engine, tiny_model(tied=True)) == {"embed.weight", "head.weight"}
    assert ignored_params(evolve(engine, ignored=("norm",)), tiny_model(tied=True)) == {"norm.weight"}
    assert ignored_params(evolve(engine, ignored=()), tiny_model(tied=True)) == frozenset()


@pytest.mark.parametrize(
    ("stage", "split", "expected"),
    [(1, 1, ()), (3, 1, ("partition",)), (1, 2, ("replicate", "split")), (3, 2, ("partition", "split"))],
)
def test_deepspeed_partitions_at_stage_3_and_splits_where_its_config_says_so(
    stage: Any, split: int, expected: tuple[Placement, ...]
) -> None:
    engine = DeepSpeed(stage=stage, micro_batch=1, config={"tensor_parallel": {"autotp_size": split}})
    resolved = Resolved(cfg=Config(engine=engine, precision=BF16()), facts=tiny_facts(world=4))
    assert {layout.placements for layout in resolved.layout} == {expected}


@pytest.mark.parametrize(
    ("engine", "size"), [(TensorParallel(), 8), (DeepSpeed(), 1), (FSDP2(), 2), (DDP(), 1)], ids=str
)
def test_layers_are_cut_over_the_tensor_axis(engine: Engine, size: int) -> None:
    cfg = Config(engine=engine, mesh=Mesh(tensor=2) if isinstance(engine, FSDP2) else None)
    facts = tiny_facts(world=8)
    assert tensor_parallel_size(cfg, Env(world_size=8), Resolved(cfg=cfg, facts=facts).mesh or ()) == size


def test_a_number_that_all_keys_share_does_not_count_the_stack() -> None:
    def named(number: int) -> StoredTensor:
        return evolve(stored(number, (2, 5)), key=f"experts.{number}.up.0")

    found = assemble("experts", (named(0), named(2)), RECIPE)
    assert lacking(found, 3) == ("experts.1.up.0",)


@pytest.mark.parametrize(
    ("changes", "parts", "expected"),
    [
        ({"iterable": True, "shards": 4}, 2, "shards"),
        ({"iterable": True, "shards": 4}, 1, "stream"),
        ({"iterable": True, "shards": 3}, 2, "stream"),
        ({"iterable": True}, 2, "stream"),
        ({"custom_batches": True}, 2, "batches"),
        ({"sampler": "custom"}, 2, "sampler"),
        ({}, 2, "samples"),
    ],
)
def test_a_loader_is_divided_by_what_it_is(changes: dict[str, Any], parts: int, expected: str) -> None:
    assert split(tiny_loader(**changes), parts) == expected


@pytest.mark.parametrize(
    ("cls", "dtype", "gathered", "cut"),
    [
        ("Params4bit", "bfloat16", None, True),
        ("Params4bit", "float16", "float16", True),
        ("Params4bit", "float32", None, True),
        ("Params4bit", "bfloat16", "float32", False),
        ("Params4bit", "uint8", None, False),
        ("Int8Params", "float32", None, False),
        ("Parameter", "bfloat16", None, False),
    ],
)
def test_packed_weights_are_cut_where_they_come_back_bit_by_bit(
    cls: str, dtype: str, gathered: str | None, cut: bool
) -> None:
    assert shards_packed(ParamFact(name="w", shape=(8, 1), dtype=dtype, cls=cls), gathered) is cut


@pytest.mark.parametrize(
    ("cfg", "steps"),
    [
        (Config(accumulation=3, global_batch=64), 3),
        (Config(global_batch=64), 8),
        (Config(accumulation=2), 2),
        (Config(), 1),
    ],
)
def test_what_is_written_of_accumulation_comes_before_what_follows(cfg: Config, steps: int) -> None:
    resolved = Resolved(cfg=evolve(cfg, engine=DDP()), facts=tiny_facts(world=2, loader=tiny_loader()))
    assert resolved.accumulation == steps


def test_a_batch_norm_that_is_the_model_itself_is_no_unit_below_it() -> None:
    norm = ClassFact(name="BatchNorm1d", module="torch.nn.modules.batchnorm", mro=("_BatchNorm",))
    modules = (ModuleFact(path="", cls=0), ModuleFact(path="inner", cls=0))
    assert every_batch_norm(ModelFacts(classes=(norm,), modules=modules, params=())) == {"inner"}


def test_a_mesh_that_does_not_come_out_leaves_no_flat_shards_to_trip_over() -> None:
    resolved = Resolved(cfg=Config(engine=FSDP1(), mesh=Mesh(shard=3)), facts=tiny_facts(world=2))
    assert all(part.shards == 1 for part in resolved.flat_shards.values())
