"""A model that arrives as units of ``fully_shard``: where it is said that the config does not agree with it."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit import planner
from prepkit.config import BF16, FP8, FSDP2, BroadcastWeights, CheckpointBlocks, Config, Mesh, WrapRoot
from prepkit.facts import Facts, UnitFact
from prepkit.rules import check
from prepkit.steps import ShardUnits
from prepkit.testing.tiny import arrived, tiny_facts, tiny_model
from tests.support.rule_findings import finding_of


def cut() -> Facts:
    """The tiny model in its blocks and the root, over two ranks."""
    root = UnitFact(path="", ranks=2, reshard_after_forward=False)
    model = arrived(tiny_model(), paths=("layers.0", "layers.1"), root=root)
    return tiny_facts(model, world=2, device="cuda")


@pytest.mark.parametrize(
    ("cfg", "places"),
    [
        (Config(engine=FSDP2()), []),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=2, shard=1)), ["sharded.differs config.mesh"]),
        (Config(engine=FSDP2(wrap=WrapRoot())), ["sharded.kept config.engine.wrap"]),
        (Config(engine=FSDP2(ignored=("head",))), ["sharded.kept config.engine.ignored"]),
        (Config(engine=FSDP2(reshard_after_forward=False)), ["sharded.kept config.engine.reshard_after_forward"]),
        (Config(engine=FSDP2(), checkpointing=CheckpointBlocks()), ["sharded.too-late config.checkpointing"]),
        (Config(engine=FSDP2(), weights=BroadcastWeights()), ["sharded.too-late config.weights"]),
        (
            Config(engine=FSDP2(), precision=FP8()),
            ["sharded.differs config.precision", "sharded.too-late config.precision"],
        ),
    ],
    ids=str,
)
def test_what_stands_is_held_against_each_field_of_the_config(cfg: Config, places: list[str]) -> None:
    found = check(cfg, cut())
    assert [f"{f.rule} {f.where}" for f in found if f.rule.startswith("sharded.")] == places


def test_two_policies_are_both_named() -> None:
    facts = cut()
    first, *others = facts.model.units
    low = (evolve(first, param_dtype="bfloat16", reduce_dtype="float32"), *others)
    mixed = evolve(facts, model=evolve(facts.model, units=low))
    found = finding_of("sharded.not-to-plan", Config(engine=FSDP2()), mixed)
    assert "`layers.0` is gathered in bfloat16 and reduced in float32, `layers.1` in None and None;" in found.what


def test_what_stands_is_planned_in_its_own_words() -> None:
    """A reduction dtype that is not said is that of the parameters, and stays unsaid in the step that verifies it."""
    facts = cut()
    units = tuple(evolve(unit, param_dtype="bfloat16") for unit in facts.model.units)
    cfg = Config(engine=FSDP2(), precision=BF16(reduce_dtype="bfloat16", output_dtype="bfloat16"))
    plan = planner.plan(cfg, evolve(facts, model=evolve(facts.model, units=units))).unwrap()
    (step,) = (one.step for one in plan.steps if isinstance(one.step, ShardUnits))
    assert (step.param_dtype, step.reduce_dtype) == ("bfloat16", None)
