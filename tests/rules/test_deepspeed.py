"""DeepSpeed: its accelerator, leaves and optimizers, and what its repairs write."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import Clip, ClipNorm, ClipValue, Config, DeepSpeed, Intent
from prepkit.facts import GroupFact, ParamFact, SchedulerFacts
from prepkit.rules import check
from prepkit.rules.deepspeed import KNOWN_LEAVES
from prepkit.testing.tiny import tiny_facts, tiny_model, tiny_optimizer
from tests.support.rule_findings import mended, rule_ids, rule_ids_in

ZERO2 = DeepSpeed(stage=2, micro_batch=2)


@pytest.mark.parametrize(
    ("device", "variable", "fires"),
    [
        (None, None, 0),
        ("cuda", None, 0),
        ("cpu", None, 1),
        ("cpu", "cpu", 0),
        ("cpu", "cuda", 1),
        (None, "cuda", 0),
        (None, "cpu", 1),
    ],
)
def test_deepspeed_has_to_take_the_device_of_the_plan(device: str | None, variable: str | None, fires: int) -> None:
    variables = (("DS_ACCELERATOR", variable),) if variable else ()
    rules = rule_ids_in(Config(engine=ZERO2, device=device), variables=variables)
    assert rules == ["deepspeed.accelerator"] * fires


@pytest.mark.parametrize(
    ("stage", "frozen", "rules"),
    [(2, ("embed.weight",), []), (3, ("embed.weight",), ["deepspeed.leaf-inputs"]), (3, (), [])],
)
def test_the_input_of_a_leaf_matters_where_its_weights_are_gathered_and_nothing_before_it_is_trained(
    stage: int, frozen: tuple[str, ...], rules: list[str]
) -> None:
    facts = tiny_facts(tiny_model(frozen=frozen), world=2)
    engine = DeepSpeed(stage=stage, micro_batch=2, leaf_modules=("Block",))
    assert rule_ids(Config(engine=engine), facts) == rules


def test_a_leaf_of_a_frozen_model_is_no_matter() -> None:
    facts = tiny_facts(tiny_model(frozen=tuple(param.name for param in tiny_model().params)), world=2)
    engine = DeepSpeed(stage=3, micro_batch=2, leaf_modules=("Block",))
    assert "deepspeed.leaf-inputs" not in rule_ids(Config(engine=engine), facts)


@pytest.mark.parametrize(
    ("name", "module", "groups", "scheduled", "stage", "fires"),
    [
        ("Adagrad", "torch.optim.adagrad", 1, True, 2, 1),
        ("Adagrad", "torch.optim.adagrad", 2, False, 2, 1),
        ("Adagrad", "torch.optim.adagrad", 1, False, 2, 0),
        ("Adagrad", "torch.optim.adagrad", 1, True, 0, 0),
        ("Adagrad", "timm.optim.adagrad", 1, True, 2, 0),
        ("AdamW", "torch.optim.adamw", 2, True, 2, 0),
    ],
)
def test_only_the_adagrad_of_torch_is_made_anew_under_zero(
    name: str, module: str, groups: int, scheduled: bool, stage: int, fires: int
) -> None:
    facts = tiny_facts(world=2)
    names = tuple(param.name for param in facts.model.params)
    parts = (names,) if groups == 1 else (names[:2], names[2:])
    held = evolve(
        tiny_optimizer(facts.model, name, module),
        groups=tuple(GroupFact(slots=part, options=(("lr", 0.1),)) for part in parts),
    )
    scheduler = SchedulerFacts(name="StepLR", drives_optimizer=True) if scheduled else None
    rules = rule_ids(
        Config(engine=DeepSpeed(stage=stage, micro_batch=2)), evolve(facts, optimizer=held, scheduler=scheduler)
    )
    assert rules.count("deepspeed.adagrad") == fires


@pytest.mark.parametrize(
    ("json", "clip"),
    [
        ("{}", None),
        ('{"gradient_clipping": 0.5}', ClipNorm(0.5)),
        ('{"gradient_clipping": 2}', ClipNorm(2.0)),
        ('{"gradient_clipping": 0}', None),
        ('{"gradient_clipping": true}', None),
        ('{"gradient_clipping": "auto"}', None),
    ],
)
def test_clipping_is_mended_to_what_the_json_says(json: str, clip: Clip) -> None:
    cfg = Config(engine=evolve(ZERO2, config=json), clip=ClipValue(1.0))
    assert mended("deepspeed.clip", cfg, tiny_facts(world=2)).clip == clip


def test_zero_without_a_stage_is_mended_to_the_one_that_shards_gradients_and_no_weights() -> None:
    unsaid = DeepSpeed(config='{"gradient_clipping": 0.0}', micro_batch=2)
    facts = tiny_facts(world=2)
    assert rule_ids(Config(engine=unsaid), facts) == ["deepspeed.no-stage"]
    assert mended("deepspeed.no-stage", Config(engine=unsaid), facts).engine == evolve(unsaid, stage=2)


@pytest.mark.parametrize(("initial", "fires"), [(False, 1), (True, 0)])
def test_zero_takes_an_optimizer_whose_state_no_step_has_made(initial: bool, fires: int) -> None:
    """torch's Adagrad has state from its constructor."""
    model = tiny_model()
    optimizer = evolve(
        tiny_optimizer(model, "Adagrad", "torch.optim.adagrad"), stateful=("norm.weight",), initial_state=initial
    )
    facts = evolve(tiny_facts(model), optimizer=optimizer)
    assert rule_ids(Config(engine=DeepSpeed(stage=2)), facts).count("deepspeed.optimizer-state") == fires


def test_the_blocks_of_experts_that_deepspeed_knows_are_those_of_its_table() -> None:
    table = pytest.importorskip(
        "deepspeed.runtime.zero.leaf_module_config", reason="prepkit[deepspeed] is not installed"
    )
    known = {name.rpartition(".")[2] for name in table.DEFAULT_LEAF_MODULE_CLASSES}
    assert set(KNOWN_LEAVES) == known


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_in_16_bits_need_a_precision_whichever_they_are(dtype: str) -> None:
    facts = tiny_facts(tiny_model(dtype=dtype))
    assert ("deepspeed.stored-16-bit" in {one.rule for one in check(Config(engine=ZERO2), facts)}) == (
        dtype != "float32"
    )


@pytest.mark.parametrize("intent", Intent)
def test_complex_numbers_are_flattened_among_real_ones_where_they_are_trained(intent: Intent) -> None:
    model = tiny_model(extra=(ParamFact(name="head.phase", shape=(2,), dtype="complex64"),))
    cfg = Config(engine=DeepSpeed(stage=3, micro_batch=2), intent=intent)
    found = {one.rule for one in check(cfg, tiny_facts(model, optimizer=intent is Intent.TRAINING))}
    assert ("deepspeed.complex" in found) == (intent is Intent.TRAINING)
