"""Section 2: the public call."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import NO_REGISTRY, ON_ONE_MODULE, REACHED, Answers

PREPARE: dict[str, Answers] = {
    "PR-1": ("row PR-2",),
    "PR-2": ("deviation nobody says per object who is placed: the engine does", "test test_what_is_placed_by_whom"),
    "PR-3": (ON_ONE_MODULE, "test test_calls_before_prepare_are_refused"),
    "PR-4": ("rule model.device-map", "test test_a_refusal_leaves_the_model_as_it_was"),
    "PR-5": (ON_ONE_MODULE, "test test_two_engines_in_one_program_are_driven_each_by_its_own"),
    "PR-6": ("test test_an_optimizer_on_another_device_than_the_model_is_refused",),
    "PR-7": (
        "rule optimizer.none",
        "test test_inference_wraps_nothing_under_ddp_and_shards_under_fsdp2",
        "deviation a warning for training, and nothing for inference: the intent is given",
    ),
    "PR-8": (ON_ONE_MODULE, "test test_one_config_prepares_two_models_of_other_classes"),
    "PR-9": (
        "deviation a plan has a model: a loader alone needs none; the face of accelerate takes loaders by themselves",
        "test test_loaders_alone_are_read_under_every_engine_that_divides_by_rank",
    ),
    "PR-21": (
        "deviation apply takes one model; the face of accelerate takes several, on one process and under DDP",
        "rule optimizer.misses-parameters",
        "rule optimizer.foreign-parameters",
        "test test_a_loop_of_public_scripts_trains_as_torch_alone",
        "test test_each_advice_across_ranks_works_as_it_is_written",
    ),
    "PR-10": (
        "rule optimizer.misses-parameters",
        "test test_two_optimizers_train_what_they_train_by_hand_and_a_checkpoint_holds_both",
    ),
    "PR-11": ("step MoveToXLA", "test test_the_optimizer_follows_its_parameters_by_name_with_its_state"),
    "PR-12": ("deviation IPEX is not offered: it has ended, and torch has what it did",),
    "PR-13": ("step ParallelizeModules", "row X-1"),
    "PR-14": ("row X-2",),
    "PR-15": ("step ConvertTransformerEngine", "test test_conversion_is_the_first_change_of_the_model", REACHED),
    "PR-16": ("step ConvertFP8Linears", "test test_conversion_is_the_first_change_of_the_model", REACHED),
    "PR-17": (
        "test test_a_setting_arrives_in_the_plan",
        "test test_ms_amp_starts_where_the_model_lives_and_before_ddp",
        REACHED,
    ),
    "PR-18": (
        ON_ONE_MODULE,
        "test test_an_object_of_the_wrong_kind_is_named_with_what_to_pass",
        "test test_a_scheduler_made_before_still_drives_the_optimizer_after",
    ),
    "PR-19": (NO_REGISTRY, "test test_a_prepared_model_is_refused_with_what_it_carries"),
    "PR-20": (
        "deviation apply returns one Prepared with the objects by name, whatever was given",
        "test test_apply_returns_each_object_by_its_name_whatever_was_given",
    ),
}

BOOKKEEPING: dict[str, Answers] = {
    "BK-1": (
        "test test_what_is_placed_by_whom",
        "deviation no placement flag: the engine says who places, and keep_device_map leaves what is spread",
    ),
    "BK-2": (
        "rule model.already-wrapped",
        "test test_a_prepared_model_is_refused_with_what_it_carries",
        "deviation a prepared model is refused instead of passed through, because nobody knows with which plan",
    ),
    "BK-3": (NO_REGISTRY, "test test_a_refusal_leaves_the_model_as_it_was"),
    "BK-4": ("test test_a_prepared_model_is_refused_with_what_it_carries",),
    "BK-5": (NO_REGISTRY,),
}
