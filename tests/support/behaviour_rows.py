"""Which rule, step or test answers each row of the behaviour reference; or why prepkit does otherwise.

A row has one or more answers: ``rule <id>``, ``step <kind>``, ``test <function>`` or ``deviation <reason>``.
``pending <what>`` stands where nothing answers yet. Sections 1, 3, 4, 5 and 6 of the reference are covered.
"""

from __future__ import annotations

from tests.support.behaviour_rows_deepspeed import DEEPSPEED

Answers = tuple[str, ...]

NO_REGISTRY = "deviation there is no registry of prepared objects: apply returns them, and ready.unwrap() the module"
TYPED = "deviation one field of a typed config holds it, so it cannot be said twice or in another type"

START: dict[str, Answers] = {
    "ST-1": ("deviation SageMaker's own backend is not chosen by itself: write its name in config.backend",),
    "ST-3": (
        "rule environment.backend",
        "step StartProcessGroup",
        "test test_every_accelerator_kind_has_its_collectives_and_its_local_device",
    ),
    "ST-4": (
        "test test_each_launcher_says_how_many_processes_there_are",
        "test test_a_launcher_that_forgot_variables_is_refused_by_their_names",
        "deviation gloo is the backend of CPUs also where mpi is there; write backend='mpi' for it",
    ),
    "ST-5": ("rule mesh.single-many-ranks",),
    "ST-6": ("rule environment.launcher-flag", "deviation the engine is config: no variable chooses it"),
    "ST-7": ("rule environment.launcher-flag", "deviation the engine is config: no variable chooses it"),
    "ST-8": ("deviation Megatron-LM is not offered",),
    "ST-9": (
        "test test_checkpointed_compiled_offloaded_shards_learn_what_one_process_learns",
        "test test_two_processes_learn_what_one_learns",
        "deviation FSDP runs on the CPU and in one process (G-3); XLA and FSDP are two engines",
    ),
    "ST-10": (
        "rule environment.device",
        "deviation ACCELERATE_TORCH_DEVICE is recorded, not obeyed; config.device is a type, its index is bound late",
    ),
    "ST-11": (
        "test test_a_cpu_computes_in_bfloat16_and_has_no_device_memory_of_its_own",
        "test test_a_real_accelerator_has_memory_and_a_capability",
    ),
    "ST-12": (
        "test test_the_device_is_the_local_rank_s_unless_one_alone_is_visible",
        "test test_more_processes_than_devices_are_refused",
    ),
    "ST-13": ("rule environment.world-size", "rule mesh.single-many-ranks"),
    "ST-14": ("rule mesh.ddp-alone",),
    "ST-16": (
        "rule environment.offload-backend",
        "test test_offload_on_an_accelerator_asks_for_a_cpu_backend_as_well",
    ),
    "ST-20": (
        "test test_an_unknown_kind_anywhere_is_a_finding_at_its_path",
        "test test_everything_that_is_wrong_is_said_at_once",
        "rule environment.launcher-flag",
    ),
    "ST-23": (
        "rule precision.fp16-unsupported",
        "rule precision.loss-scale",
        "step CreateGradScaler",
        "test test_every_accelerator_gets_torch_s_scaler_for_its_type",
        "test test_an_overflow_on_one_rank_skips_the_step_on_all",
    ),
    "ST-24": (
        "rule precision.fp16-unsupported",
        "deviation float16 on the CPU is an error, not a silent float32",
    ),
    "ST-25": (
        "rule precision.bf16-unsupported",
        "test test_bfloat16_is_refused_where_the_device_does_not_compute_in_it",
    ),
    "ST-28": ("deviation compiling switches nothing on globally: set torch.backends.cuda.matmul.fp32_precision",),
    "ST-40": (TYPED, "test test_an_unknown_key_anywhere_is_a_finding_at_its_path"),
    "ST-41": (TYPED,),
    "ST-46": ("rule environment.torch-version",),
    "ST-48": ("rule mesh.not-world-size", "rule mesh.size-below-one", "rule mesh.two-rests", "step BuildMesh"),
    "ST-49": (TYPED, "rule values.accumulation"),
    "ST-50": ("deviation no environment variable overrides the config: accumulation is its field alone",),
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

DEVICE_MAP: dict[str, Answers] = {
    "DM-1": ("rule model.device-map",),
    "DM-2": (
        "test test_only_the_config_keeps_a_device_map_and_a_variable_that_says_so_is_named",
        "test test_ddp_gets_no_device_ids_for_a_model_that_is_kept_spread",
        "deviation keep_device_map is config; ACCELERATE_BYPASS_DEVICE_MAP is recorded, named and not obeyed",
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
        "deviation autocast has no switches: enabled=False is AsStored(), and its weight cache stays as torch has it",
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
    "Q-10": ("rule quantised.on-cpu",),
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
    ),
    "EV-2": (
        "test test_inference_wraps_nothing_under_ddp_and_shards_under_fsdp2",
        "test test_inference_is_sharded_under_fsdp1_too",
        "test test_a_model_for_inference_is_sharded_too",
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
        "test test_every_option_reaches_the_wrapper",
        "deviation gradient_as_bucket_view is True unless said otherwise; dim and check_reduction are not offered",
    ),
    "DDP-5": (
        "test test_every_accelerator_gets_its_own_index_as_the_one_device_and_the_output_device",
        "deviation the index of the device that is bound, not the local rank (G-25)",
    ),
    "DDP-6": (
        "test test_a_cpu_and_a_model_that_is_spread_get_none",
        "deviation only a model that is spread gets none, whatever keep_device_map says",
    ),
    "DDP-7": ("test test_a_hook_trains_two_ranks_alike",),
    "DDP-8": (NO_REGISTRY,),
    "MC-1": (
        "test test_two_ranks_learn_what_one_process_learns_from_rank_0_s_weights",
        "rule model.nothing-trainable",
        "rule model.sharded-parameters",
    ),
    "FR-1": ("deviation build_plan and apply are the one door for every engine, FSDP2 included",),
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
        "deviation in place, so that class, names and hooks stay; options and disable are not offered",
    ),
    "CM-4": ("test test_equal_blocks_share_one_compilation_and_each_runs_it",),
    "CM-5": (
        "test test_ddp_wraps_after_block_compilation_and_before_whole_compilation",
        "test test_fsdp1_wraps_after_block_compilation_and_before_whole_compilation",
        "test test_transformer_engine_is_inside_compilation_and_around_ddp",
        "test test_compiled_code_runs_on_every_rank_of_every_engine",
    ),
    "CM-6": (NO_REGISTRY,),
}

