"""The rows of the behaviour reference about DeepSpeed: its section 5, offloaded optimizers, and what state holds."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import REACHED, Answers

COMBINATION = "test test_a_combination_is_planned_with_its_owner_or_refused_with_every_reason"
LITERAL = "test test_sections_with_literal_values_need_no_objects"
REAL = "test test_every_stage_learns_what_torch_learns_with_accumulation_clipping_and_a_scheduler"
TWO_PLACES = "rule deepspeed.two-places"
PRECISION = "test test_precision_has_one_owner_in_every_row_of_the_table"
NO_PLUGIN = "deviation the engine is a frozen value of one config: no plugin is selected, and no state is published"
NO_ENVIRONMENT = "deviation no field has a default in an environment variable"
NOTHING_READ = "test test_a_variable_of_the_environment_is_read_by_rooms_that_act_and_by_whoever_is_asked_to_read_them"
TOLD_NOTHING = "test test_transformers_is_told_nothing_of_the_engine_and_goes_on_building_whole_models"

INITIALISE: dict[str, Answers] = {
    "DS-1": ("step InitializeDeepSpeed", "test test_ms_amps_own_initialize_takes_the_place_of_deepspeeds"),
    "DS-2": ("deviation loaders are given as loaders=, so no argument has to be recognised as one",),
    "DS-3": (
        "rule deepspeed.tensor-parallel",
        "test test_each_feature_has_the_version_that_it_needs",
        "test test_a_model_that_deepspeed_splits_learns_what_one_process_learns",
        "deviation the mesh is DeepSpeed's own; prepkit builds none beside it",
    ),
    "DS-4": ("step ShardLoader", "test test_tensor_ranks_of_deepspeed_read_the_same_samples"),
    "DS-5": (
        "test test_the_micro_batch_is_that_of_the_loader",
        "test test_loaders_with_batches_of_their_own_and_no_loader_at_all_leave_the_micro_batch_to_the_user",
        "deviation only loaders are asked for their batch size, and DeepSpeed(micro_batch=...) may say it",
        REACHED,
    ),
    "DS-6": ("deviation loaders are sharded by sampler, so that their batch size is that of a rank",),
    "DS-7": ("test test_the_micro_batch_is_that_of_the_smallest_loader_unless_the_largest_is_asked_for", REACHED),
    "DS-8": ("rule deepspeed.no-micro-batch",),
    "DS-9": ("test test_the_third_number_follows_from_two", TWO_PLACES),
    "DS-10": ("test test_the_third_number_follows_from_two", REACHED),
    "DS-11": (TWO_PLACES, "deviation a disagreement is an error that names both places; nobody adopts anything"),
    "DS-12": (
        "test test_clipping_is_always_written_because_deepspeeds_own_default_clips",
        "deviation clipping that is auto is config.clip, and 0.0 where that is none",
        REACHED,
    ),
    "DS-13": (
        "test test_the_third_number_follows_from_two",
        "test test_ranks_that_hold_one_model_together_count_once",
        "deviation the world is divided by the tensor-parallel size (G-61)",
    ),
    "DS-14": ("deviation each object has an argument of its own", COMBINATION),
    "DS-15": (COMBINATION,),
    "DS-16": (
        "test test_zero_is_told_of_optimizers_that_it_was_not_tested_with",
        "rule deepspeed.untested-optimizer",
        "deviation the switch is written for optimizers that need it only",
    ),
    "DS-17": ("deviation every plan has a model",),
    "DS-18": ("step AutocastFP8Forward", "test test_transformer_engines_layers_train_under_zero"),
    "DS-19": (
        "rule deepspeed.leaf-modules",
        "rule deepspeed.experts",
        "step MarkLeafModules",
        "test test_experts_that_pick_by_the_data_are_suggested_as_leaves_and_marked_when_named",
        "test test_blocks_of_experts_are_gathered_whole",
        REACHED,
    ),
    "DS-20": (
        "rule deepspeed.hidden-size",
        "test test_bucket_sizes_are_worked_out_in_integers_from_the_largest_hidden_size",
        "test test_bucket_sizes_of_the_users_own_stay_and_without_a_hidden_size_auto_is_refused",
        "test test_the_hidden_size_is_found_in_every_part_of_a_composite_config",
    ),
    "DS-21": ("test test_numbers_of_spec_and_schedule_reach_the_sections",),
    "DS-22": (
        "test test_numbers_of_spec_and_schedule_reach_the_sections",
        "test test_the_warm_up_ends_at_the_rate_of_the_optimizer_that_is_given",
        "deviation total_num_steps are optimizer steps, and nobody divides them by the processes",
        REACHED,
    ),
    "DS-23": ("rule deepspeed.auto", "test test_auto_is_found_in_lists_too"),
    "DS-23a": ("rule deepspeed.batch", "test test_numbers_that_do_not_multiply_are_told_with_the_nearest_that_do"),
    "DS-24": ("deviation the config is in the plan, and nowhere else",),
    "DS-25": ("step InitializeDeepSpeed", COMBINATION),
    "DS-26": (
        "step ConvertOptimizer",
        "rule deepspeed.hpu-lazy",
        "test test_an_offloaded_optimizer_becomes_the_cpu_form_of_the_same_algorithm",
        "test test_offloaded_state_is_stepped_by_deepspeeds_own_adam",
        REACHED,
    ),
    "DS-27": (
        "test test_deepspeed_finds_the_rank_that_it_reads_and_nothing_else_in_the_environment",
        "deviation DEEPSPEED_USE_HPU is not set: DeepSpeed finds its accelerator, or DS_ACCELERATOR names it",
    ),
    "DS-28": ("deviation sequence parallelism is not offered",),
    "DS-29": ("step InitializeDeepSpeed", REAL),
    "DS-30": (
        "step CompileModules",
        "rule deepspeed.installed",
        "test test_checkpointed_blocks_and_compilation_after_initialising_change_nothing",
    ),
    "DS-31": (
        "test test_optimizer_and_scheduler_of_the_config_are_made_and_stepped_by_deepspeed",
        "deviation DeepSpeed's optimizer is returned as it is; nothing is wrapped around it",
    ),
    "DS-32": (REAL,),
    "DS-33": ("test test_a_function_makes_the_scheduler_which_deepspeed_then_steps",),
    "DS-34": (
        "test test_optimizer_and_scheduler_of_the_config_are_made_and_stepped_by_deepspeed",
        "deviation a scheduler of the config is returned too, as ready.scheduler",
    ),
    "DS-35": (REAL,),
    "DS-36": ("deviation each Prepared holds its engine",),
    "DS-37": (
        "test test_two_engines_that_both_train_learn_what_each_learns_alone",
        "deviation a second engine is driven by its own Prepared, not by the first",
    ),
    "DS-38": ("deviation there is no registry of prepared objects",),
    "DS-39": ("test test_every_stage_learns_what_torch_learns_with_accumulation_clipping_and_a_scheduler",),
}

TRUTH_TABLE: dict[str, Answers] = {
    "DS-50": (COMBINATION, "rule deepspeed.needs-optimizer"),
    "DS-51": (
        COMBINATION,
        "rule scheduler.without-optimizer",
        "deviation refused: it would fail at its first step (G-39)",
    ),
    "DS-52": (COMBINATION, "rule deepspeed.schedule-alone"),
    "DS-53": (COMBINATION,),
    "DS-54": (COMBINATION,),
    "DS-55": (COMBINATION, "rule deepspeed.schedule-alone"),
    "DS-56": (COMBINATION, "deviation the function is called, by DeepSpeed, with the optimizer (G-38)"),
    "DS-57": (COMBINATION,),
    "DS-58": (COMBINATION, "deviation a spec needs no section: torch's optimizer is created and handed over"),
    "DS-59": (
        COMBINATION,
        "test test_a_scheduler_section_without_any_optimizer_is_refused_for_that_alone_once_its_values_are_literal",
        "deviation refused with literal values too: DeepSpeed would make a schedule for the rate of no optimizer",
    ),
    "DS-60": (COMBINATION, "rule deepspeed.two-schedulers"),
    "DS-61": (COMBINATION, "deviation refused: the schedule would set the rate of no optimizer"),
    "DS-62": (COMBINATION, "rule deepspeed.two-schedulers"),
    "DS-63": (COMBINATION, LITERAL),
    "DS-64": (COMBINATION, "rule deepspeed.two-schedulers"),
    "DS-65": (COMBINATION, "test test_the_warm_up_ends_at_the_rate_of_the_optimizer_that_is_given"),
    "DS-66": (COMBINATION, "rule deepspeed.two-schedulers"),
    "DS-67": (COMBINATION, "deviation a spec needs no section: with numbers for the schedule it is planned"),
    "DS-68": (COMBINATION, LITERAL),
    "DS-69": (COMBINATION, "rule deepspeed.schedule-alone"),
    "DS-70": (COMBINATION, "rule deepspeed.two-optimizers"),
    "DS-71": (COMBINATION,),
    "DS-72": (COMBINATION, "rule scheduler.without-optimizer"),
    "DS-73": (COMBINATION, "rule deepspeed.schedule-alone"),
    "DS-74": (COMBINATION,),
    "DS-75": (COMBINATION, LITERAL),
    "DS-76": (COMBINATION, "rule deepspeed.two-schedulers"),
    "DS-77": (COMBINATION, "rule deepspeed.two-optimizers"),
    "DS-78": (COMBINATION, LITERAL),
    "DS-79": (COMBINATION, "test test_numbers_of_spec_and_schedule_reach_the_sections"),
    "DS-80": (
        COMBINATION,
        "test test_literal_sections_and_a_function_are_refused_where_one_would_win_silently",
        "deviation a function beside a section is refused, where today it wins without a word",
    ),
}

PLUGIN: dict[str, Answers] = {
    "DP-1": (NO_ENVIRONMENT, NOTHING_READ),
    "DP-2": ("test test_the_mapping_that_is_given_is_copied_and_never_changed", REACHED),
    "DP-3": (TWO_PLACES, "deviation a config without the key gets config.accumulation, not 1"),
    "DP-4": ("rule deepspeed.no-stage",),
    "DP-5": (
        NO_ENVIRONMENT,
        NOTHING_READ,
        "test test_what_prepkit_does_not_do_or_accelerate_refuses_is_refused",
    ),
    "DP-6": ("test test_a_setting_in_two_places_that_agree_is_fine", "test test_the_third_number_follows_from_two"),
    "DP-7": (TWO_PLACES, "test test_a_setting_in_two_places_that_disagree_names_both"),
    "DP-8": (REAL, "test test_clipping_is_always_written_because_deepspeeds_own_default_clips"),
    "DP-9": ("deviation steps_per_print is what the user writes, else DeepSpeed's default",),
    "DP-10": (
        "step PartitionParameters",
        "test test_a_rank_of_zero_3_holds_its_parts_and_one_block_and_never_the_whole",
        "deviation without a flag: a model on meta is divided, one that was built under zero.Init is recognised",
    ),
    "DP-11": ("rule deepspeed.zero-init",),
    "DP-12": ("rule deepspeed.msamp", "test test_ms_amp_gets_a_section_of_its_own_and_its_own_initialize"),
    "DP-13": (NO_PLUGIN,),
    "DP-20": ("rule deepspeed.auto", "rule deepspeed.unknown-key", TWO_PLACES),
    "DP-21": ("test test_a_setting_in_two_places_that_disagree_names_both", "test test_auto_is_found_in_lists_too"),
    "DP-22": ("test test_auto_is_found_in_lists_too",),
    "DP-23": ("test test_dotted_paths_are_looked_up_set_and_dropped",),
    "DP-30": (PRECISION, "test test_float16_has_deepspeeds_own_scaler_with_the_numbers_of_the_config"),
    "DP-31": (PRECISION, "deviation communication_data_type is config.precision.reduce_dtype on every device"),
    "DP-32": (PRECISION,),
    "DP-33": (PRECISION, "rule deepspeed.precision", "deviation refused, where today precision is off without a word"),
    "DP-34": (PRECISION, "rule deepspeed.precision", "deviation refused, where today the JSON wins"),
    "DP-40": ("deviation nothing is told to transformers, which need not be installed (G-58)", TOLD_NOTHING),
    "DP-41": (
        "deviation nothing is told to transformers, so nothing is taken back; who builds enters zero.Init, or not",
        TOLD_NOTHING,
        "test test_a_model_built_under_zero_init_is_planned_by_its_real_sizes_and_trained",
    ),
    "HC-1": (
        "rule deepspeed.not-json",
        "test test_the_mapping_that_is_given_is_copied_and_never_changed",
        "test test_an_example_means_the_config_that_it_says",
        "test test_text_that_names_a_file_or_is_base64_is_no_config",
        "deviation a mapping or JSON text; a file is read by whoever has it, and base64 by nobody",
    ),
    "HC-2": ("test test_offloading_begins_where_there_is_something_to_offload_and_has_a_place",),
    "HC-3": ("test test_dotted_paths_are_looked_up_set_and_dropped",),
    "HC-4": ("test test_dotted_paths_are_looked_up_set_and_dropped",),
    "HC-5": ("test test_dotted_paths_are_looked_up_set_and_dropped",),
    "HC-6": (PRECISION, 'deviation a value is true or false, also where it is missing; "auto" is settled first'),
    "HC-7": ("test test_old_forms_are_written_in_todays",),
    "HC-8": ("test test_auto_is_found_in_lists_too",),
}

STATE_AND_OFFLOAD: dict[str, Answers] = {
    "ST-22": ("step CastForward", PRECISION, "deviation config.precision is what runs, and what is reported"),
    "ST-42": (NO_PLUGIN,),
    "ST-43": (NO_PLUGIN, "test test_two_engines_that_both_train_learn_what_each_learns_alone"),
    "ST-44": ("test test_text_that_is_no_object_of_settings_is_refused_with_the_reason",),
    "ST-45": ("rule deepspeed.installed", "test test_each_feature_has_the_version_that_it_needs"),
    "ST-47": ("test test_two_engines_that_both_train_learn_what_each_learns_alone",),
    "H-40": ("step ConvertOptimizer", "test test_an_offloaded_optimizer_becomes_the_cpu_form_of_the_same_algorithm"),
    "H-40a": (
        "test test_an_offloaded_optimizer_becomes_the_cpu_form_of_the_same_algorithm",
        "test test_offloaded_state_is_stepped_by_deepspeeds_own_adam",
    ),
    "H-40b": ("test test_an_offloaded_optimizer_becomes_the_cpu_form_of_the_same_algorithm",),
    "H-40c": (
        "rule deepspeed.offload-optimizer",
        "test test_an_offloaded_optimizer_without_a_cpu_form_is_refused_unless_it_is_kept",
        "deviation torch Adam becomes DeepSpeed's without decoupled decay; SGD, RMSprop and 8-bit ones are refused",
    ),
    "H-40d": (
        "test test_an_offloaded_optimizer_becomes_the_cpu_form_of_the_same_algorithm",
        "deviation no stray keyword, and DeepSpeed's own check is told",
    ),
    "H-40e": (
        "test test_an_offloaded_optimizer_becomes_the_cpu_form_of_the_same_algorithm",
        "deviation no stray keyword",
    ),
    "H-40f": (
        "rule deepspeed.installed",
        "test test_each_feature_has_the_version_that_it_needs",
        "deviation DeepSpeed 0.9.3 is the oldest that prepkit plans for",
    ),
}

DEEPSPEED: dict[str, Answers] = {**INITIALISE, **TRUTH_TABLE, **PLUGIN, **STATE_AND_OFFLOAD}
