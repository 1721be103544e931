"""The global batch: what it makes of the accumulation, and what is said where the numbers do not multiply."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit import planner
from prepkit.config import (
    DDP,
    FSDP1,
    FSDP2,
    Config,
    DeepSpeed,
    EachLoader,
    Engine,
    KeepLoaders,
    Mesh,
    ShardLoaders,
    Single,
    TPLayer,
    TPPlan,
)
from prepkit.facts import Facts, LoaderFacts
from prepkit.plan import Plan
from prepkit.render.plan import plan_text
from prepkit.steps.engines import InitializeDeepSpeed
from prepkit.testing.tiny import tiny_facts, tiny_loader
from tests.support.rule_findings import finding_of, rule_ids

NUMBERS = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


def facts(world: int, *loaders: LoaderFacts) -> Facts:
    """Ranks that read the tiny loader, four samples at once, unless other loaders are given."""
    return evolve(tiny_facts(world=world), loaders=loaders or (tiny_loader(length=4096),))


def planned(cfg: Config, world: int, *loaders: LoaderFacts) -> Plan:
    return planner.plan(cfg, facts(world, *loaders)).unwrap()


@pytest.mark.parametrize(
    ("engine", "world", "mesh", "steps"),
    [
        (Single(), 1, None, 16),
        (DDP(), 4, None, 4),
        (FSDP1(), 8, None, 2),
        (FSDP2(), 4, None, 4),
        (FSDP2(), 16, Mesh(replicate=4, shard=4), 1),
        (FSDP2(), 8, Mesh(shard=4, tensor=2), 4),
        (DeepSpeed(stage=2), 8, None, 2),
        (DeepSpeed(stage=3, micro_batch=2), 8, None, 4),
    ],
)
def test_the_accumulation_follows_from_loader_and_data_ranks_under_every_engine(
    engine: Engine, world: int, mesh: Mesh | None, steps: int
) -> None:
    """Tensor ranks read the same samples, so that they count once (pain 4)."""
    micro = engine.micro_batch if isinstance(engine, DeepSpeed) and engine.micro_batch else 4
    cuts = TPPlan((TPLayer("layers.*.mlp", "colwise"),)) if mesh and mesh.tensor > 1 else None
    cfg = Config(engine=engine, mesh=mesh, global_batch=64)
    cfg = evolve(cfg, tp_plan=cuts) if cuts else cfg
    made = planned(cfg, world, tiny_loader(batch_size=micro, length=4096))
    assert (made.owners.accumulation_steps, made.owners.global_batch) == (steps, 64)
    if not isinstance(engine, DeepSpeed):
        assert "64 samples per step" in plan_text(made)
        return
    (step,) = (item.step for item in made.steps if isinstance(item.step, InitializeDeepSpeed))
    handed = {".".join(setting.path): setting.value for setting in step.settings}
    assert [int(handed[name]) for name in NUMBERS] == [micro, steps, 64]


def test_a_batch_that_is_split_over_the_ranks_counts_whole() -> None:
    cfg = Config(engine=DDP(), global_batch=64, loaders=ShardLoaders(split_batches=True))
    assert planned(cfg, 4, tiny_loader(batch_size=16)).owners.accumulation_steps == 4


def test_loaders_for_evaluation_do_not_count() -> None:
    pair = (tiny_loader(length=4096), tiny_loader(batch_size=16, length=4096))
    each = EachLoader((ShardLoaders(), ShardLoaders(purpose="evaluation")))
    assert planned(Config(engine=DDP(), global_batch=64, loaders=each), 4, *pair).owners.accumulation_steps == 4
    for wrong in (EachLoader((ShardLoaders(), KeepLoaders())), ShardLoaders()):
        asked = Config(engine=DDP(), global_batch=64, loaders=wrong)
        assert "read 4, 16 samples at once" in finding_of("global-batch.loaders-differ", asked, facts(4, *pair)).what
        accepted = evolve(asked, accumulation=4)  # said: the first of them counts
        assert not [rule for rule in rule_ids(accepted, facts(4, *pair)) if rule.startswith("global-batch")]


def test_without_a_global_batch_the_plan_says_what_the_numbers_make() -> None:
    assert planned(Config(engine=DDP(), accumulation=3), 4).owners.global_batch == 48
    silent = planner.plan(Config(engine=DDP(), accumulation=3), tiny_facts(world=4)).unwrap()
    assert (silent.owners.accumulation_steps, silent.owners.global_batch) == (3, None)
    assert "samples per step" not in plan_text(silent)


def test_an_unreachable_one_is_told_with_the_nearest_numbers_of_every_factor() -> None:
    """The numbers of the fix are legal as they stand."""
    cfg, two = Config(engine=DDP(), global_batch=256), tiny_loader(batch_size=2, length=4096)
    told = finding_of("global-batch.unreachable", cfg, facts(7, two))
    assert "2 on each of 7 data ranks are 14 at once" in told.what
    assert "global_batch=252 (accumulation 18) or global_batch=266 (accumulation 19)" in told.fix
    assert "start 4 ranks (accumulation 32) or 8 ranks (accumulation 16)" in told.fix
    for whole, steps in ((252, 18), (266, 19)):
        assert planned(evolve(cfg, global_batch=whole), 7, two).owners.accumulation_steps == steps
    for world, steps in ((4, 32), (8, 16)):
        assert planned(cfg, world, two).owners.accumulation_steps == steps
    smaller = finding_of("global-batch.unreachable", evolve(cfg, global_batch=24), facts(8))
    assert "batch_size=3 (accumulation 1), --batch-size 3 on the command line" in smaller.fix
    assert "global_batch=32 (accumulation 1)" in smaller.fix
    assert "global_batch=0" not in smaller.fix


def test_ranks_to_start_are_counted_with_those_that_read_the_same() -> None:
    cut = TPPlan((TPLayer("layers.*.mlp", "colwise"),))
    cfg = Config(engine=FSDP2(), mesh=Mesh(shard=-1, tensor=2), tp_plan=cut, global_batch=32)
    told = finding_of("global-batch.unreachable", cfg, facts(6))
    assert "start 4 ranks (accumulation 4) or 8 ranks (accumulation 2)" in told.fix
    assert planned(cfg, 8).owners.accumulation_steps == 2


def test_what_is_written_beside_it_has_to_multiply_to_it() -> None:
    cfg = Config(engine=DDP(), global_batch=64)
    assert planned(evolve(cfg, accumulation=4), 4).owners.accumulation_steps == 4
    told = finding_of("global-batch.two-places", evolve(cfg, accumulation=1), facts(4))
    assert "accumulation=1, and global_batch=64: 4 x 4 ranks x 1 = 16." in told.what
    alone = tiny_facts(world=4)  # no loader: the product of the others has to divide it
    assert rule_ids(evolve(cfg, accumulation=4), alone) == []
    assert rule_ids(evolve(cfg, accumulation=3), alone) == ["global-batch.two-places"]


@pytest.mark.parametrize("engine", [DDP(), DeepSpeed(stage=1)])
def test_where_nothing_says_what_a_rank_reads_at_once_the_accumulation_is_not_guessed(engine: Engine) -> None:
    cfg = Config(engine=engine, global_batch=64)
    assert rule_ids(cfg, tiny_facts(world=4)) == ["global-batch.unknown"]
    own = facts(4, tiny_loader(custom_batches=True, batch_size=None, batches=40))
    assert "global-batch.unknown" in rule_ids(cfg, own)
    assert "of the 1 loader none" in finding_of("global-batch.unknown", cfg, own).what


def test_numbers_that_other_rules_refuse_are_left_to_them() -> None:
    assert rule_ids(Config(engine=DDP(), global_batch=0), facts(4)) == ["values.global-batch"]
    assert rule_ids(Config(engine=DDP(), global_batch=64, accumulation=0), facts(4)) == ["values.accumulation"]
    wrong = Config(engine=FSDP2(), mesh=Mesh(shard=3), global_batch=7)
    assert rule_ids(wrong, facts(4)) == ["mesh.not-world-size"], "how many ranks read is not known"


def test_deepspeeds_own_numbers_beside_it_are_held_against_it_and_said_once() -> None:
    def ids(text: str, world: int = 8, **more: int) -> list[str]:
        return rule_ids(Config(engine=DeepSpeed(stage=1, config=text), global_batch=64, **more), facts(world))

    assert ids('{"train_batch_size": 64, "gradient_accumulation_steps": 2}') == []
    assert ids('{"train_batch_size": 128}') == ["deepspeed.two-places"]
    assert ids('{"gradient_accumulation_steps": 3}') == ["deepspeed.two-places"]
    assert ids("{}", world=7) == ["global-batch.unreachable"]
    assert ids("{}", accumulation=3) == ["global-batch.two-places"]


def test_rules_that_ask_for_the_accumulation_ask_for_the_one_that_follows() -> None:
    from prepkit.facts import GroupFact, OptimizerFacts
    from prepkit.testing.tiny import tiny_model

    names = tuple(param.name for param in tiny_model().params)
    closing = OptimizerFacts(name="LBFGS", module="torch.optim.lbfgs", groups=(GroupFact(slots=names),))
    one = evolve(facts(1), optimizer=closing)
    assert "accumulation=2" in finding_of("optimizer.closure", Config(global_batch=8), one).what
    assert "optimizer.closure" not in rule_ids(Config(global_batch=4), one)


def test_the_horizon_counts_optimizer_steps_whatever_the_global_batch() -> None:
    """Pain 15: ticks are those of optimizer steps, not of micro-batches."""
    from prepkit.facts import SchedulerFacts

    made = SchedulerFacts(name="LinearLR", drives_optimizer=True, horizon=100)
    cfg, seen = Config(engine=DDP(), global_batch=64, total_steps=100), evolve(facts(4), scheduler=made)
    assert rule_ids(cfg, seen) == []
    assert rule_ids(evolve(cfg, total_steps=400), seen) == ["scheduler.runs-out"]
