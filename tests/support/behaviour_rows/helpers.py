"""Section 6: helpers."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import REACHED, TYPED, Answers

HELPERS: dict[str, Answers] = {
    "H-1": ("test test_the_device_map_is_that_of_the_first_module_that_is_spread",),
    "H-2": ("rule model.sharded-parameters", "test test_a_sharded_parameter_is_a_dtensor_of_its_whole_shape"),
    "H-4": ("test test_what_a_module_carries_is_marked_and_nothing_else_changes",),
    "H-5": ("test test_what_a_module_carries_is_marked_and_nothing_else_changes",),
    "H-6": (
        "rule wrap.class-not-found",
        "test test_a_class_is_found_under_its_exact_name_alone",
        "test test_of_two_classes_with_one_name_both_are_meant",
        "deviation every class of the name is meant, not the first that is met (G-60)",
    ),
    "H-7": (
        "test test_a_model_without_weights_is_planned_and_refused_by_apply",
        "deviation big-model hooks are not looked for: what they offload is on meta, which apply refuses",
    ),
    "H-8": (
        "test test_wrapping_changes_no_canonical_name_no_parameter_and_no_order",
        "test test_two_ranks_of_fsdp2_gather_float8_weights_with_scales_from_the_step_before",
        "deviation parameters are told by name and identity, never by address",
    ),
    "H-14": ("test test_wrapper_segments_are_dropped_wherever_they_stand",),
    "H-15": ("step RebindOptimizer", "test test_state_takes_the_shards_of_its_parameter_and_scalars_stay"),
    "H-16": (
        "step CheckpointModules",
        "test test_checkpointed_blocks_run_twice_and_give_the_same_gradients",
        "deviation the random state is preserved unless preserve_rng_state=False",
        "test test_inputs_of_offloaded_blocks_leave_the_device_in_forward",
        REACHED,
    ),
    "H-17": ("test test_a_selection_gives_children_before_parents_and_never_the_root",),
    "H-18": (
        "test test_every_unit_is_sharded_on_dim_0_and_ties_hold",
        "test test_buffers_that_have_values_keep_them",
        "test test_buffers_of_both_kinds_keep_rank_0_s_values_and_dtypes",
        "deviation buffers that have values stay where they are, those on meta are sent, or computed by their modules",
    ),
    "H-19": (
        "step ReadTensors",
        "test test_a_meta_model_loaded_into_shards_trains_as_the_full_one",
        "step SendTensors",
        "test test_a_rank_is_sent_its_own_shard_alone_straight_from_storage_to_storage",
        "deviation BroadcastWeights sends each rank its own part, in pieces; from files every rank reads its own bytes",
    ),
    "H-19a": ("deviation as H-19", "test test_values_are_cast_on_the_way"),
    "H-20": (
        "test test_autocast_computes_in_bf16_and_returns_float32",
        "test test_a_step_is_that_of_float32_up_to_rounding_and_the_norm_is_of_unscaled_gradients",
        "test test_the_autocast_is_outside_that_of_bfloat16_and_on_while_the_model_trains",
        "test test_xla_is_the_device_of_its_autocast",
    ),
    "H-21": (
        "test test_16_bit_floats_are_cast_wherever_they_are_nested",
        "deviation only torch tensors are cast, and the patched forward may be pickled",
    ),
    "H-21a": (
        "test test_a_copy_of_an_autocasted_model_computes_with_its_own_weights",
        "deviation a copy stays patched, bound method or plain function",
    ),
    "H-21b": ("test test_a_copy_of_an_autocasted_model_computes_with_its_own_weights",),
    "H-22": (
        "test test_equal_blocks_share_one_compilation_and_each_runs_it",
        "deviation blocks are compiled in place: no clone, no _orig_mod in names, and nothing but blocks is compiled",
    ),
    "H-23": ("step CompileModules", "test test_compiling_binds_code_in_place_and_is_taken_back"),
    "H-24": (
        "step CompileModules",
        "test test_compiled_code_runs_on_every_rank_of_every_engine",
        "deviation no global dynamo setting is changed",
    ),
    "H-30": (
        "test test_every_hook_that_config_offers_is_torch_s_own",
        "test test_the_numbers_of_powersgd_reach_its_state",
        "rule ddp.hook-dtype",
        "rule ddp.powersgd",
        "test test_batched_powersgd_which_config_does_not_offer_still_fails_in_torch",
        "deviation batched PowerSGD is not offered: torch's own raises AssertionError at its first compressed step",
        REACHED,
    ),
    "H-30a": ("deviation a wrapper is a field of the hook that it wraps, so that none stands alone (G-28)",),
    "H-30b": (TYPED + " (G-28)", "test test_an_unknown_kind_anywhere_is_a_finding_at_its_path"),
    "H-35": (
        "test test_a_model_that_is_out_of_prepkit_s_hands_is_as_it_was_and_can_be_prepared_again",
        "test test_a_plain_function_comes_back_as_itself_and_still_takes_no_self",
        "test test_a_module_comes_out_of_torch_s_own_wrappers_in_any_order",
        "test test_a_model_comes_out_of_both_autocasts_with_the_forward_that_it_had",
        "deviation TransformerEngine's layers stay: they hold the parameters that were trained",
    ),
    "H-50": ("rule environment.launcher-flag", "deviation no switch of prepkit is an environment variable"),
    "H-51": ("deviation every option reaches the library, also one that equals a default: what is shown is what runs",),
    "H-52": ("deviation values are frozen, so that nothing has to be copied",),
    "H-53": (
        "test test_installed_libraries_are_found_with_their_versions_within_milliseconds",
        "deviation a missing package is a version that is not listed",
    ),
}
