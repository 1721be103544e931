"""DeepSpeed's config worked out: every value with its formula, every disagreement with both places."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from prepkit.config import (
    BF16,
    FP8,
    FP16,
    MSAMP,
    SGD,
    AdamW,
    ClipNorm,
    Config,
    DeepSpeed,
    EachLoader,
    Intent,
    KeepLoaders,
    OptimizerSpec,
    Precision,
    ShardLoaders,
)
from prepkit.facts import ArchitectureFacts, Facts, LoaderFacts, OptimizerFacts, SchedulerFacts
from prepkit.findings import errors
from prepkit.plan import Plan
from prepkit.planner import plan
from prepkit.resolve.deepspeed.data import NotJsonError, data_of, drop, look, parse, put, settings, with_key
from prepkit.resolve.deepspeed.working import WorkingConfig, as_written, working_config
from prepkit.rules import check
from prepkit.steps import ConvertOptimizer, InitializeDeepSpeed, MarkLeafModules
from prepkit.testing.tiny import tiny_experts, tiny_facts, tiny_loader, tiny_model, tiny_optimizer

HIDDEN = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


def worked(said: dict[str, Any] | None = None, facts: Facts | None = None, **more: Any) -> WorkingConfig:
    """The config for two ranks, micro batches of 4 and stage 2; ``more`` are the engine's fields, ``cfg_...`` ours."""
    whole = {name.removeprefix("cfg_"): value for name, value in more.items() if name.startswith("cfg_")}
    engine = {"stage": 2, "micro_batch": 4} | {k: v for k, v in more.items() if not k.startswith("cfg_")}
    return working_config(Config(engine=DeepSpeed(config=said or {}, **engine), **whole), facts or tiny_facts(world=2))


def data(found: WorkingConfig) -> dict[str, Any]:
    return data_of(found.settings)


def rules(found: WorkingConfig) -> set[str]:
    return {flaw.rule.removeprefix("deepspeed.") for flaw in found.flaws}


def planned(cfg: Config, facts: Facts) -> Plan:
    return plan(cfg, facts).unwrap()


# --- the user's JSON -----------------------------------------------------------------------------------------------


def test_the_mapping_that_is_given_is_copied_and_never_changed() -> None:
    given: dict[str, Any] = {"zero_optimization": {"stage": "auto", "cpu_offload": False}, "bf16": {"enabled": "auto"}}
    before = json.dumps(given)
    engine = DeepSpeed(stage=2, micro_batch=4, config=given)
    first = working_config(Config(engine=engine, precision=BF16()), tiny_facts(world=2))
    given["zero_optimization"]["stage"] = 7
    assert working_config(Config(engine=engine, precision=BF16()), tiny_facts(world=2)) == first
    given["zero_optimization"]["stage"] = "auto"
    assert json.dumps(given) == before
    assert json.loads(engine.config) == json.loads(before)


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e400}', f'{{"a": {10**41}}}', "", "[" * 100000]
)
def test_text_that_is_no_object_of_settings_is_refused_with_the_reason(text: str) -> None:
    with pytest.raises(NotJsonError):
        parse(text)
    assert rules(working_config(Config(engine=DeepSpeed(config=text)), tiny_facts())) >= {"not-json"}


def test_text_that_names_a_file_or_is_base64_is_no_config(tmp_path: Path) -> None:
    file, text = tmp_path / "zero.json", '{"zero_optimization": {"stage": 3}}'
    file.write_text(text)
    for given in (str(file), base64.urlsafe_b64encode(text.encode()).decode()):
        assert "not-json" in rules(working_config(Config(engine=DeepSpeed(config=given)), tiny_facts()))


def test_sections_may_lie_fifty_levels_deep() -> None:
    assert list(parse('{"a": ' * 49 + "{}" + "}" * 49)) == ["a"]
    with pytest.raises(NotJsonError, match="nested more than 50 levels deep"):
        parse('{"a": ' * 50 + "{}" + "}" * 50)


def test_dotted_paths_are_looked_up_set_and_dropped() -> None:
    found: dict[str, Any] = {"bf16": {"enabled": True}, "fp16": 1}
    assert (look(found, "bf16.enabled"), look(found, "fp16.enabled", 0), look(found, "a.b")) == (True, 0, None)
    put(found, "fp16.enabled", value=False)
    put(found, "a.b.c", 1)
    drop(found, "a.b.x")
    drop(found, "missing.entirely")
    drop(found, "bf16.enabled")
    assert found == {"bf16": {}, "fp16": {"enabled": False}, "a": {"b": {"c": 1}}}
    assert data_of(settings(found)) == found


