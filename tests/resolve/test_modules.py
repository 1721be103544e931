"""Selections, units and axes on small models."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import (
    DDP,
    FSDP2,
    Config,
    DeepSpeed,
    Mesh,
    Single,
    TensorParallel,
    Wrap,
    WrapBlocks,
    WrapClasses,
    WrapPaths,
    WrapRoot,
    WrapSize,
)
from prepkit.facts import ClassFact, Env, ModelFacts, ModuleFact, ParamFact
from prepkit.resolve.mesh import axes
from prepkit.resolve.modules import matches, repeated_blocks, select, unit_of
from prepkit.steps import Axis

CLASSES = ("LM", "Embedding", "ModuleList", "Block", "Linear", "Sequential")


def lm(declared: tuple[str, ...] = (), ties: tuple[tuple[str, ...], ...] = ()) -> ModelFacts:
    """embed, blocks.{0,1}.{up,down} with 8 elements a weight, tail.{0,1} of different classes, head."""
    rows = [("", 0), ("embed", 1), ("blocks", 2)]
    rows += [
        (path, kind)
        for i in "01"
        for path, kind in ((f"blocks.{i}", 3), (f"blocks.{i}.up", 4), (f"blocks.{i}.down", 4))
    ]
    rows += [("tail", 5), ("tail.0", 4), ("tail.1", 1), ("head", 4)]
    weights = [path for path, kind in rows if kind in (1, 4)]
    return ModelFacts(
        classes=tuple(ClassFact(name=name, module="lm", has_forward=name != "ModuleList") for name in CLASSES),
        modules=tuple(ModuleFact(path=path, cls=kind) for path, kind in rows),
        params=tuple(ParamFact(name=f"{path}.weight", shape=(4, 2), dtype="float32") for path in weights),
        declared_blocks=declared,
        ties=ties,
    )


def test_repeated_blocks_are_the_items_of_uniform_lists() -> None:
    (block,) = repeated_blocks(lm())
    assert (block.cls, block.paths) == ("Block", ("blocks.0", "blocks.1"))


@pytest.mark.parametrize(
    ("wrap", "paths"),
    [
        (WrapRoot(), ()),
        (WrapBlocks(), ("blocks.0", "blocks.1")),
        (WrapClasses(("Linear",)), ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "tail.0", "head")),
        (WrapClasses(("ModuleList",)), ()),
        (WrapClasses(("ModuleList",), paths=("head", "blocks.1.*")), ("blocks.1.up", "blocks.1.down", "head")),
        (WrapPaths(("blocks.*", "head")), ("blocks.0", "blocks.1", "head")),
        (WrapPaths(("blocks.*", "blocks.0.up")), ("blocks.0.up", "blocks.0", "blocks.1")),
        (WrapSize(9), ("blocks.0", "blocks.1", "tail")),
        (
            WrapSize(8),
            ("embed", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "tail.0", "tail.1", "head"),
        ),
        (WrapSize(1000), ()),
    ],
)
def test_a_selection_gives_children_before_parents_and_never_the_root(wrap: Wrap, paths: tuple[str, ...]) -> None:
    assert select(wrap, lm()) == paths


def test_of_two_classes_with_one_name_both_are_meant() -> None:
    model = lm()
    others = (*model.classes, ClassFact(name="Block", module="elsewhere"))
    modules = tuple(evolve(m, cls=len(CLASSES)) if m.path == "blocks.1" else m for m in model.modules)
    both = select(WrapClasses(("Block",)), evolve(model, classes=others, modules=modules))
    assert both == ("blocks.0", "blocks.1")


def test_declared_blocks_go_before_repeated_ones() -> None:
    assert select(WrapBlocks(), lm(declared=("Embedding", "Absent"))) == ("embed", "tail.1")


def test_a_declared_block_that_would_split_a_tie_is_left_to_the_root() -> None:
    model = lm(declared=("Embedding", "Block"), ties=(("embed.weight", "head.weight"),))
    assert select(WrapBlocks(), model) == ("blocks.0", "blocks.1", "tail.1")


def test_a_tie_inside_one_block_splits_nothing() -> None:
    model = lm(declared=("Block",), ties=(("blocks.0.up.weight", "blocks.0.down.weight"),))
    assert select(WrapBlocks(), model) == ("blocks.0", "blocks.1")


def test_a_parameter_belongs_to_the_innermost_unit_around_it() -> None:
    owner = unit_of(("blocks.0.up", "blocks.0"), lm(ties=(("embed.weight", "blocks.1.alias"),)))
    assert owner["blocks.0.up.weight"] == "blocks.0.up"
    assert owner["blocks.0.down.weight"] == "blocks.0"
    assert owner["blocks.1.up.weight"] == ""
    assert owner["blocks.1.alias"] == ""


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [("a.*", "a.b", True), ("a.*", "a.b.c", False), ("a.?", "a.10", False), ("a.b", "axb", False), ("*", "a", True)],
)
def test_a_star_stays_inside_one_segment(pattern: str, path: str, fits: bool) -> None:
    assert matches(pattern, path) is fits


REPLICATE, SHARD, TENSOR = (
    Axis(name=name, size=size) for name, size in (("replicate", 2), ("shard", 4), ("tensor", 2))
)

SPLIT = {"tensor_parallel": {"autotp_size": 2}}


@pytest.mark.parametrize(
    ("cfg", "world", "expected"),
    [
        (Config(engine=Single()), 8, ()),
        (Config(engine=DDP()), 8, (evolve(REPLICATE, size=8),)),
        (Config(engine=FSDP2()), 8, (evolve(SHARD, size=8),)),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=2)), 8, (REPLICATE, SHARD)),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=-1, shard=4)), 8, (REPLICATE, SHARD)),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=3)), 8, None),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=-1, shard=-1)), 8, None),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=0)), 8, None),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=2, shard=2)), 8, None),
        (Config(engine=FSDP2(), mesh=Mesh(tensor=2)), 8, (SHARD, TENSOR)),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=2, tensor=2)), 16, (REPLICATE, SHARD, TENSOR)),
        (Config(engine=FSDP2(), mesh=Mesh(shard=4, tensor=-1)), 8, (SHARD, TENSOR)),
        (Config(engine=FSDP2(), mesh=Mesh(shard=4, tensor=-1)), 4, (SHARD,)),
        (Config(engine=FSDP2(), mesh=Mesh(tensor=3)), 8, None),
        (Config(engine=DeepSpeed(stage=1)), 8, (evolve(REPLICATE, size=8),)),
        (Config(engine=DeepSpeed(stage=3)), 8, (evolve(SHARD, size=8),)),
        (Config(engine=DeepSpeed(stage=3, config=SPLIT)), 8, (SHARD, TENSOR)),
        (Config(engine=DeepSpeed(stage=3, config=SPLIT)), 7, None),
        (Config(engine=TensorParallel()), 2, (TENSOR,)),
        (Config(engine=TensorParallel(), mesh=Mesh(tensor=2)), 2, (TENSOR,)),
    ],
)
def test_the_rest_of_the_mesh_is_what_is_left_of_the_world(
    cfg: Config, world: int, expected: tuple[Axis, ...] | None
) -> None:
    assert axes(cfg, Env(world_size=world)) == expected
