"""Float8 and XLA, wherever the reference has them."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import REACHED, TYPED, Answers

FP8_AND_XLA: dict[str, Answers] = {
    "ST-2": (
        "rule xla.library-missing",
        "test test_the_processes_of_torch_xla_are_counted_once_it_has_started_them",
        "deviation XLA is an engine that is asked for, and never the consequence of an installed library",
    ),
    "ST-21": (
        "rule fp8.library-missing",
        "rule fp8.library-too-old",
        "rule fp8.unsupported-device",
        "deviation a device without float8 is an error, not a silent float16 or bfloat16",
    ),
    "ST-26": (
        "test test_the_autocast_is_outside_that_of_bfloat16_and_on_while_the_model_trains",
        "rule fp8.msamp-engine",
    ),
    "ST-27": (
        "deviation MS-AMP gets no gradient scaler: it computes in bfloat16 and scales its weights itself (G-43)",
    ),
    "ST-30": (TYPED, "test test_every_recipe_reaches_the_layer_with_its_options", REACHED),
    "ST-31": (
        "test test_ms_amp_gets_a_section_of_its_own_and_its_own_initialize",
        "rule deepspeed.msamp",
        "deviation the precision says it, FP8(backend=MSAMP()), and the JSON may not say otherwise",
    ),
    "ST-32": (
        "rule fp8.launcher-flag",
        "test test_a_launcher_flag_is_compared_in_any_case",
        "deviation ACCELERATE_FP8_BACKEND is recorded and named, not obeyed (G-41)",
    ),
    "ST-33": (
        "rule fp8.library-missing",
        "deviation torchao unless another library is asked for, never whichever happens to be installed",
    ),
    "ST-34": (
        "test test_under_ddp_the_autocast_is_on_the_wrapper",
        "test test_under_fsdp1_the_autocast_is_on_the_wrapper_around_flat_parameters",
        "test test_under_fsdp2_the_model_enters_float8_and_returns_float32",
    ),
    "ST-35": (
        "test test_two_ranks_of_fsdp1_train_in_float8_what_one_process_trains",
        "test test_layers_that_multiply_in_float8_keep_the_values_as_they_are",
        "deviation nothing to refuse: float8 layers of torchao are filled as others are",
    ),
    "TE-1": (
        "step AutocastFP8Forward",
        "test test_the_autocast_is_outside_that_of_bfloat16_and_on_while_the_model_trains",
        "test test_without_the_library_both_steps_are_refused",
        "rule fp8.unsupported-blocks",
        "deviation MXFP8BlockScaling has no fields for a history, so that they cannot be combined",
    ),
    "TE-2": (
        "test test_under_ddp_the_autocast_is_on_the_wrapper",
        "test test_under_fsdp1_the_autocast_is_on_the_wrapper_around_flat_parameters",
        "test test_transformer_engine_is_inside_compilation_and_around_ddp",
    ),
    "H-31": (
        "step ConvertTransformerEngine",
        "test test_layers_are_replaced_with_their_values_dtypes_and_names",
        "test test_one_odd_linear_never_stops_its_siblings",
        "deviation one odd Linear does not stop the others; norms without a bias and tied Linears stay (G-32)",
        REACHED,
    ),
    "H-32": (
        "step ConvertFP8Linears",
        "test test_torchao_leaves_the_first_and_the_last_linear_unless_told_otherwise",
        "test test_the_odd_linear_counts_as_the_first",
        "test test_exactly_the_named_layers_are_converted_and_keep_their_parameters",
        "deviation which layers is in the plan; other filters are path patterns in skip",
        REACHED,
    ),
    "H-33": (
        "step AutocastFP8Forward",
        "test test_recipes_name_only_what_the_library_is_asked_for",
        "test test_block_scaling_gets_no_history_and_may_run_in_evaluation",
        "test test_a_plain_function_as_forward_is_called_as_it_is_and_put_back",
        "deviation a plain function is called without self (G-32); options of a recipe are passed, defaults included",
    ),
    "XL-1": (
        "step MoveToXLA",
        "test test_a_forked_process_moves_through_the_wrapper_and_others_by_themselves",
        "test test_the_optimizer_follows_its_parameters_by_name_with_its_state",
        REACHED,
    ),
    "XL-2": (
        "test test_a_plan_for_the_processes_of_torch_xla_is_applied_and_trains",
        "test test_a_forked_process_moves_through_the_wrapper_and_others_by_themselves",
        "step ReduceXLAGradients",
        "rule xla.mesh",
        "rule xla.loaders",
        "test test_xla_processes_clip_what_they_have_averaged",
    ),
    "XL-3": (
        "test test_single_moves_casts_checkpoints_and_compiles_last",
        "test test_the_single_engine_trains_like_a_hand_written_loop",
        "deviation the engine is given, so that none is missing by accident (G-37)",
    ),
}