def test_old_forms_are_written_in_todays() -> None:
    assert data(worked({"zero_optimization": True}, stage=None))["zero_optimization"]["stage"] == 1
    found = worked({"zero_optimization": {"stage": 2, "cpu_offload": True}, "bfloat16": {}}, cfg_precision=BF16())
    assert data(found)["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert data(found)["bf16"] == {"enabled": True}
    assert not found.flaws


def test_whole_floats_become_integers_and_fractions_are_refused() -> None:
    found = worked({"zero_optimization": {"reduce_bucket_size": 5e8}})
    assert json.dumps(data(found)["zero_optimization"]["reduce_bucket_size"]) == "500000000"
    assert rules(worked({"zero_optimization": {"reduce_bucket_size": 15099494.4}})) == {"wrong-type"}


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ({"gradient_clipp1ng": 1.0}, "Write 'gradient_clipping', or remove it."),
        ({"zero_optimization": {"reduce_bucket": 1}}, "Write 'zero_optimization.reduce_bucket_size', or"),
        ({"stage3_max_live_parameters": 1}, "Move it to 'zero_optimization.stage3_max_live_parameters', or remove it."),
        ({"nonsense_of_mine": {}}, "Remove it."),
        ({"zero_optimization": {"gradient_cliping": 1.0}}, "Move it to 'gradient_clipping', or remove it."),
        ({"stag": 2, "zero_optimization": {"stage": 2}}, "Remove it: 'zero_optimization.stage' is there too."),
        ({"zero_optimization": {"stage": 2, "stag": 1}}, "Remove it: 'zero_optimization.stage' is there too."),
        (
            {"pin_memory": True},
            (
                "Move it to 'zero_optimization.offload_optimizer.pin_memory' or "
                "'zero_optimization.offload_param.pin_memory', or remove it."
            ),
        ),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_known_one_also_of_another_section(
    said: dict[str, Any], fix: str
) -> None:
    (flaw,) = worked(said).flaws
    assert flaw.rule == "deepspeed.unknown-key"
    assert flaw.fix.startswith(fix)


def test_of_very_many_unknown_keys_a_hundred_are_told_and_the_rest_counted() -> None:
    flaws = worked({f"nonsense_{at}": 1 for at in range(20_000)}).flaws
    assert len(flaws) == 101
    assert flaws[-1].what == "20000 keys are unknown to DeepSpeed; 100 of them are reported."


def test_a_batch_of_auto_that_no_loader_says_is_told_to_pass_one() -> None:
    flaws = worked({"train_micro_batch_size_per_gpu": "auto"}, micro_batch=None).flaws
    (flaw,) = (one for one in flaws if one.rule == "deepspeed.auto")
    assert flaw.fix.startswith("Pass loaders=[...], or --batch-size 4 on the command line")


@pytest.mark.parametrize(
    ("said", "what", "fix"),
    [
        ({"wall_clock_breakdown": "True"}, "true or false", " without quotes: true"),
        ({"wall_clock_breakdown": "yes"}, "true or false", ""),
        ({"wall_clock_breakdown": 1}, "true or false", ""),
        ({"steps_per_print": "10"}, "a whole number", " without quotes: 10"),
        ({"steps_per_print": 1.5}, "a whole number", ", such as 2"),
        ({"gradient_clipping": "a"}, "a number", ""),
        ({"zero_optimization": {"reduce_bucket_size": False}}, "a whole number", ""),
    ],
    ids=str,
)
def test_a_value_of_another_type_is_told_with_the_type_that_is_expected(
    said: dict[str, Any], what: str, fix: str
) -> None:
    (flaw,) = worked(said).flaws
    assert flaw.rule == "deepspeed.wrong-type"
    assert f"where DeepSpeed expects {what}" in flaw.what
    assert flaw.fix.startswith(f"Write {what}{fix}.")


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ({"zero_optimization": {"stage": "2"}}, "Write a whole number without quotes: 2."),
        ({"bf16": {"enabled": "true"}}, "Write true or false without quotes: true."),
        ({"fp16": {"loss_scale": "0.5"}}, "Write a number without quotes: 0.5."),
    ],
    ids=str,
)
def test_text_that_deepspeed_alone_would_read_is_told_as_that(said: dict[str, Any], fix: str) -> None:
    (flaw,) = worked(said).flaws
    assert "DeepSpeed itself reads it as that; transformers and accelerate, where they look at it, do not." in flaw.what
    assert flaw.fix == fix