HELPERS: dict[str, Answers] = {
    "H-1": ("test test_the_device_map_is_that_of_the_first_module_that_is_spread",),
    "H-2": ("rule model.sharded-parameters", "test test_a_sharded_parameter_is_a_dtensor_of_its_whole_shape"),
    "H-4": ("test test_what_a_module_carries_is_marked_and_nothing_else_changes",),
    "H-5": ("test test_what_a_module_carries_is_marked_and_nothing_else_changes",),
    "H-6": (
        "rule wrap.class-not-found",
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
        "deviation the random state is preserved unless preserve_rng_state=False; activations are not offloaded",
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
        "deviation SendWeights sends each rank its own part, in pieces; from files every rank reads its own bytes",
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
        "test test_installed_libraries_are_found_with_their_versions_within_ten_milliseconds",
        "deviation a missing package is a version that is not listed",
    ),
}

# --- filled by the branches that build them ------------------------------------------------------------------------

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
    "ST-30": (TYPED, "test test_every_recipe_reaches_the_layer_with_its_options"),
    "ST-31": ("rule fp8.msamp-engine", "deviation MS-AMP is not offered under DeepSpeed"),
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
        "deviation there is no RAM-efficient loading that torchao could be in the way of (H-19)",
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
    ),
    "H-32": (
        "step ConvertFP8Linears",
        "test test_torchao_leaves_the_first_and_the_last_linear_unless_told_otherwise",
        "test test_the_odd_linear_counts_as_the_first",
        "test test_exactly_the_named_layers_are_converted_and_keep_their_parameters",
        "deviation which layers is in the plan; other filters are path patterns in skip",
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
    ),
    "XL-2": (
        "test test_a_plan_for_the_processes_of_torch_xla_is_applied_and_trains",
        "test test_a_forked_process_moves_through_the_wrapper_and_others_by_themselves",
        "step ReduceXLAGradients",
        "rule xla.mesh",
        "rule xla.loaders",
        "rule xla.clip",
    ),
    "XL-3": (
        "test test_single_moves_casts_checkpoints_and_compiles_last",
        "test test_the_single_engine_trains_like_a_hand_written_loop",
        "deviation the engine is given, so that none is missing by accident (G-37)",
    ),
}

