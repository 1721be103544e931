"""Section 12: defects of the reference, and what shows that prepkit does not have them."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import REACHED, Answers

GAPS: dict[str, Answers] = {
    "G-4": ("test test_state_takes_the_shards_of_its_parameter_and_scalars_stay",),
    "G-5": ("test test_an_optimizer_over_a_meta_model_steps_every_parameter",),
    "G-6": (
        "rule blocks.none-selected",
        "test test_one_unit_for_the_whole_model_is_a_warning_for_fsdp2_and_an_error_for_blocks",
    ),
    "G-8": ("rule wrap.container", "test test_a_pattern_that_meets_a_container_among_others_passes_it_over"),
    "G-9": ("rule wrap.size-below-one", "test test_mending_a_size_of_zero_leaves_no_selection_that_does_nothing"),
    "G-10": (
        "test test_what_is_packed_is_ignored_and_everything_else_sharded",
        "test test_no_parameter_is_ignored_wherever_the_values_come_from",
        "test test_what_stays_whole_trains_saves_resumes_and_exports_as_in_one_process",
    ),
    "G-11": (
        "test test_buffers_are_read_whole_computed_or_kept_shared",
        "test test_buffers_of_both_kinds_keep_rank_0_s_values_and_dtypes",
    ),
    "G-13": (
        "test test_a_failure_says_which_units_stand_and_that_there_is_no_way_back",
        "test test_a_rebind_after_sharding_that_fails_half_way_keeps_every_state_and_no_slot",
    ),
    "G-14": ("test test_one_config_prepares_two_models_of_other_classes",),
    "G-17": ("test test_sharding_frees_every_old_parameter_once_the_optimizer_is_released",),
    "G-29": ("test test_units_compute_in_the_planned_dtype_and_the_root_returns_its_own", REACHED),
    "G-52": ("test test_a_checkpointed_block_becomes_a_unit_as_its_wrapper_and_keeps_its_names",),
    "G-57": ("test test_parameters_that_share_an_address_stay_apart",),
    "G-62": ("test test_a_file_that_changed_is_an_error_on_every_rank_before_anything_is_sharded",),
    "G-66": (
        "test test_a_model_for_inference_is_sharded_on_the_device",
        "test test_inference_wraps_nothing_under_ddp_and_shards_under_fsdp2",
        "test test_no_parameter_is_ignored_wherever_the_values_come_from",
        REACHED,
    ),
    "G-67": (
        "step CheckFiles",
        "test test_a_file_that_changed_is_an_error_on_every_rank_before_anything_is_sharded",
    ),
    # --- silent wrong training ---
    "G-1": (
        "test test_a_created_optimizer_holds_the_named_parameters_with_the_options",
        "rule fsdp1.unit-in-two-groups",
        "step RegroupOptimizer",
        "test test_without_original_parameters_the_optimizer_is_regrouped",
    ),
    "G-2": ("rule mesh.single-many-ranks",),
    "G-3": ("test test_checkpointed_compiled_offloaded_shards_learn_what_one_process_learns", "row ST-9"),
    "G-18": ("test test_the_scheduler_ticks_as_often_as_the_plan_says", "row W-16"),
    "G-28": (
        "test test_every_hook_that_config_offers_is_torch_s_own",
        "test test_a_hook_trains_two_ranks_alike",
        "test test_compressed_gradients_are_near_those_that_are_not_and_not_the_same",
        REACHED,
    ),
    "G-34": ("rule deepspeed.offload-optimizer",),
    "G-35": ("rule deepspeed.precision",),
    "G-36": ("rule deepspeed.two-places", "test test_the_mapping_that_is_given_is_copied_and_never_changed"),
    "G-44": ("rule precision.fp16-unsupported",),
    "G-45": ("row W-16",),
    "G-47": (
        "test test_tensor_ranks_are_sent_the_same_batches",
        "test test_tensor_ranks_read_the_same_samples_and_shards_their_own",
    ),
    "G-61": ("test test_ranks_that_hold_one_model_together_count_once", "row DS-13"),
    "G-65": ("test test_16_bit_floats_are_cast_wherever_they_are_nested",),
    # --- late or misleading failures ---
    "G-7": ("rule blocks.none-selected", "row F1-9"),
    "G-12": ("rule reshard.not-a-factor", "test test_an_unknown_kind_anywhere_is_a_finding_at_its_path"),
    "G-23": ("rule model.nothing-trainable",),
    "G-24": ("test test_an_optimizer_on_another_device_than_the_model_is_refused",),
    "G-25": ("test test_the_device_is_the_local_rank_s_unless_one_alone_is_visible",),
    "G-26": ("test test_packed_weights_lie_where_they_are_computed_with", "rule quantised.on-disk"),
    "G-27": ("row DM-2",),
    "G-32": (
        "test test_one_odd_linear_never_stops_its_siblings",
        "test test_a_plain_function_as_forward_is_called_as_it_is_and_put_back",
        "test test_transformer_engines_layers_train_under_zero",
    ),
    "G-33": ("test test_shards_of_cut_layers_on_four_processes_learn_what_one_process_learns",),
    "G-37": ("test test_every_stage_learns_what_torch_learns_with_accumulation_clipping_and_a_scheduler",),
    "G-38": ("test test_a_function_makes_the_scheduler_which_deepspeed_then_steps",),
    "G-39": ("rule scheduler.without-optimizer",),
    "G-40": ("test test_the_hidden_size_is_found_in_every_part_of_a_composite_config",),
    "G-41": ("test test_a_launcher_flag_is_compared_in_any_case",),
    "G-42": ("rule deepspeed.offload", "deviation the path stands in the config, which no launcher hands on"),
    "G-46": (
        "rule model.already-compiled",
        "test test_a_model_of_which_any_module_is_compiled_is_compiled_in_no_other_way",
    ),
    "G-48": (
        "test test_every_rank_reads_its_own_samples_and_the_tail_repeats_the_start",
        "test test_every_sample_counts_once_and_in_order_but_for_what_the_tail_drops",
    ),
    "G-50": ("row PR-20",),
    "G-51": ("test test_a_plain_function_comes_back_as_itself_and_still_takes_no_self",),
    "G-53": ("row PR-2",),
    "G-58": ("deviation DeepSpeed is prepared without transformers; nothing of it is imported for that",),
    "G-59": ("row W-10",),
    "G-60": ("test test_a_base_class_is_told_which_class_inherits_from_it",),
    "G-64": (
        "rule mesh.not-world-size",
        "test test_a_mesh_is_refused_exactly_when_engine_and_world_size_do_not_allow_it",
    ),
    "G-69": ("rule environment.offload-backend", "test test_offload_on_an_accelerator_asks_for_a_cpu_backend_as_well"),
    # --- partial mutation and order dependence ---
    "G-15": ("deviation the config is frozen, and no function is kept in it", "rule ties.split"),
    "G-20": ("test test_a_refusal_leaves_the_model_as_it_was", "test test_a_second_autocast_is_refused"),
    "G-21": (
        "test test_a_prepared_model_is_refused_with_what_it_carries",
        "test test_the_same_plan_is_not_applied_twice",
    ),
    "G-22": ("test test_the_same_plan_is_not_applied_twice", "rule model.already-compiled"),
    "G-49": (
        "test test_everything_else_is_kept_and_the_given_loader_is_untouched",
        "test test_observing_touches_nothing",
    ),
    "G-56": ("test test_preparing_an_engine_again_is_refused",),
    # --- rank disagreement ---
    "G-30": (
        "step Agree",
        "rule model.nothing-trainable",
        "test test_one_odd_rank_of_four_is_named_on_every_rank",
        "test test_ranks_agree_before_anything_is_changed",
    ),
    # --- global state ---
    "G-16": (
        "test test_a_rehearsed_rank_leaves_the_environment_and_torch_as_they_were",
        "test test_a_config_writes_no_environment_variable",
        "deviation a config writes no environment variable",
    ),
    "G-19": ("row ST-50", "row W-33"),
    "G-31": ("row W-33",),
    "G-43": (
        "deviation MS-AMP gets no gradient scaler: it computes in bfloat16",
        "test test_a_scaler_that_is_missing_or_too_many_is_named",
    ),
    "G-54": ("row H-51",),
    "G-55": ("deviation a plan prints every step with its reason; nothing is logged beside it",),
    "G-63": ("test test_a_step_of_one_clips_and_clears_no_gradient_of_the_other",),
    "G-68": ("row ST-28",),
}
"""Defects of the reference that concern FSDP2, and what shows that prepkit does not have them."""