@pytest.mark.parametrize(
    ("path", "fine", "wrong"),
    [
        ("communication_data_type", "FP32", "int8"),
        ("seq_parallel_communication_data_type", "bf16", "int8"),
        ("checkpoint.tag_validation", "warn", "never"),
        ("zero_optimization.offload_optimizer.ratio", 1.0, 1.01),
        ("zero_optimization.offload_optimizer.ratio", 0.0, -0.1),
        ("zero_optimization.reduce_bucket_size", 1, 0),
        ("zero_optimization.sub_group_size", 2**63 - 1, 2**63),
    ],
)
def test_values_that_deepspeed_refuses_are_told(path: str, fine: Any, wrong: Any) -> None:
    for value, expected in ((fine, set()), (wrong, {"wrong-value"})):
        said: dict[str, Any] = {}
        put(said, path, value)
        assert rules(worked(said)) == expected


def test_auto_is_found_in_lists_too() -> None:
    found = worked({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, "auto"]}}}, tiny_facts(optimizer=False))
    (flaw,) = found.flaws
    assert (flaw.rule, flaw.what[:30]) == ("deepspeed.auto", "`optimizer.params.betas.1` is ")


# --- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "largest"), [((4096,), 4096), ((96, 192, 384, 768), 768)])
def test_bucket_sizes_are_worked_out_in_integers_from_the_largest_hidden_size(
    sizes: tuple[int, ...], largest: int
) -> None:
    model = evolve(tiny_model(), architecture=ArchitectureFacts(hidden_sizes=sizes))
    found = worked({"zero_optimization": dict.fromkeys(HIDDEN, "auto")}, tiny_facts(model, world=2), stage=3)
    section = data(found)["zero_optimization"]
    assert [section[name] for name in HIDDEN] == [largest**2, 9 * largest**2 // 10, 10 * largest]
    assert f"zero_optimization.reduce_bucket_size = {largest**2} (hidden size {largest} x {largest})" in found.notes


def test_bucket_sizes_of_the_users_own_stay_and_without_a_hidden_size_auto_is_refused() -> None:
    said = {"zero_optimization": {"reduce_bucket_size": 7, "stage3_prefetch_bucket_size": "auto"}}
    found = worked(said, stage=3)
    assert rules(found) == {"hidden-size"}
    assert data(found)["zero_optimization"]["reduce_bucket_size"] == 7


# --- batches -------------------------------------------------------------------------------------------------------


def batch(said: dict[str, Any], *, world: int, loaders: tuple[LoaderFacts, ...] = (), **more: Any) -> WorkingConfig:
    facts = evolve(tiny_facts(world=world), loaders=loaders)
    return worked(said, facts, **({"micro_batch": None} | more))


def numbers(found: WorkingConfig) -> tuple[Any, Any, Any]:
    got = data(found)
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    return tuple(got.get(name) for name in names)  # type: ignore[return-value]  # three of them


@pytest.mark.parametrize(
    ("said", "micro", "steps", "world", "wanted"),
    [
        ({}, 4, 2, 8, (4, 2, 64)),
        ({"train_batch_size": 64}, None, 2, 8, (4, 2, 64)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3}, None, 1, 5, (3, 1, 15)),
        ({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, None, 16, 8, (2, 16, 256)),
    ],
)
def test_the_third_number_follows_from_two(
    said: dict[str, Any], micro: int | None, steps: int, world: int, wanted: tuple[int, int, int]
) -> None:
    found = batch(said, world=world, micro_batch=micro, cfg_accumulation=steps)
    assert not found.flaws
    assert numbers(found) == wanted


def test_numbers_that_do_not_multiply_are_told_with_the_nearest_that_do() -> None:
    (flaw,) = batch({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2}, world=7).flaws
    assert "2 x 1 accumulation x 7 ranks = 14" in flaw.what
    assert "252 (accumulation 18) or 266 (accumulation 19)" in flaw.fix
    assert "or start 8 ranks (accumulation 16)" in flaw.fix
    (flaw,) = batch({"train_batch_size": 100}, world=8).flaws
    assert "96 (micro batch 12) or 104 (micro batch 13)" in flaw.fix


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        ({"train_batch_size": 50, "gradient_accumulation_steps": 4}, "Write a multiple of 8 x the ranks"),
        ({"train_batch_size": 1}, "Write a multiple of 2 x the ranks"),
        ({"train_batch_size": 48, "gradient_accumulation_steps": 4}, ""),
        ({"train_batch_size": 50, "gradient_accumulation_steps": "auto"}, ""),
        ({"train_batch_size": "auto"}, ""),
    ],
)
def test_a_global_batch_that_fits_no_number_of_ranks_is_told_of_the_text_alone(said: dict[str, Any], fix: str) -> None:
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2} | said
    draft, _ = as_written(Config(engine=DeepSpeed(config=json.dumps(config))), tiny_facts())
    assert [flaw.fix.startswith(fix) for flaw in draft.flaws if flaw.rule == "deepspeed.batch"] == [True] * bool(fix)