NOT_ON_META = (
    "deviation apply refuses a model on meta (plan.no-weights): nothing is materialised, and ties stay the model's own"
)
"""F1-4, F1-48, H-13"""

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
        "rule fsdp1.ignored-not-found",
        "test test_ignored_modules_are_in_no_unit_and_in_no_flat_parameter",
        "deviation shell patterns over paths, as everywhere in the config, not one regular expression",
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
        "rule fsdp1.buffer-dtype-ignored",
        "deviation the dtypes of units are options of the precision, so that none is there without one",
    ),
    "F1-30": (NO_REGISTRY,),
    "F1-40": (
        "rule fsdp1.mesh",
        "rule fsdp1.no-shard",
        "test test_two_processes_learn_what_one_learns",
        "test test_copies_of_shards_learn_what_one_process_learns",
        "deviation one field says it, sharding (G-12)",
    ),
    "F1-41": ("rule fsdp1.offload-on-cpu", "test test_what_is_asked_for_reaches_torch"),
    "F1-42": (
        "test test_fsdp1_cuts_flat_parameters_as_planned_to_the_element",
        "deviation a selection by blocks, classes, paths or size; a plan holds no callables",
    ),
    "F1-43": (
        "test test_what_is_asked_for_reaches_torch",
        "test test_batch_norms_stay_in_float32_while_all_else_computes_in_bfloat16",
        "test test_a_precision_gives_the_dtypes_in_which_flat_parameters_are_computed_reduced_and_buffered",
    ),
    "F1-44": ("rule fsdp1.sync-on-cpu", "test test_torch_itself_broadcasts_no_module_states_on_the_cpu"),
    "F1-45": ("test test_what_is_asked_for_reaches_torch", "deviation BACKWARD_PRE by default, as in torch"),
    "F1-46": ("test test_what_is_asked_for_reaches_torch", "test test_two_processes_learn_what_one_learns"),
    "F1-47": (
        "rule fsdp1.unit-in-two-groups",
        "rule fsdp1.partial-state",
        "step RegroupOptimizer",
        "test test_two_processes_learn_what_one_learns",
        "test test_the_state_of_a_flat_parameter_is_that_of_its_parts_end_to_end",
        "deviation True by default; with False the optimizer's groups are rebuilt, or the plan is refused (G-1)",
    ),
    "F1-48": (NOT_ON_META,),
    "F1-49": (
        "rule fsdp1.ignored-trains",
        "test test_an_ignored_module_stays_whole_and_takes_along_what_is_tied_to_it",
    ),
    "F1-50": ("test test_what_is_asked_for_reaches_torch",),
    "F1-51": (
        "step WrapFSDP1",
        "test test_every_unit_is_told_the_device_of_the_rank_and_whether_rank_0_is_broadcast",
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
    ),
    "H-10d": (TYPED, "test test_an_unknown_key_anywhere_is_a_finding_at_its_path"),
    "H-10e": (TYPED,),
    "H-10f": ("test test_everything_that_is_wrong_is_said_at_once", "deviation the config is one value, read once"),
    "H-11": ("test test_a_selection_gives_children_before_parents_and_never_the_root",),
    "H-11a": (
        "rule wrap.class-not-found",
        "test test_declared_blocks_go_before_repeated_ones",
        "deviation names are exact, and are resolved for each model anew (G-14, G-60)",
    ),
    "H-11b": ("rule wrap.size-below-one", "deviation a minimum of 0 is an error (G-9)"),
    "H-11c": ("deviation a selection is data that belongs to no model; a plan holds no callables",),
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

ON_ONE_MODULE = "deviation apply takes one model, and the optimizer, scheduler and loaders by name"

