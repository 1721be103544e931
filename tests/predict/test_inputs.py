"""What the formulas read of a plan: sizes in its dtypes, groups, cuts, and the numbers of DeepSpeed's config."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from attrs import evolve

from prepkit.config import (
    BF16,
    DDP,
    FP8,
    FSDP1,
    FSDP2,
    MSAMP,
    SGD,
    AdamW,
    Config,
    DeepSpeed,
    Engine,
    TensorParallel,
    TPLayer,
    TPPlan,
    WrapRoot,
)
from prepkit.facts import BufferFact, ParamFact
from prepkit.plan import Plan
from prepkit.predict import predict
from prepkit.predict.inputs import inputs_of
from prepkit.predict.zero import Zero
from prepkit.steps import MarkLeafModules
from prepkit.testing import tiny_facts, tiny_model
from prepkit.testing.tiny import LIBRARIES, with_batchnorm
from tests.support.plans import make

BUFFERS = (
    BufferFact(name="layers.0.scale", shape=(3,), dtype="float32"),
    BufferFact(name="norm.running_mean", shape=(2,), dtype="bfloat16"),
    BufferFact(name="head.bias_table", shape=(5,), dtype="float32"),
    BufferFact(name="positions", shape=(8,), dtype="int64"),
)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (DDP(), 3 * 4 + 2 * 2 + 5 * 4 + 8 * 8),
        (FSDP1(), 3 * 4 + 2 * 4 + 5 * 4 + 8 * 8),  # a batch norm is a unit that computes in float32
        (FSDP1(buffer_dtype="bfloat16"), 3 * 2 + 2 * 4 + 5 * 2 + 8 * 8),
        (FSDP1(buffer_dtype="bfloat16", ignored=("head",)), 3 * 2 + 2 * 4 + 5 * 4 + 8 * 8),
    ],
    ids=["DDP", "FSDP1", "FSDP1 casts", "FSDP1 ignores one"],
)
def test_buffers_count_in_the_dtypes_that_units_give_them(engine: Engine, expected: int) -> None:
    model = evolve(with_batchnorm(tiny_model(dtype="bfloat16", frozen=("head.weight",))), buffers=BUFFERS)
    facts = tiny_facts(model, world=2, optimizer=False)
    made = make(Config(engine=engine, precision=BF16(), optimizer=AdamW()), facts)
    assert inputs_of(made).buffers == expected


def test_frozen_parameters_that_come_in_16_bits_are_widened_beside_trained_ones() -> None:
    model = tiny_model(dtype="bfloat16", frozen=("embed.weight",))
    cfg = Config(engine=FSDP1(wrap=WrapRoot()), precision=BF16(), optimizer=AdamW())
    given = inputs_of(made := make(cfg, tiny_facts(model, world=2, optimizer=False)))
    assert given.upcast_frozen == 8 * 4 * 2
    assert any("64 B more in all" in note for note in predict(made).notes)


def test_cut_layers_count_in_parts() -> None:
    rows = TPPlan((TPLayer("layers.*.attn", "colwise"), TPLayer("layers.*.mlp", "colwise", output_layout="replicate")))
    facts = tiny_facts(world=2, optimizer=False)
    cfg = Config(engine=TensorParallel(), tp_plan=rows, optimizer=AdamW())
    cut = sum(prod(param.shape) for param in facts.model.params if param.name.startswith("layers."))
    whole = sum(prod(param.shape) for param in facts.model.params) - cut
    assert inputs_of(make(cfg, facts)).total() == 4 * (whole + cut // 2)


def test_what_no_unit_shards_is_stepped_too() -> None:
    model = tiny_model(extra=(ParamFact(name="norm.temperature", shape=(), dtype="float32"),))
    facts = tiny_facts(model, world=2, optimizer=False)
    ((param, count),) = inputs_of(make(Config(engine=FSDP2(), optimizer=SGD(momentum=0.9)), facts)).whole
    assert (param.shape, param.group, count) == ((), 0, 1)


def test_nothing_is_predicted_under_ms_amp() -> None:
    facts = tiny_facts(tiny_model(width=16, vocab=16), world=2, device="cuda")
    facts = evolve(facts, env=evolve(facts.env, libraries=LIBRARIES, capability=(10, 0)))
    found = predict(make(Config(engine=DDP(), precision=FP8(backend=MSAMP())), facts))
    assert found.not_predicted == ("everything: MS-AMP replaces weights and optimizer by its own",)
    assert not found.classes


# --- DeepSpeed -----------------------------------------------------------------------------------------------------


def planned(stage: int, world: int = 2, blocks: int = 2, **config: Any) -> Plan:
    engine = DeepSpeed(stage=stage, micro_batch=1, config=config)  # type: ignore[arg-type]
    facts = tiny_facts(tiny_model(blocks=blocks), world=world, optimizer=False)
    facts = evolve(facts, env=evolve(facts.env, bf16=True))
    return make(Config(engine=engine, precision=BF16(), optimizer=AdamW()), facts)


def zero(plan: Plan) -> Zero:
    found = inputs_of(plan).zero
    assert found is not None
    return found


def test_numbers_that_nobody_says_are_deepspeed_s_own() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig()
    own = zero(planned(3))
    assert (own.bucket, own.persistent, own.live, own.reuse, own.sub_group) == (
        config.reduce_bucket_size,
        config.param_persistence_threshold,
        config.max_live_parameters,
        config.max_reuse_distance,
        config.sub_group_size,
    )


@pytest.mark.parametrize(
    ("config", "unknown"),
    [
        ({}, ()),
        *(
            ({"zero_optimization": {name: False}}, (f"{name}=false",))
            for name in ("reduce_scatter", "use_multi_rank_bucket_allreduce", "contiguous_gradients")
        ),
        ({"bf16": {"bf16_optimizer_states": True}}, ("bf16.bf16_optimizer_states",)),
        ({"tensor_parallel": {"autotp_size": 2}}, ("DeepSpeed's own tensor parallelism",)),
    ],
    ids=str,
)
def test_settings_without_formulas_are_named(config: dict[str, Any], unknown: tuple[str, ...]) -> None:
    assert zero(planned(1, **config)).unknown == unknown


def test_a_step_that_is_in_no_table_is_named_and_not_passed_over() -> None:
    class Unknown:
        """A kind that nobody has looked at yet."""

    known = planned(1)
    strange = evolve(known, steps=(*known.steps, evolve(known.steps[0], step=Unknown())))
    with pytest.raises(LookupError, match="Unknown is in neither table of"):
        inputs_of(strange)


def test_a_leaf_is_gathered_whole_and_a_module_whose_path_begins_alike_is_another() -> None:
    plan = planned(3, blocks=11)
    block, layer = 4 * 4 + 16 * 4, 16 * 4
    assert zero(plan).module == layer
    marked = evolve(plan.steps[0], step=MarkLeafModules(paths=("layers.1",)))
    assert zero(evolve(plan, steps=(*plan.steps, marked))).module == block