def test_a_stage_in_quotes_is_told_once_and_gone_on_with() -> None:
    """So that no other rule speaks of a stage that nobody has asked for."""
    draft, stage = as_written(Config(engine=DeepSpeed(config={"zero_optimization": {"stage": "3"}})), tiny_facts())
    assert ([flaw.rule for flaw in draft.flaws], stage) == (["deepspeed.wrong-type"], 3)


def test_ranks_that_hold_one_model_together_count_once() -> None:
    found = batch({"tensor_parallel": {"autotp_size": 4}}, world=8, micro_batch=3)
    assert (numbers(found), found.ranks) == ((3, 1, 6), 2)
    assert "tensor-parallel" in rules(batch({"tensor_parallel": {"autotp_size": 3}}, world=8, micro_batch=3))


@pytest.mark.parametrize(
    ("stage", "size", "fix"),
    [(3, 3, "Write 2 or 4, or start other processes."), (3, 4, ""), (3, 16, ""), (3, 0, ""), (2, 3, "")],
)
def test_a_group_of_zero_plus_plus_divides_the_ranks(stage: int, size: int, fix: str) -> None:
    """More ranks than there are is all of them (``_create_zero_param_parallel_group``)."""
    zero = {"stage": stage, "zero_hpz_partition_size": size}
    found = batch({"zero_optimization": zero}, world=8, micro_batch=3)
    assert [flaw.fix for flaw in found.flaws if flaw.rule == "deepspeed.tensor-parallel"] == [fix] * bool(fix)


@pytest.mark.parametrize("world", range(2, 14))
def test_a_group_that_does_not_divide_the_ranks_is_told_the_nearest_that_do(world: int) -> None:
    for size in range(2, world):
        zero = {"stage": 3, "zero_hpz_partition_size": size}
        found = batch({"zero_optimization": zero}, world=world, micro_batch=3)
        told = [flaw.fix for flaw in found.flaws if flaw.rule == "deepspeed.tensor-parallel"]
        legal = [number for number in range(1, world + 1) if world % number == 0]
        below, above = max(n for n in legal if n <= size), min(n for n in legal if n >= size)
        fix = f"Write {below} or {above}, or start other processes."
        assert told == ([] if size in legal else [fix]), size


def test_the_micro_batch_is_that_of_the_smallest_loader_unless_the_largest_is_asked_for() -> None:
    loaders = (tiny_loader(batch_size=8), tiny_loader(batch_size=2))
    assert numbers(batch({}, world=2, loaders=loaders))[0] == 2
    assert numbers(batch({}, world=2, loaders=loaders, micro_batch_of="largest"))[0] == 8
    assert rules(batch({}, world=2, loaders=loaders, micro_batch=4)) == {"two-places"}


def test_loaders_for_evaluation_do_not_count_and_a_batch_of_nothing_is_refused_once() -> None:
    loaders = (tiny_loader(batch_size=8), tiny_loader(batch_size=2))
    each = EachLoader((ShardLoaders(), ShardLoaders(purpose="evaluation")))
    assert numbers(batch({}, world=2, loaders=loaders, cfg_loaders=each))[0] == 8
    assert rules(batch({}, world=2, loaders=loaders, micro_batch=0)) == {"batch"}


def test_loaders_with_batches_of_their_own_and_no_loader_at_all_leave_the_micro_batch_to_the_user() -> None:
    custom = tiny_loader(batch_size=None, custom_batches=True)
    assert rules(batch({}, world=2, loaders=(custom,))) == {"no-micro-batch"}
    assert rules(batch({}, world=2)) == {"no-micro-batch"}
    assert not batch({}, world=2, loaders=(custom,), micro_batch=3).flaws


def test_a_model_that_is_only_asked_needs_no_micro_batch() -> None:
    """A teacher, say; DeepSpeed wants a number and makes nothing of it."""
    custom = tiny_loader(batch_size=None, custom_batches=True)
    for loaders in ((), (custom,)):
        asked = batch({}, world=2, loaders=loaders, stage=3, cfg_intent=Intent.INFERENCE)
        assert (numbers(asked), asked.flaws) == ((1, 1, 2), ())


# --- one owner each ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "path", "ours"),
    [
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps", "config.accumulation is 1"),
        ({"gradient_clipping": 1.0}, "gradient_clipping", "config.clip is 0.0"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "config.engine.stage is 2"),
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu", "config.engine.micro_batch is 4"),
    ],
)
def test_a_setting_in_two_places_that_disagree_names_both(said: dict[str, Any], path: str, ours: str) -> None:
    (flaw,) = worked(said).flaws
    assert flaw.rule == "deepspeed.two-places"
    assert f"`{path}` is" in flaw.what
    assert f"in config.engine.config, and {ours}" in flaw.what


