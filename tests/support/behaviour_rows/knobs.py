"""Section 10: the settings that reach those functions; most are told with the row that acts on them."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import (
    FLAG,
    MOVED,
    NO_CONTEXT_PARALLEL,
    REACHED,
    TYPED,
    Answers,
)

FLAGS = "test test_a_flag_is_a_warning_where_the_config_says_otherwise_and_silent_where_it_agrees"

ARGUMENTS: dict[str, Answers] = {
    "K-1": ("row PR-2",),
    "K-2": ("row ST-20", FLAG, FLAGS, REACHED),
    "K-3": ("row ST-50", FLAG, FLAGS, REACHED),
    "K-4": ("rule environment.device", FLAG, FLAGS, REACHED),
    "K-5": ("row W-12",),
    "K-6": ("row DL-16",),
    "K-7": ("row CM-1", REACHED),
    "K-8": ("row PC-1", "rule environment.launcher-flag"),
    "K-9": ("row ST-7", FLAG),
    "K-10": ("row ST-6", FLAG),
    "K-11": ("row ST-40",),
    "K-12": ("row DM-2",),
    "K-13": ("rule fp8.launcher-flag", "test test_a_launcher_flag_is_compared_in_any_case", REACHED),
    "K-14": ("row ST-10", FLAG),
    "K-15": (NO_CONTEXT_PARALLEL,),
    "K-16": (FLAG, FLAGS, "deviation XLA computes in the precision of the config"),
    "K-17": ("rule deepspeed.hpu-lazy", "test test_a_lazy_hpu_offloads_nothing"),
    "K-18": ("row DP-5",),
    "K-19": ("row XL-1", "deviation XLA(forked=True) says it: FORK_LAUNCHED is not read"),
    "K-20": (
        "test test_each_launcher_says_how_many_processes_there_are",
        "test test_mpirun_on_one_node_says_all_that_a_start_needs",
        "deviation OMP_NUM_THREADS is the launcher's: torchrun sets 1, and nothing else is written to the environment",
    ),
}

FSDP: dict[str, Answers] = {
    "K-F1": (
        "deviation FSDP1() and FSDP2() are two engines with fields of their own",
        "test test_an_unknown_kind_anywhere_is_a_finding_at_its_path",
        REACHED,
    ),
    "K-F2": ("row F1-40", "test test_a_strategy_gives_the_mesh_its_axes", REACHED),
    "K-F3": ("rule reshard.not-a-factor", "test test_every_option_reaches_torch", REACHED),
    "K-F4": ("test test_every_option_reaches_torch", "rule fsdp1.offload-on-cpu", REACHED),
    "K-F5": ("test test_what_is_asked_for_reaches_torch", TYPED, REACHED),
    "K-F6": (
        "test test_a_precision_gives_the_dtypes_in_which_flat_parameters_are_computed_reduced_and_buffered",
        TYPED,
        REACHED,
    ),
    "K-F7": ("row H-11a", "rule wrap.size-below-one", REACHED),
    "K-F8": ("rule wrap.class-not-found", "test test_a_class_in_the_wrong_case_gets_the_right_spelling", REACHED),
    "K-F9": ("rule wrap.size-below-one", REACHED),
    "K-F10": ("rule units.ignored-not-found", "row M2-6", REACHED),
    "K-F11": (
        "test test_what_two_ranks_saved_goes_on_on_other_meshes_and_engines",
        "test test_an_export_is_what_from_pretrained_loads",
        "deviation ready.save writes shards and ready.export the whole: nothing is chosen beforehand",
    ),
    "K-F12": ("test test_what_is_asked_for_reaches_torch", REACHED),
    "K-F13": ("row F1-47", REACHED),
    "K-F14": (
        "row F1-4",
        "deviation a config holds no function: InitWeights calls the modules' own, which also fill a model on meta",
    ),
    "K-F15": (
        "rule fsdp1.sync-on-cpu",
        "test test_every_unit_is_told_the_device_of_the_rank_and_whether_rank_0_is_broadcast",
        REACHED,
    ),
    "K-F16": ("test test_what_is_asked_for_reaches_torch", TYPED, REACHED),
    "K-F17": (
        "row F1-8",
        "step CheckpointModules",
        "test test_nothing_is_checkpointed_that_nobody_asked_to_checkpoint",
        REACHED,
    ),
    "K-F18": (
        "test test_inputs_of_offloaded_blocks_leave_the_device_in_forward",
        "test test_what_is_recomputed_kept_or_offloaded_changes_no_loss",
        "test test_inputs_of_recomputed_blocks_go_to_host_memory_as_accelerate_has_it",
        "rule checkpoint.offload-compiled",
        REACHED,
    ),
    "K-F19": ("row M2-13", "step SendTensors", REACHED),
}

DEEPSPEED_PLUGIN: dict[str, Answers] = {
    "K-DS1": ("row DP-2", REACHED),
    "K-DS2": ("row DS-10", REACHED),
    "K-DS3": ("row DS-12", REACHED),
    "K-DS4": ("rule deepspeed.no-stage", "rule deepspeed.stage", REACHED),
    "K-DS5": ("row DS-7", REACHED),
    "K-DS6": ("row DS-26", REACHED),
    "K-DS7": ("row DS-26", REACHED),
    "K-DS8": ("rule deepspeed.offload",),
    "K-DS9": ("rule deepspeed.offload",),
    "K-DS10": ("row DP-40",),
    "K-DS11": (
        "test test_the_switch_for_saving_16_bit_weights_is_read_and_changes_nothing",
        "test test_a_zero_3_run_is_exported_whole_whatever_the_json_says_of_saving_16_bit_weights",
        "deviation an export asks for no key of the JSON",
    ),
    "K-DS12": ("row DS-19", REACHED),
    "K-DS13": ("row DP-12", REACHED),
    "K-DS14": (
        "test test_ms_amp_gets_a_section_of_its_own_and_its_own_initialize",
        "deviation O2 by default with DeepSpeed too, as in K-H7: one class has one default",
        REACHED,
    ),
    "K-DS15": ("row DS-26",),
    "K-DS16": ("rule deepspeed.tensor-parallel",),
}

COMPILE_PLUGIN: dict[str, Answers] = {
    "K-DY1": (
        "row CM-3",
        "test test_every_option_of_compiling_reaches_the_plan",
        "test test_every_option_of_compiling_reaches_torch_and_deepspeed",
        REACHED,
    ),
    "K-DY2": ("rule compile.unknown-mode", "test test_every_option_of_compiling_reaches_torch_and_deepspeed", REACHED),
    "K-DY3": ("test test_every_option_of_compiling_reaches_torch_and_deepspeed", REACHED),
    "K-DY4": ("test test_every_option_of_compiling_reaches_torch_and_deepspeed", "rule compile.dynamic-cut", REACHED),
    "K-DY5": (
        "test test_inductor_compiles_with_the_options_and_they_are_verified",
        "test test_options_and_limits_of_compiling_are_given_to_torch_as_it_takes_them",
        "rule compile.options",
        REACHED,
    ),
    "K-DY6": ("rule compile.switched-off", "deviation what is not to be compiled is not asked for"),
    "K-DY7": ("row CM-4", REACHED),
}

HANDLERS: dict[str, Answers] = {
    "K-H1": ("row DDP-4", "test test_every_option_reaches_the_wrapper", REACHED),
    "K-H2": ("row AMP-2",),
    "K-H3": (
        "test test_the_scaler_has_the_numbers_of_the_step_and_is_taken_back",
        "rule precision.loss-scale",
        REACHED,
    ),
    "K-H4": (
        "rule values.timeout",
        "step StartProcessGroup",
        "test test_a_two_dimensional_mesh_keeps_the_time_out_of_the_plan",
        "deviation 600 s for every backend; a group from another init_method is started before apply, which keeps it",
        REACHED,
    ),
    "K-H5": (
        "test test_only_what_was_asked_for_is_passed_to_older_libraries",
        "test test_block_scaling_gets_no_history_and_may_run_in_evaluation",
        REACHED,
    ),
    "K-H6": ("test test_every_recipe_reaches_the_layer_with_its_options", REACHED),
    "K-H7": ("step InitializeMSAMP", "test test_ms_amp_takes_model_and_optimizer_together", REACHED),
    "K-H8": ("deviation the combined recipe is not offered: each library has its own options",),
    "K-H9": ("row W-30", "row W-31", "row G-18", REACHED),
    "K-H10": ("row DL-10", "row DL-26", MOVED, REACHED),
}

MESH_FIELDS: dict[str, Answers] = {
    "K-PC1": ("row PC-1", "row PC-2", REACHED),
    "K-PC2": ("row PC-1", "row PC-2", REACHED),
    "K-PC3": ("row PC-1", "row PC-2", REACHED),
    "K-PC4": (NO_CONTEXT_PARALLEL,),
    "K-PC5": (NO_CONTEXT_PARALLEL,),
    "K-PC6": (NO_CONTEXT_PARALLEL,),
    "K-PC7": (NO_CONTEXT_PARALLEL,),
    "K-PC8": (NO_CONTEXT_PARALLEL,),
    "K-PC9": (NO_CONTEXT_PARALLEL,),
    "K-PC10": (NO_CONTEXT_PARALLEL,),
    "K-PC11": (NO_CONTEXT_PARALLEL,),
    "K-PC12": ("deviation the flag that only gives a warning is not offered",),
}

KNOBS: dict[str, Answers] = {
    **ARGUMENTS,
    **FSDP,
    **DEEPSPEED_PLUGIN,
    **COMPILE_PLUGIN,
    **HANDLERS,
    **MESH_FIELDS,
}
