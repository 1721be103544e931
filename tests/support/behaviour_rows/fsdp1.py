"""FSDP1, in section 3, and its helpers."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import NO_REGISTRY, NOT_ON_META, REACHED, TYPED, Answers

FSDP1: dict[str, Answers] = {
    "F1-1": (
        "rule model.already-wrapped",
        "test test_an_fsdp1_model_is_marked_under_its_own_names",
        "test test_a_compiled_model_is_wrapped_around_its_compilation_and_compiled_no_second_time",
        "deviation refused, compiled or not, instead of passed on without its policy",
    ),
    "F1-2": (
        "test test_a_compiled_model_is_wrapped_around_its_compilation_and_compiled_no_second_time",
        "rule model.already-compiled",
        "deviation it is not compiled a second time",
    ),
    "F1-3": (
        "rule wrap.class-not-found",
        "rule wrap.size-below-one",
        "test test_a_selection_gives_children_before_parents_and_never_the_root",
        "deviation units are paths in the plan; the config is frozen",
    ),
    "F1-4": (NOT_ON_META, "test test_a_checkpoint_wrapper_goes_inside_the_unit_and_names_stay"),
    "F1-5": ("step WrapFSDP1", "test test_what_is_asked_for_reaches_torch"),
    "F1-6": (
        "rule units.ignored-not-found",
        "test test_ignored_modules_are_in_no_unit_and_in_no_flat_parameter",
        "deviation shell patterns over paths, as everywhere in the config, not one regular expression",
        REACHED,
    ),
    "F1-7": (
        "step WrapFSDP1",
        "test test_two_processes_learn_what_one_learns",
        "test test_a_value_of_the_wrong_type_is_not_made_right_by_writing_it",
        "deviation strategies are names: a number is refused when the config is read",
    ),
    "F1-8": (
        "step CheckpointModules",
        "test test_a_checkpoint_wrapper_goes_inside_the_unit_and_names_stay",
        "test test_two_processes_learn_what_one_learns",
        REACHED,
    ),
    "F1-9": ("deviation checkpointing selects blocks of its own, whatever is wrapped (G-7)",),
    "F1-20": (
        "step UpcastParameters",
        "test test_a_unit_that_trains_something_is_stored_in_float32_whole_and_a_frozen_one_as_it_came",
        "deviation before wrapping instead of after, so that the plan says every dtype",
    ),
    "F1-21": ("test test_a_unit_without_parameters_is_as_planned",),
    "F1-22": (
        "test test_a_unit_that_trains_something_is_stored_in_float32_whole_and_a_frozen_one_as_it_came",
        "test test_fsdp1_cuts_flat_parameters_as_planned_to_the_element",
    ),
    "F1-23": (
        "step UpcastParameters",
        "test test_a_step_says_what_it_does",
        "deviation the plan names what is stored in float32, so that nothing has to be logged",
    ),
    "F1-24": (
        "test test_a_frozen_parameter_is_upcast_with_its_unit_and_left_alone_in_a_frozen_one",
        "test test_a_unit_that_trains_something_is_stored_in_float32_whole_and_a_frozen_one_as_it_came",
    ),
    "F1-25": (
        "rule precision.no-master-weights",
        "test test_without_master_weights_nothing_is_upcast_and_the_dtypes_to_compute_in_are_the_same",
        "test test_a_precision_gives_the_dtypes_in_which_flat_parameters_are_computed_reduced_and_buffered",
        "deviation BF16(master_weights=False) is how the dtypes of units come without the upcast",
        REACHED,
    ),
    "F1-30": (NO_REGISTRY,),
    "F1-40": (
        "rule fsdp1.mesh",
        "rule fsdp1.no-shard",
        "test test_copies_are_refused_where_the_strategy_cuts_over_all_ranks",
        "test test_two_processes_learn_what_one_learns",
        "test test_replicas_of_flat_shards_learn_what_one_process_learns",
        "deviation one field says it, sharding (G-12)",
        REACHED,
    ),
    "F1-41": ("rule fsdp1.offload-on-cpu", "test test_what_is_asked_for_reaches_torch", REACHED),
    "F1-42": (
        "test test_fsdp1_cuts_flat_parameters_as_planned_to_the_element",
        "deviation a selection by blocks, classes, paths or size; a plan holds no callables",
        REACHED,
    ),
    "F1-43": (
        "test test_what_is_asked_for_reaches_torch",
        "test test_batch_norms_stay_in_float32_while_all_else_computes_in_bfloat16",
        "test test_a_precision_gives_the_dtypes_in_which_flat_parameters_are_computed_reduced_and_buffered",
        REACHED,
    ),
    "F1-44": ("rule fsdp1.sync-on-cpu", "test test_torch_itself_broadcasts_no_module_states_on_the_cpu", REACHED),
    "F1-45": ("test test_what_is_asked_for_reaches_torch", "deviation BACKWARD_PRE by default, as in torch", REACHED),
    "F1-46": ("test test_what_is_asked_for_reaches_torch", "test test_two_processes_learn_what_one_learns", REACHED),
    "F1-47": (
        "rule fsdp1.unit-in-two-groups",
        "rule fsdp1.partial-state",
        "step RegroupOptimizer",
        "test test_two_processes_learn_what_one_learns",
        "test test_the_state_of_a_flat_parameter_is_that_of_its_parts_end_to_end",
        "deviation True by default; with False the optimizer's groups are rebuilt, or the plan is refused (G-1)",
        REACHED,
    ),
    "F1-48": ("test test_flat_parameters_get_the_elements_that_a_rank_holds", NOT_ON_META),
    "F1-49": (
        "rule fsdp1.ignored-trains",
        "step AverageGradients",
        "test test_an_ignored_module_stays_whole_and_takes_along_what_is_tied_to_it",
    ),
    "F1-50": ("test test_what_is_asked_for_reaches_torch", REACHED),
    "F1-51": (
        "step WrapFSDP1",
        "test test_every_unit_is_told_the_device_of_the_rank_and_whether_rank_0_is_broadcast",
        "test test_flat_units_are_made_on_the_local_device_of_every_kind",
    ),
    "H-10": ("test test_a_precision_gives_the_dtypes_in_which_flat_parameters_are_computed_reduced_and_buffered",),
    "H-10a": (
        "test test_a_precision_gives_the_dtypes_in_which_flat_parameters_are_computed_reduced_and_buffered",
        "test test_an_unknown_kind_anywhere_is_a_finding_at_its_path",
    ),
    "H-10b": (TYPED, "test test_a_message_shows_the_value_and_what_to_type"),
    "H-10c": (
        "test test_a_precision_gives_the_dtypes_in_which_flat_parameters_are_computed_reduced_and_buffered",
        "test test_units_compute_in_the_planned_dtype_and_the_root_returns_its_own",
        "deviation reduced in float32 and returned in output_dtype, float32 unless asked; buffers stay as stored",
        REACHED,
    ),
    "H-10d": (TYPED, "test test_an_unknown_key_anywhere_is_a_finding_at_its_path"),
    "H-10e": (TYPED,),
    "H-10f": ("test test_everything_that_is_wrong_is_said_at_once", "deviation the config is one value, read once"),
    "H-11": ("test test_a_selection_gives_children_before_parents_and_never_the_root", REACHED),
    "H-11a": (
        "rule wrap.class-not-found",
        "test test_declared_blocks_go_before_repeated_ones",
        "deviation names are exact, and are resolved for each model anew (G-14, G-60)",
    ),
    "H-11b": ("rule wrap.size-below-one", "deviation a minimum of 0 is an error (G-9)"),
    "H-11c": (
        "test test_one_config_prepares_two_models_of_other_classes",
        "deviation a selection is data that belongs to no model; a plan holds no callables",
    ),
    "H-12": ("test test_every_unit_is_sharded_on_dim_0_and_ties_hold",),
    "H-12a": (
        "rule wrap.class-not-found",
        "test test_a_class_in_the_wrong_case_gets_the_right_spelling",
        "test test_a_checkpointed_block_becomes_a_unit_as_its_wrapper_and_keeps_its_names",
    ),
    "H-12b": (
        "rule wrap.size-below-one",
        "test test_other_ways_to_shard_are_as_planned",
        "test test_a_selection_gives_children_before_parents_and_never_the_root",
        "deviation what inner units leave is counted, as in FSDP1; containers without a forward are no units (G-8)",
    ),
    "H-12c": ("deviation a selection is data: there is no callable that could be passed over",),
    "H-13": (NOT_ON_META, "rule ties.split"),
}