def test_a_setting_in_two_places_that_agree_is_fine() -> None:
    said = {"gradient_accumulation_steps": 4, "gradient_clipping": 1, "zero_optimization": {"stage": 2}}
    assert not worked(said, cfg_accumulation=4, cfg_clip=ClipNorm(1.0)).flaws


def test_clipping_is_always_written_because_deepspeeds_own_default_clips() -> None:
    assert data(worked())["gradient_clipping"] == 0.0
    assert data(worked({"gradient_clipping": "auto"}, cfg_clip=ClipNorm(0.5)))["gradient_clipping"] == 0.5
    assert rules(worked(cfg_clip=ClipNorm(1.0, 1.0))) == {"clip"}


@pytest.mark.parametrize(
    ("precision", "said", "fine"),
    [
        (None, {}, True),
        (None, {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, True),
        (None, {"bf16": {"enabled": True}}, False),
        (BF16(), {}, True),
        (BF16(), {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, True),
        (BF16(), {"bf16": {"enabled": False}}, False),
        (BF16(), {"fp16": {"enabled": True}}, False),
        (BF16(), {"fp16": {"enabled": False}}, True),
        (FP16(), {"fp16": {"enabled": "auto", "loss_scale": 0}}, True),
        (FP16(), {"fp16": {"enabled": False}}, False),
        (FP16(), {"bf16": {"enabled": True}}, False),
        (FP16(), {"torch_autocast": {"enabled": True}}, False),
    ],
)
def test_precision_has_one_owner_in_every_row_of_the_table(
    precision: Precision | None, said: dict[str, Any], fine: bool
) -> None:
    more = {"cfg_precision": precision} if precision else {}
    found = worked(said, **more)
    assert rules(found) - {"turned-off"} == (set() if fine else {"precision"})
    if fine:
        got = data(found)
        assert look(got, "bf16.enabled", default=False) is isinstance(precision, BF16)
        assert look(got, "fp16.enabled", default=False) is isinstance(precision, FP16)


def test_float16_has_deepspeeds_own_scaler_with_the_numbers_of_the_config() -> None:
    how = FP16(init_scale=2.0**12, growth_interval=500)
    section = data(worked(cfg_precision=how))["fp16"]
    assert section == {
        "enabled": True,
        "hysteresis": 1,
        "initial_scale_power": 12,
        "loss_scale": 0,
        "loss_scale_window": 500,
    }
    assert rules(worked({"fp16": {"loss_scale": 128}}, cfg_precision=how)) == {"two-places"}
    assert rules(worked(cfg_precision=FP16(init_scale=1000.0))) == {"loss-scale"}
    assert rules(worked(cfg_precision=FP16(growth_factor=4.0))) == {"loss-scale"}
    facts = tiny_facts(world=2, device="cuda")
    made = planned(Config(engine=DeepSpeed(stage=2, micro_batch=4), precision=how), facts)
    assert (made.owners.loss_scaling, {one.dtype for one in made.layout}) == ("DeepSpeed", {"float16"})


@pytest.mark.parametrize(("stage", "sums"), [(0, None), (1, "fp32"), (2, "fp32"), (3, "fp32")])
def test_micro_batches_add_up_as_they_are_reduced_where_zero_shards(stage: int, sums: str | None) -> None:
    got = data(worked(stage=stage, cfg_precision=BF16()))
    assert (look(got, "communication_data_type"), look(got, "data_types.grad_accum_dtype")) == ("fp32", sums)


def test_ms_amp_does_not_follow_an_offloaded_optimizer() -> None:
    cfg = FP8(backend=MSAMP())
    assert "msamp" not in rules(worked(cfg_precision=cfg))
    told = [
        flaw.where for flaw in worked(cfg_precision=cfg, offload_optimizer="cpu").flaws if flaw.rule.endswith("msamp")
    ]
    assert told == ["config.engine.offload_optimizer"]


def test_weights_without_a_float32_copy_take_deepspeeds_own_switch() -> None:
    bare = BF16(master_weights=False)
    switch = {"bf16": {"bf16_master_weights_and_grads": True}}
    assert rules(worked(cfg_precision=bare)) == {"master-weights"}
    assert not worked(switch, cfg_precision=bare).flaws
    assert rules(worked(switch, cfg_precision=BF16())) == {"two-places"}


# --- optimizers ----------------------------------------------------------------------------------------------------


def offloaded(seen: OptimizerFacts | None, spec: OptimizerSpec | None = None, **said: Any) -> WorkingConfig:
    facts = evolve(tiny_facts(world=2), optimizer=seen)
    return worked(said, facts, offload_optimizer="cpu", cfg_optimizer=spec)


@pytest.mark.parametrize(
    ("name", "module", "wanted"),
    [
        ("AdamW", "torch.optim.adamw", ("DeepSpeedCPUAdam", True)),
        ("Adam", "torch.optim.adam", ("DeepSpeedCPUAdam", False)),
        ("Adagrad", "torch.optim.adagrad", ("DeepSpeedCPUAdagrad", False)),
        ("AdamW", "bitsandbytes.optim.adamw", ("DeepSpeedCPUAdam", True)),
        ("AdamW32bit", "bitsandbytes.optim.adamw", ("DeepSpeedCPUAdam", True)),
        ("Adagrad32bit", "bitsandbytes.optim.adagrad", ("DeepSpeedCPUAdagrad", False)),
        ("Lion32bit", "bitsandbytes.optim.lion", ("DeepSpeedCPULion", False)),
        ("DeepSpeedCPUAdam", "deepspeed.ops.adam.cpu_adam", None),
    ],
)
def test_an_offloaded_optimizer_becomes_the_cpu_form_of_the_same_algorithm(
    name: str, module: str, wanted: tuple[str, bool] | None
) -> None:
    found = offloaded(tiny_optimizer(tiny_model(), name, module))
    assert not found.flaws
    assert found.convert == wanted
    # DeepSpeed refuses its own Adagrad while the switch is on
    forced = data(found).get("zero_force_ds_cpu_optimizer")
    assert forced is (False if "Adagrad" in name else None)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("SGD", "torch.optim.sgd"),
        ("RMSprop", "torch.optim.rmsprop"),
        ("Adam8bit", "bitsandbytes.optim.adam"),
        ("AdamW", "mine.optim"),
    ],
)
def test_an_offloaded_optimizer_without_a_cpu_form_is_refused_unless_it_is_kept(name: str, module: str) -> None:
    seen = tiny_optimizer(tiny_model(), name, module)
    assert rules(offloaded(seen)) == {"offload-optimizer"}
    kept = offloaded(seen, zero_force_ds_cpu_optimizer=False)
    assert (kept.flaws, kept.convert) == ((), None)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("AdamW", "amsgrad", True),
        ("AdamW", "maximize", True),
        ("Adagrad", "lr_decay", 0.1),
        ("Adagrad", "initial_accumulator_value", 0.5),
    ],
)
def test_options_that_the_cpu_form_does_not_know_are_refused(name: str, option: str, value: Any) -> None:
    seen = tiny_optimizer(tiny_model(), name, f"torch.optim.{name.lower()}")
    (group,) = seen.groups
    odd = evolve(seen, groups=(evolve(group, options=(*group.options, (option, value))),))
    (flaw,) = offloaded(odd).flaws
    assert f"has `{option}`, which DeepSpeed's does not know" in flaw.what
    off = evolve(seen, groups=(evolve(group, options=(*group.options, (option, type(value)()))),))
    assert not offloaded(off).flaws