FSDP2: dict[str, Answers] = {
    "P2-1": ("step ShardLoader", ON_ONE_MODULE),
    "P2-2": ("test test_a_scheduler_made_before_still_drives_the_optimizer_after",),
    "P2-3": (ON_ONE_MODULE, "rule optimizer.none"),
    "P2-4": ("rule wrap.class-not-found", "test test_one_config_prepares_two_models_of_other_classes"),
    "P2-5": ("step CheckpointModules", "rule blocks.none-selected", "rule blocks.one-unit"),
    "P2-6": (
        "test test_fsdp2_checkpoints_before_it_compiles_before_it_shards_between_release_and_rebind",
        "deviation no setting of dynamo is changed",
    ),
    "P2-7": ("test test_parameters_that_share_an_address_stay_apart",),
    "P2-8": ("step ReleaseOptimizer", "test test_sharding_frees_every_old_parameter_once_the_optimizer_is_released"),
    "P2-9": (NO_REGISTRY,),
    "P2-10": ("step ShardUnits",),
    "P2-11": (NO_REGISTRY, "rule model.already-wrapped"),
    "P2-12": (NO_REGISTRY,),
    "P2-13": ("step RebindOptimizer", "test test_an_optimizer_over_a_meta_model_steps_every_parameter"),
    "P2-14": ("step RebindOptimizer", "rule optimizer.foreign-parameters"),
    "P2-15": (NO_REGISTRY,),
    "M2-1": (
        "rule sharded.differs",
        "test test_a_model_that_arrives_sharded_stays_and_trains_as_by_hand",
        "deviation left as it is where the config says what stands, else refused with what to write",
    ),
    "M2-2": ("deviation units are paths in the plan, resolved once",),
    "M2-3": ("test test_sharding_frees_every_old_parameter_once_the_optimizer_is_released",),
    "M2-4": ("step ShardUnits", "test test_units_compute_in_the_planned_dtype_and_the_root_returns_its_own"),
    "M2-5": ("step BuildMesh", "test test_hsdp_has_a_mesh_of_two_axes_and_shards_over_the_second"),
    "M2-6": (
        "test test_what_is_packed_is_ignored_and_everything_else_sharded",
        "deviation FSDP2 ignores no modules: every parameter that is not packed is sharded (G-10)",
    ),
    "M2-7": (
        "rule units.packed",
        "test test_an_adapter_is_sharded_by_fsdp2_learns_what_ddp_learns_and_the_bytes_stay",
    ),
    "M2-8": ("step StashTensors", "step AllocateTensors", "test test_buffers_that_have_values_keep_them"),
    "M2-9": ("rule wrap.class-not-found", "rule blocks.one-unit"),
    "M2-10": (
        "test test_a_selection_gives_children_before_parents_and_never_the_root",
        "rule wrap.container",
    ),
    "M2-11": ("deviation embedding, final norm and head stay with the root, which is gathered once and kept",),
    "M2-12": ("test test_the_root_alone_holds_everything_when_nothing_is_wrapped",),
    "M2-13": (
        "step ReadTensors",
        "step SendTensors",
        "test test_a_model_that_rank_0_alone_has_trains_as_in_one_process",
        "deviation asked for with SendWeights; with files every rank reads its own bytes, and none broadcasts",
    ),
    "M2-14": (
        "step InitializeTensors",
        "test test_buffers_are_read_whole_computed_or_kept_shared",
        "test test_buffers_of_both_kinds_keep_rank_0_s_values_and_dtypes",
    ),
    "M2-15": ("deviation trained parameters alone are cast (M2-16)",),
    "M2-16": ("step UpcastParameters", "test test_frozen_parameters_are_not_upcast"),
    "M2-17": ("test test_every_unit_is_sharded_on_dim_0_and_ties_hold",),
}

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
        "deviation FSDP2 ignores no modules, so none is sharded against the config",
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
    "G-29": ("test test_units_compute_in_the_planned_dtype_and_the_root_returns_its_own",),
    "G-52": ("test test_a_checkpointed_block_becomes_a_unit_as_its_wrapper_and_keeps_its_names",),
    "G-57": ("test test_parameters_that_share_an_address_stay_apart",),
    "G-62": ("test test_a_file_that_changed_is_an_error_on_every_rank_before_anything_is_sharded",),
    "G-66": (
        "test test_inference_wraps_nothing_under_ddp_and_shards_under_fsdp2",
        "test test_no_parameter_is_ignored_wherever_the_values_come_from",
    ),
    "G-67": (
        "step CheckFiles",
        "test test_a_file_that_changed_is_an_error_on_every_rank_before_anything_is_sharded",
    ),
}
"""Defects of the reference that concern FSDP2, and what shows that prepkit does not have them."""

TENSOR_PARALLEL: dict[str, Answers] = {
    "TP-1": (
        "step ParallelizeModules",
        "rule tensor.no-plan",
        "deviation the engine TensorParallel, or a tensor axis of the mesh under FSDP2, asks for it",
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

ROWS: dict[str, Answers] = {
    **START,
    **BOOKKEEPING,
    **DEVICE_MAP,
    **AUTOCAST,
    **QUANTISED,
    **PLACEMENT,
    **DATA_PARALLEL,
    **COMPILE,
    **HELPERS,
    **FP8_AND_XLA,
    **FSDP1,
    **FSDP2,
    **TENSOR_PARALLEL,
    **DEEPSPEED,
}
