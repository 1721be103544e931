"""Section 3: one model, in the order in which it is wrapped."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import NO_REGISTRY, REACHED, Answers

DEVICE_MAP: dict[str, Answers] = {
    "DM-1": (
        "rule model.device-map",
        "test test_a_device_map_of_one_entry_is_no_map",
        "test test_a_model_that_a_device_map_spreads_is_neither_moved_nor_given_device_ids",
    ),
    "DM-2": (
        "test test_only_the_config_keeps_a_device_map_and_a_variable_that_says_so_is_named",
        "test test_ddp_gets_no_device_ids_for_a_model_that_is_kept_spread",
        "deviation keep_device_map is config; ACCELERATE_BYPASS_DEVICE_MAP is recorded, named and not obeyed",
        REACHED,
    ),
    "DM-3": (
        "test test_only_the_config_keeps_a_device_map_and_a_variable_that_says_so_is_named",
        "test test_a_model_that_a_device_map_spreads_is_neither_moved_nor_given_device_ids",
    ),
    "DM-4": ("test test_a_device_map_of_one_entry_is_no_map",),
}

AUTOCAST: dict[str, Answers] = {
    "AMP-1": ("step AutocastForward", "test test_autocast_taken_back_leaves_no_trace"),
    "AMP-2": (
        "test test_autocast_computes_in_bf16_and_returns_float32",
        "deviation autocast has no switches: enabled=False is precision=None, its weight cache stays as torch has it",
    ),
    "AMP-3": (
        "test test_a_plain_function_as_forward_is_wrapped_and_put_back_as_itself",
        "test test_ms_amp_starts_where_the_model_lives_and_before_ddp",
    ),
    "AMP-4": (
        "test test_autocast_computes_in_bf16_and_returns_float32",
        "test test_autocast_keeps_the_signature_that_trainers_read",
        "deviation forward is a callable object in the instance, not a bound method, so that it pickles and is undone",
    ),
    "AMP-5": (
        "test test_16_bit_floats_are_cast_wherever_they_are_nested",
        "test test_model_outputs_of_transformers_are_cast_and_keep_their_class",
        "deviation fields of dataclasses are cast as well (G-65)",
    ),
    "AMP-6": (
        "test test_autocast_computes_in_bf16_and_returns_float32",
        "step UpcastParameters",
        "deviation what is trained in 16 bits is stored in float32, unless master_weights=False",
    ),
    "AMP-7": (
        "test test_autocast_is_for_engines_without_a_precision_of_their_own",
        "test test_units_compute_in_the_planned_dtype_and_the_root_returns_its_own",
        "deviation FSDP2 returns output_dtype too (G-29)",
    ),
}

QUANTISED: dict[str, Answers] = {
    "Q-1": ("rule quantised.spread", "rule model.device-map"),
    "Q-2": ("test test_packed_weights_lie_where_they_are_computed_with",),
    "Q-3": (
        "test test_a_map_to_the_rank_s_own_device_is_the_same_fact_on_every_rank",
        "rule quantised.on-disk",
    ),
    "Q-4": ("test test_packed_weights_lie_where_they_are_computed_with",),
    "Q-5": ("rule quantised.other-device",),
    "Q-6": ("rule quantised.other-device",),
    "Q-7": (
        "test test_where_each_process_sees_one_device_that_one_is_its_own",
        "deviation cuda:0 is not taken for the device of a process that computes on the CPU (G-26)",
    ),
    "Q-8": ("rule quantised.other-device",),
    "Q-9": ("rule quantised.on-cpu",),
    "Q-10": ("rule quantised.on-cpu", "test test_packed_weights_lie_where_they_are_computed_with"),
    "Q-11": ("rule quantised.on-disk", "deviation refused also where it is the only entry (G-26)"),
    "Q-12": ("test test_a_cpu_device_object_is_seen_as_its_text_is", "deviation it does not slip through (G-26)"),
    "Q-13": ("test test_a_quantised_model_with_a_map_is_not_moved_and_one_without_is",),
}

PLACEMENT: dict[str, Answers] = {
    "PL-1": ("step MoveModel", "test test_a_move_keeps_every_parameter_object_and_its_tie"),
    "PL-2": ("test test_what_is_placed_by_whom",),
    "PL-3": ("test test_a_model_that_a_device_map_spreads_is_neither_moved_nor_given_device_ids",),
    "EV-1": (
        "test test_inference_wraps_nothing_under_ddp_and_shards_under_fsdp2",
        "test test_inference_keeps_precision_placement_and_compilation",
        "test test_a_model_for_inference_computes_in_float8_and_is_not_wrapped",
        "deviation evaluation is an intent of the whole plan; under FSDP the model is sharded (pain 19)",
        REACHED,
    ),
    "EV-2": (
        "test test_inference_wraps_nothing_under_ddp_and_shards_under_fsdp2",
        "test test_inference_is_sharded_under_fsdp1_too",
        "test test_a_model_for_inference_is_sharded_too",
        REACHED,
    ),
}

DATA_PARALLEL: dict[str, Answers] = {
    "DDP-1": ("step WrapDDP", "test test_every_accelerator_kind_has_its_collectives_and_its_local_device"),
    "DDP-2": ("rule model.sharded-parameters", "test test_wrapped_frozen_and_sharded_models_are_refused"),
    "DDP-3": (
        "rule model.nothing-trainable",
        "test test_inference_wraps_nothing_under_ddp_and_shards_under_fsdp2",
        "deviation a frozen model is refused for training on every device; intent=INFERENCE leaves it unwrapped (G-23)",
    ),
    "DDP-4": (
        "test test_every_option_of_ddp_reaches_the_plan",
        "test test_every_option_reaches_the_wrapper",
        "deviation gradient_as_bucket_view is True unless said otherwise; dim and check_reduction are not offered",
        REACHED,
    ),
    "DDP-5": (
        "test test_every_accelerator_gets_its_own_index_as_the_one_device_and_the_output_device",
        "deviation the index of the device that is bound, not the local rank (G-25)",
    ),
    "DDP-6": (
        "test test_a_cpu_and_a_model_that_is_spread_get_none",
        "deviation only a model that is spread gets none, whatever keep_device_map says",
        REACHED,
    ),
    "DDP-7": ("test test_a_hook_trains_two_ranks_alike", REACHED),
    "DDP-8": (NO_REGISTRY,),
    "MC-1": (
        "test test_two_ranks_learn_what_one_process_learns_from_rank_0_s_weights",
        "rule model.nothing-trainable",
        "rule model.sharded-parameters",
    ),
    "FR-1": ("deviation build_plan and apply are the one door for every engine, FSDP2 included",),
}

TENSOR_PARALLEL: dict[str, Answers] = {
    "TP-1": (
        "step ParallelizeModules",
        "rule tensor.no-plan",
        "deviation the engine TensorParallel, or a tensor axis of the mesh under FSDP2, asks for it",
        REACHED,
    ),
    "TP-2": ("deviation torch's own styles cut the layers, so no version of transformers is asked for",),
    "TP-3": ("rule tensor.size-differs", "test test_a_model_that_arrives_cut_is_verified_and_not_cut_again"),
    "TP-4": ("rule tensor.size-differs",),
    "TP-5": (
        "test test_a_model_that_arrives_cut_is_verified_and_not_cut_again",
        "deviation a model that arrives whole is cut by prepkit, which accelerate leaves to whoever loads it",
    ),
    "H-3": ("test test_the_tensor_parallel_size_comes_from_the_model_or_its_distributed_config",),
}

COMPILE: dict[str, Answers] = {
    "CM-1": ("test test_nothing_is_compiled_that_was_not_asked_for",),
    "CM-2": (
        "rule model.already-compiled",
        "test test_nothing_is_compiled_twice_by_whatever_it_was_compiled_before",
        "deviation a compiled model is refused where compilation is asked for, compiled blocks too (G-46)",
    ),
    "CM-3": (
        "step CompileModules",
        "rule compile.unknown-mode",
        "rule compile.no-backend",
        "rule compile.foreign-backend",
        "rule xla.compile",
        "test test_compiling_refuses_what_is_compiled_or_absent",
        "test test_a_whole_model_is_one_graph_that_runs_at_every_call",
        "deviation in place, so that class, names and hooks stay; disable is not offered",
        REACHED,
    ),
    "CM-4": ("test test_equal_blocks_share_one_compilation_and_each_runs_it", REACHED),
    "CM-5": (
        "test test_ddp_wraps_after_block_compilation_and_before_whole_compilation",
        "test test_fsdp1_wraps_after_block_compilation_and_before_whole_compilation",
        "test test_transformer_engine_is_inside_compilation_and_around_ddp",
        "test test_compiled_code_runs_on_every_rank_of_every_engine",
    ),
    "CM-6": (NO_REGISTRY,),
}