def test_a_specified_optimizer_is_offloaded_likewise() -> None:
    assert offloaded(None, AdamW()).convert == ("DeepSpeedCPUAdam", True)
    (flaw,) = offloaded(None, SGD()).flaws
    assert (flaw.rule, flaw.where) == ("deepspeed.offload-optimizer", "config.optimizer")
    facts = tiny_facts(world=2, optimizer=False)
    cfg = Config(engine=DeepSpeed(stage=2, micro_batch=4, offload_optimizer="cpu"), optimizer=AdamW())
    assert [type(one.step) for one in planned(cfg, facts).steps][-2:] == [ConvertOptimizer, InitializeDeepSpeed]


@pytest.mark.parametrize(
    ("name", "module", "wanted"),
    [
        ("AdamW", "torch.optim.adamw", None),
        ("Adagrad", "torch.optim.adagrad", None),
        ("FusedAdam", "apex.optimizers", None),
        ("FusedLamb", "deepspeed.ops.lamb", None),
        ("SGD", "torch.optim.sgd", True),
        ("Lion", "lion_pytorch", True),
        ("FusedLAMB", "apex.optimizers", True),
    ],
)
def test_zero_is_told_of_optimizers_that_it_was_not_tested_with(name: str, module: str, wanted: bool | None) -> None:
    found = worked({}, evolve(tiny_facts(world=2), optimizer=tiny_optimizer(tiny_model(), name, module)))
    assert data(found).get("zero_allow_untested_optimizer") is wanted


