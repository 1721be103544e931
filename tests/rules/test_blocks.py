"""Selections of blocks: how many modules they choose."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import (
    CheckpointBlocks,
    CompileBlocks,
    Config,
    Wrap,
    WrapBlocks,
    WrapPaths,
    WrapRoot,
    WrapSize,
)
from prepkit.facts import ClassFact, ModelFacts, ModuleFact, ParamFact
from prepkit.resolve.modules import select
from prepkit.rules import check
from prepkit.testing.tiny import tiny_model
from tests.support.rule_findings import fsdp2_with, mended, rule_ids


@pytest.mark.parametrize("wrap", [WrapRoot(), WrapSize(10**6)])
def test_one_unit_for_the_whole_model_is_a_warning_for_fsdp2_and_an_error_for_blocks(wrap: Wrap) -> None:
    assert rule_ids(*fsdp2_with(wrap)) == ["blocks.one-unit"]
    assert rule_ids(Config(checkpointing=CheckpointBlocks(blocks=wrap))) == ["blocks.none-selected"]


def test_a_size_that_selects_nothing_is_not_the_fix_for_itself() -> None:
    (found,) = check(*fsdp2_with(WrapSize(1_000_000)))
    assert found.rule == "blocks.one-unit"
    assert "WrapSize(1_000_000)" not in found.fix
    assert found.fix == 'Write WrapClasses(("Block",)) or WrapBlocks(); or WrapSize(61).'


def test_declared_blocks_of_which_one_is_present_are_in_order() -> None:
    model = evolve(tiny_model(), declared_blocks=("Block", "VisionLayer"))
    assert rule_ids(*fsdp2_with(WrapBlocks(), model)) == []


def test_lists_of_lists_are_not_taken_for_blocks() -> None:
    classes = (ClassFact(name="Net", module="m"), ClassFact(name="ModuleList", module="m", has_forward=False))
    tree = (("", 0), ("layers", 1), ("layers.0", 1), ("layers.1", 1))
    model = ModelFacts(
        classes=classes,
        modules=tuple(ModuleFact(path=path, cls=cls) for path, cls in tree),
        params=(ParamFact(name="weight", shape=(2,), dtype="float32"),),
    )
    assert select(WrapBlocks(), model) == ()
    assert select(WrapBlocks(), evolve(model, declared_blocks=("ModuleList",))) == ()


def test_a_repair_of_one_selection_leaves_the_other_alone() -> None:
    cfg = Config(
        checkpointing=CheckpointBlocks(blocks=WrapRoot()), compile=CompileBlocks(blocks=WrapPaths(("layers.*",)))
    )
    found = mended("blocks.none-selected", cfg)
    assert (found.checkpointing, found.compile) == (None, cfg.compile)
