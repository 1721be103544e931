"""Predictions with all their words, as text that a person can review: ``golden/predictions/<engine>.txt``.

The models are uneven on purpose: sizes that no number of ranks divides, parameters that are frozen or in 16 bits, a
root that is larger than its units, ranks without a row. So whatever a formula reads moves a number of some case. Below
each case stand its dearest settings, and what would make it fit into a byte less than it holds at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve

from prepkit import config as c
from prepkit import planner
from prepkit.facts import BufferFact, Facts, GroupFact, ModelFacts, ParamFact
from prepkit.plan import Plan
from prepkit.predict import PREDICTORS, predict
from prepkit.predict.prediction import Term, Traffic
from prepkit.predict.said import WHATS, at, said
from prepkit.predict.tensor_parallel import cut_traffic
from prepkit.testing import tiny_facts, tiny_loader, tiny_model
from prepkit.testing.tiny import LIBRARIES
from tests.support.drawn_runs import ENGINES, TP_LAYERS, changed
from tests.support.golden import assert_golden
from tests.support.plans import make
from tests.support.readable_plans import Settings, brief

GOLDEN = Path(__file__).parent / "golden" / "predictions"

FROZEN = ("layers.2.attn.weight", "head.weight")
MODELS: dict[str, ModelFacts] = {
    "three blocks": tiny_model(blocks=3, width=20, vocab=33),
    "a wide vocabulary": tiny_model(width=20, vocab=603, frozen=("head.weight",)),
    "16 bits, partly frozen": evolve(
        tiny_model(blocks=3, width=20, vocab=33, dtype="bfloat16", frozen=FROZEN),
        buffers=(BufferFact(name="norm.mean", shape=(20,), dtype="float32"),),
    ),
    "a frozen block": tiny_model(blocks=3, width=20, vocab=33, frozen=("layers.2.attn.weight", "layers.2.mlp.weight")),
    "a scalar": tiny_model(
        width=20, vocab=33, extra=(ParamFact(name="norm.scale", shape=(), dtype="float32"),), tied=True
    ),
}
HYBRID = c.Mesh(replicate=2, shard=3)
CUT: Settings = (("tp_plan", c.TPPlan(TP_LAYERS[:2])), ("mesh", c.Mesh(shard=3, tensor=2)))
ROWS: Settings = (("tp_plan", c.TPPlan(TP_LAYERS[4:])), ("mesh", c.Mesh(shard=2, tensor=3)))
INFERENCE = ("intent", c.Intent.INFERENCE)


def _zero(stage: int, **own: object) -> Settings:
    """A stage, with settings of ``zero_optimization``; by default its buffers are of the size of the model."""
    usual = {"reduce_bucket_size": 1500, "stage3_param_persistence_threshold": 30}
    return (("engine.stage", stage), ("engine.config", {"zero_optimization": usual | own}))


def _ds(**config: object) -> Settings:
    return (("engine.config", config),)


_STAGE_3: Settings = (("engine.stage", 3), ("precision", c.BF16()))
_BUCKET = {"reduce_bucket_size": 1500}
_SHORT = {"stage3_max_reuse_distance": 3000, "stage3_max_live_parameters": 4000, "stage3_prefetch_bucket_size": 0}

CASES: dict[str, tuple[tuple[str, int, Settings], ...]] = {
    "single": (
        ("16 bits, partly frozen", 1, (("precision", c.BF16()),)),
        ("a scalar", 1, (("engine", c.Single()), INFERENCE)),
        ("three blocks", 1, (("optimizer", c.SGD(momentum=0.9)), ("checkpointing", c.CheckpointBlocks()))),
    ),
    "ddp": (
        ("three blocks", 6, (("engine.gradient_as_bucket_view", False), ("accumulation", 3))),
        (
            "16 bits, partly frozen",
            6,
            (("engine.hook", c.CompressHook()), ("average_each", True), ("accumulation", 3)),
        ),
        ("a scalar", 2, (("engine.hook", c.PowerSGDHook()), ("engine.find_unused_parameters", True))),
    ),
    "fsdp1": (
        ("three blocks", 6, (("accumulation", 3),)),
        ("16 bits, partly frozen", 6, (("engine.sharding", "NO_SHARD"), ("precision", c.BF16()), ("accumulation", 3))),
        ("three blocks", 6, (("engine.sharding", "NO_SHARD"), ("precision", c.BF16()), ("optimizer", c.AdamW()))),
        ("a frozen block", 6, (("mesh", HYBRID), ("engine.sharding", "HYBRID_SHARD"), ("precision", c.BF16()))),
        ("a wide vocabulary", 6, (("engine.sharding", "SHARD_GRAD_OP"), ("engine.offload", True))),
        (
            "three blocks",
            6,
            (("engine.use_orig_params", False), ("engine.wrap", c.WrapRoot()), ("optimizer", c.AdamW())),
        ),
        ("three blocks", 6, (INFERENCE, ("precision", c.BF16()), ("engine.offload", True))),
    ),
    "fsdp2": (
        ("three blocks", 6, (("accumulation", 3), ("precision", c.BF16()))),
        ("16 bits, partly frozen", 6, (("mesh", HYBRID), ("precision", c.BF16()), ("average_each", True))),
        ("a wide vocabulary", 6, (("engine.reshard_after_forward", 3), ("engine.offload", c.OffloadToCPU()))),
        ("a frozen block", 120, (("engine.wrap", c.WrapRoot()), ("optimizer", c.SGD(momentum=0.9)))),
    ),
    "fsdp2, whole and cut": (
        ("a scalar", 6, (("engine.ignored", ("embed",)), ("mesh", HYBRID))),
        ("three blocks", 6, (*CUT, ("accumulation", 2), ("precision", c.BF16()))),
        ("a wide vocabulary", 6, ROWS),
        ("three blocks", 6, (INFERENCE, ("engine.reshard_after_forward", False))),
    ),
    "tensor": (
        ("three blocks", 2, (("tp_plan", c.TPPlan(TP_LAYERS[:2])), ("precision", c.BF16()))),
        ("a scalar", 2, (("tp_plan", c.TPPlan(TP_LAYERS[:2])), ("checkpointing", c.CheckpointBlocks()))),
        ("a wide vocabulary", 3, (ROWS[0], INFERENCE)),
    ),
    "zero, stages 1 and 2": (
        ("three blocks", 6, _zero(1)),
        ("three blocks", 6, (*_zero(2, overlap_comm=True), ("accumulation", 3))),
        ("three blocks", 6, (*_zero(1), ("precision", c.BF16()))),
        ("a frozen block", 6, (*_zero(2), ("precision", c.BF16()), ("engine.offload_optimizer", "cpu"))),
        ("a wide vocabulary", 6, (*_zero(2), ("engine.offload_optimizer", "cpu"), ("accumulation", 3))),
    ),
    "zero, other numbers": (
        ("three blocks", 6, (*_zero(2), ("engine.offload_optimizer", "cpu"))),
        ("three blocks", 6, (*_zero(1), ("engine.offload_optimizer", "cpu"), ("accumulation", 3))),
        ("three blocks", 6, (*_ds(optimizer={"type": "Lion", "params": {"lr": 0.1}}), ("engine.stage", 1))),
        ("16 bits, partly frozen", 6, (*_ds(data_types={"grad_accum_dtype": "fp32"}), ("precision", c.BF16()))),
        ("three blocks", 6, (*_ds(communication_data_type="fp32", zero_optimization=_BUCKET), *_STAGE_3)),
        ("a wide vocabulary", 6, (*_zero(3, **_SHORT), ("engine.leaf_modules", ("Block",)), ("accumulation", 2))),
        ("three blocks", 6, (*_zero(3), INFERENCE, ("engine.offload_param", "cpu"))),
    ),
    "zero, stage 3": (
        ("a frozen block", 6, (*_zero(3, sub_group_size=150), ("precision", c.BF16()))),
        ("three blocks", 6, (*_zero(3, stage3_max_reuse_distance=5000), ("engine.offload_param", "cpu"))),
        (
            "three blocks",
            6,
            (*_zero(3), ("engine.offload_param", "cpu"), ("engine.offload_optimizer", "cpu"), ("accumulation", 2)),
        ),
        ("three blocks", 6, (*_zero(3), INFERENCE)),
    ),
}
"""Engine, with what its cases have in common, to models, ranks and settings."""


@pytest.mark.parametrize("title", CASES)
def test_a_prediction_reads_as_it_did_when_somebody_last_read_it(title: str) -> None:
    engine = title.partition(",")[0]
    cases = "\n\n".join("\n".join(_case(engine, *case)) for case in CASES[title])
    assert_golden(GOLDEN / f"{title.replace(', ', '-').replace(' ', '-')}.txt", f"# {title}\n\n{cases}\n")


def test_every_engine_with_formulas_is_read() -> None:
    assert {type(ENGINES[title.partition(",")[0]]) for title in CASES} == set(PREDICTORS)


SAID = (
    ("single", "three blocks", 1, (("global_batch", 8),)),
    ("fsdp2", "a wide vocabulary", 6, (("mesh", HYBRID), ("engine.offload", c.OffloadToCPU()), ("accumulation", 3))),
    ("tensor", "a scalar", 2, (CUT[0], ("device", "cuda"))),
    ("zero", "three blocks", 6, (*_ds(optimizer={"type": "Lion", "params": {"lr": 0.1}}), ("engine.stage", 1))),
    ("xla", "three blocks", 4, (("loaders", c.KeepLoaders()), ("optimizer", (c.Muon(names=("layers.*",)), c.AdamW())))),
)
"""Plans of which the single values are read that policies and comments on pull requests name."""


def test_single_values_of_a_plan_read_as_they_did_when_somebody_last_read_them() -> None:
    lines = []
    for engine, model, world, settings in SAID:
        values = said(_plan(engine, model, world, settings))
        lines += [f"# {engine}: {model} on {world}", *(f"{what}: {at(values, what)}" for what in WHATS)]
        assert values.keys() - {what.partition(".")[0] for what in WHATS} == {"config"}
        assert values["config"]["engine"]["kind"] == values["engine"]
    assert_golden(GOLDEN / "single-values.txt", "\n".join(lines) + "\n")


def _facts(model: ModelFacts, world: int, *, amsgrad: bool) -> Facts:
    """The model on accelerators, three to a node, with an optimizer of two groups, which may keep unlike states."""
    plain = tiny_facts(model, world=world, device="cuda", loader=tiny_loader(length=64 * world))
    assert plain.optimizer is not None
    names = plain.optimizer.groups[0].slots
    groups = (GroupFact(slots=names[:3]), GroupFact(slots=names[3:], options=(("amsgrad", amsgrad),)))
    env = evolve(plain.env, per_node=3, capability=(9, 0), bf16=True, libraries=LIBRARIES)
    return evolve(plain, env=env, optimizer=evolve(plain.optimizer, groups=groups))


def _plan(engine: str, model: str, world: int, settings: Settings) -> Plan:
    cfg, facts = c.Config(engine=ENGINES[engine]), _facts(MODELS[model], world, amsgrad=engine != "zero")
    for path, value in settings:
        cfg = changed(cfg, path, value)
    made = cfg.optimizer is not None or "optimizer" in getattr(cfg.engine, "config", "")
    return make(cfg, evolve(facts, optimizer=None) if made or cfg.intent is c.Intent.INFERENCE else facts)


def _case(engine: str, model: str, world: int, settings: Settings) -> Iterator[str]:
    plan = _plan(engine, model, world, settings)
    found = predict(plan)
    yield f"## {model} on {world}: {', '.join(f'{path}={brief(value)}' for path, value in settings)}"
    shared = [term for term in found.classes[0].terms if all(term in one.terms for one in found.classes)]
    yield from map(_term, shared)
    for one in found.classes:
        own = "; ".join(_term(term).strip() for term in one.terms if term not in shared)
        if own or one.empty:
            yield f"  ranks {one.first} to {one.last}, {one.ranks} in all{' (empty)' * one.empty}: {own}"
    yield from map(_sent, found.traffic)
    for entry in cut_traffic(plan, 7) or ():
        yield f"{_sent(entry)}, for 7 tokens"
    yield f"  {found.about}"
    yield from (f"  {note}" for note in found.notes)
    yield from (f"  not predicted: {what}" for what in found.not_predicted)
    costs = planner.costs(plan)
    assert costs is not None
    for told in (costs, planner.fits(plan, costs.ceiling - 1), planner.fits(plan, costs.ceiling)):
        yield from (f"  {line}" for line in str(told).splitlines())


def _term(term: Term) -> str:
    return f"  {term.category}: {term.bytes} {term.what}, {term.label}, {term.place}, {term.lifetime}"


def _sent(entry: Traffic) -> str:
    over = f"{entry.ranks} of {entry.axis}, {entry.stride} apart"
    return f"  {entry.collective}: {entry.bytes} {entry.what}, {entry.label}, {entry.calls} calls over {over}"