TORCH = sorted(
    name for name, cls in vars(torch.optim).items() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
)


@pytest.mark.parametrize("name", [name for name in TORCH if name not in ("Optimizer", "LBFGS", "SparseAdam")])
def test_a_section_may_name_any_optimizer_of_torch(name: str) -> None:
    (flaw,) = worked({"optimizer": {"type": name, "params": {}}}).flaws
    assert flaw.what == f"The `optimizer` section asks for {name}, and an optimizer `AdamW` is given as well."
    assert rules(worked({"optimizer": {"type": f"{name}x"}}, tiny_facts(optimizer=False))) == {"unknown-type"}


def test_a_section_of_the_users_own_begins_where_it_says_without_a_schedule() -> None:
    section = {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.1, "warmup_max_lr": "auto"}}}
    found = worked(section)
    assert not found.flaws
    assert data(found)["scheduler"]["params"] == {"warmup_min_lr": 0.1, "warmup_max_lr": 1e-3}


def test_a_device_that_is_switched_off_in_one_place_and_on_in_the_other_is_told() -> None:
    said = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
    assert rules(worked(said, offload_optimizer="none")) == {"two-places"}
    assert look(data(worked(offload_optimizer="none")), "zero_optimization.offload_optimizer") is None


def test_offloading_begins_where_there_is_something_to_offload_and_has_a_place() -> None:
    assert rules(worked(stage=0, offload_optimizer="cpu")) == {"offload"}
    assert rules(worked(stage=2, offload_param="cpu")) == {"offload"}
    assert rules(worked(stage=3, offload_param="nvme")) == {"offload"}
    told = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "/scratch"}}}
    assert not worked(told, stage=3).flaws
    template = {"zero_optimization": {"offload_param": {"device": "auto", "nvme_path": "auto"}}}
    assert data(worked(template, stage=3))["zero_optimization"]["offload_param"] == {"device": "none"}


# --- model and environment -----------------------------------------------------------------------------------------


def found_rules(cfg: Config, facts: Facts) -> set[str]:
    return {finding.rule for finding in check(cfg, facts)}


def test_experts_that_pick_by_the_data_are_suggested_as_leaves_and_marked_when_named() -> None:
    facts = tiny_facts(tiny_experts(), world=2)
    cfg = Config(engine=DeepSpeed(stage=3, micro_batch=4))
    (finding,) = (one for one in check(cfg, facts) if one.rule == "deepspeed.experts")
    assert 'leaf_modules=("Block",)' in finding.fix
    named = evolve(cfg, engine=DeepSpeed(stage=3, micro_batch=4, leaf_modules=("Block",)))
    assert "deepspeed.experts" not in found_rules(named, facts)
    (step,) = (one.step for one in planned(named, facts).steps if isinstance(one.step, MarkLeafModules))
    assert step.paths == ("layers.0", "layers.1")
    other = evolve(named, engine=evolve(named.engine, stage=2))
    assert not any(isinstance(one.step, MarkLeafModules) for one in planned(other, facts).steps)


@pytest.mark.parametrize(
    ("version", "engine", "needs"),
    [
        ("0.9.2", {}, "0.9.3"),
        ("0.13.5", {"leaf_modules": ("Block",), "stage": 3}, "0.14.0"),
        ("0.16.3", {"config": {"tensor_parallel": {"autotp_size": 2}}}, "0.16.4"),
        ("0.16.4", {"config": {"tensor_parallel": {"autotp_size": 2}}}, ""),
    ],
)
def test_each_feature_has_the_version_that_it_needs(version: str, engine: dict[str, Any], needs: str) -> None:
    facts = tiny_facts(world=2)
    facts = evolve(facts, env=evolve(facts.env, libraries=(("deepspeed", version),)))
    cfg = Config(engine=DeepSpeed(**{"stage": 2, "micro_batch": 4} | engine), loaders=KeepLoaders())
    told = [one.fix for one in check(cfg, facts) if one.rule == "deepspeed.installed"]
    assert told == ([f"Write `pip install 'deepspeed>={needs}'`."] if needs else [])


def test_a_lazy_hpu_offloads_nothing() -> None:
    cfg = Config(engine=DeepSpeed(stage=2, micro_batch=4, offload_optimizer="cpu"))
    lazy = tiny_facts(world=2, device="hpu")
    assert "deepspeed.hpu-lazy" in found_rules(cfg, lazy)
    eager = tiny_facts(world=2, device="hpu", variables=(("PT_HPU_LAZY_MODE", "0"),))
    assert "deepspeed.hpu-lazy" not in found_rules(cfg, eager)
    assert "deepspeed.hpu-lazy" not in found_rules(evolve(cfg, engine=DeepSpeed(stage=2, micro_batch=4)), lazy)


