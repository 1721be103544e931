"""Section 11: what has changed since the seeds; each row is answered where the behaviour stands."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import FLAG, NO_CONTEXT_PARALLEL, REACHED, Answers

SINCE: dict[str, Answers] = {
    "SS-1": ("row BK-2",),
    "SS-2": (
        "rule model.sharded-parameters",
        "test test_what_is_placed_by_whom",
        "deviation the engine says who places: FSDP2 places DTensors, DDP and FSDP1 refuse them, and Single moves them",
    ),
    "SS-3": ("row K-13",),
    "SS-4": ("rule quantised.other-device", "row Q-6"),
    "SS-5": (
        "rule mesh.ddp-alone",
        "row DDP-1",
        "deviation DDP() in one process is DDP in one process, with a warning that names Single()",
    ),
    "SS-6": ("row TP-1", "row H-3"),
    "SS-7": ("rule units.ignored-not-found", "row F1-6"),
    "SS-8": ("row PR-12", "row PR-13"),
    "SS-9": ("row P2-6",),
    "SS-10": ("test test_released_slots_hold_distinct_empty_parameters_and_no_state",),
    "SS-11": ("test test_shards_of_cut_layers_on_four_processes_learn_what_one_process_learns",),
    "SS-12": ("rule ties.split", "rule optimizer.foreign-parameters"),
    "SS-13": ("test test_two_axes_replicate_and_shard", "row M2-5"),
    "SS-14": ("row M2-6",),
    "SS-15": ("test test_frozen_parameters_are_not_upcast", "row M2-15"),
    "SS-16": ("row M2-11",),
    "SS-17": ("rule weights.not-filled", "row M2-13"),
    "SS-18": ("row H-19",),
    "SS-19": ("row H-16",),
    "SS-20": ("test test_declared_blocks_go_before_repeated_ones", "row H-12a"),
    "SS-21": (NO_CONTEXT_PARALLEL,),
    "SS-22": ("test test_a_warm_up_has_at_least_one_step",),
    "SS-23": (
        "test test_precision_has_one_owner_in_every_row_of_the_table",
        "deviation gradients are reduced in config.precision.reduce_dtype, float32 by default, also under ROCm",
    ),
    "SS-24": ("row DP-12",),
    "SS-25": ("row ST-48",),
    "SS-26": (NO_CONTEXT_PARALLEL,),
    "SS-27": ("test test_weights_are_gathered_in_float8_where_they_can_be", "row X-4"),
    "SS-28": (
        "test test_norms_need_a_bias_to_be_taken",
        "rule fp8.unsupported-blocks",
        "deviation a LayerNorm without a bias stays torch's: TransformerEngine's own has one",
    ),
    "SS-29": ("rule fp8.msamp-deprecated",),
    "SS-30": ("row K-F6", "row K-F19"),
    "SS-31": ("test test_every_accelerator_kind_has_its_collectives_and_its_local_device", "row ST-4"),
    "SS-32": ("rule precision.fp16-unsupported", "rule precision.bf16-unsupported"),
    "SS-33": (
        "test test_the_scaler_is_that_of_the_device_and_sharded_under_fsdp1_alone",
        "test test_every_accelerator_gets_torch_s_scaler_for_its_type",
        REACHED,
    ),
    "SS-34": (FLAG, "test test_what_the_launcher_writes_when_nobody_asked_says_nothing"),
    "SS-35": ("row CM-4", "row G-46"),
    "SS-36": ("row DL-7", "row DL-21n"),
    "SS-37": ("row W-32",),
    "SS-38": ("test test_whole_and_sharded_gradients_have_one_norm_together",),
    "SS-39": ("test test_rehearsing_adds_nothing_to_what_a_module_says_of_its_buffers",),
}