def test_inference_needs_no_optimizer_at_stages_zero_and_three() -> None:
    facts = tiny_facts(world=2, optimizer=False)
    for stage, fine in ((0, True), (1, False), (2, False), (3, True)):
        cfg = Config(engine=DeepSpeed(stage=stage, micro_batch=4), intent=Intent.INFERENCE, clip=None)
        assert (not errors(check(cfg, facts))) is fine


def test_a_scheduler_that_deepspeed_makes_or_is_given_ticks_once() -> None:
    section = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    given = evolve(tiny_facts(world=2), scheduler=SchedulerFacts(name="WarmupLR", drives_optimizer=False, factory=True))
    for said, facts in ((section, None), ({}, given)):
        assert "scheduler-ticks" not in rules(worked(said, facts))
        assert "scheduler-ticks" in rules(worked(said, facts, cfg_scheduler_ticks=3))


def test_a_key_of_any_type_takes_any() -> None:
    found = worked({"tensor_parallel": {"dtype": ["whatever"], "autotp_size": 1}})
    assert [flaw for flaw in found.flaws if "dtype" in flaw.what] == []


@pytest.mark.parametrize("old", [True, False])
def test_the_oldest_form_of_the_section_is_noted(old: bool) -> None:
    found = worked({"zero_optimization": old}, stage=None)
    assert any(f"zero_optimization = {{stage: {int(old)}}} (the old form was {old})" in note for note in found.notes)
    assert found.stage == int(old)


def test_optimizer_state_leaves_the_device_from_stage_1_on_and_parameters_from_3_on() -> None:
    def flawed(stage: int, **offloads: str) -> bool:
        return any(flaw.rule == "deepspeed.offload" for flaw in worked(stage=stage, **offloads).flaws)

    assert [flawed(stage, offload_optimizer="cpu") for stage in (0, 1, 2, 3)] == [True, False, False, False]
    assert [flawed(stage, offload_param="cpu") for stage in (0, 1, 2, 3)] == [True, True, True, False]


def test_a_bare_true_keeps_its_stage_when_a_key_is_set_beside_it() -> None:
    engine = with_key(DeepSpeed(config={"zero_optimization": True}), "zero_optimization.reduce_bucket_size", 5)
    assert json.loads(engine.config) == {"zero_optimization": {"stage": 1, "reduce_bucket_size": 5}}


def test_null_is_as_if_nothing_was_written_and_is_noted() -> None:
    found = worked({"zero_optimization": {"reduce_bucket_size": None}, "train_batch_size": None, "optimizer": None})
    assert found.flaws == ()
    assert "zero_optimization.reduce_bucket_size is left out (null)" in found.notes
    assert not [one for one in found.settings if one.value == "null"]


def test_an_optimizer_of_the_json_beside_one_that_names_its_parameters_is_told() -> None:
    said = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    found = worked(said, tiny_facts(world=2, optimizer=False), cfg_optimizer=AdamW(names=("layers.*",)))
    assert "deepspeed.two-optimizers" in {flaw.rule for flaw in found.flaws}


@pytest.mark.parametrize("intent", Intent)
@pytest.mark.parametrize("clip", [None, ClipNorm(1.0)])
@pytest.mark.parametrize("precision", [None, BF16()])
def test_what_the_json_leaves_to_its_caller_is_told_where_it_stays_off(
    intent: Intent, clip: ClipNorm | None, precision: Precision
) -> None:
    for left in ({"gradient_clipping": "auto"}, {"bf16": {"enabled": "auto"}}, {"gradient_clipping": 0.0}, {}):
        found = worked(left, stage=0, cfg_intent=intent, cfg_clip=clip, cfg_precision=precision)
        unclipped = left.get("gradient_clipping") == "auto" and clip is None and intent is Intent.TRAINING
        told = " ".join(flaw.what for flaw in found.flaws if flaw.rule == "deepspeed.turned-off")
        assert ("gradient_clipping" in told) == unclipped
        assert ("`bf16.enabled`" in told) == ("bf16" in left and precision is None)


@pytest.mark.parametrize("said", [{}, {"train_batch_size": 16}, {"train_batch_size": 15}])
def test_an_accumulation_of_nothing_is_left_to_its_own_rule_and_counts_as_one(said: dict[str, Any]) -> None:
    none, one = (worked(said, micro_batch=None, cfg_accumulation=steps) for steps in (0, 1))
    steps = "gradient_accumulation_steps"
    assert (data(none).pop(steps), data(one).pop(steps)) == (0, 1)
    assert {**data(none), steps: 1} == data(one)
    assert none.flaws == one.flaws
