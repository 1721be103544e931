"""Section 7: optimizer, scheduler, the engine of DeepSpeed, accumulation."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import LOOP, NO_SINGLETON, NO_WRAPPER, REACHED, Answers

OPTIMIZER: dict[str, Answers] = {
    "W-1": (
        NO_WRAPPER,
        "test test_without_a_release_every_slot_and_all_state_stay_the_same_objects",
        "deviation LOMO, which steps inside backward, is not offered",
    ),
    "W-2": (NO_WRAPPER, "test test_a_scheduler_made_before_still_drives_the_optimizer_after"),
    "W-3": ("step RebindOptimizer", "test test_counters_of_a_capturable_optimizer_go_to_the_device_and_others_stay"),
    "W-4": ("test test_gradients_are_cleared_after_a_step_and_kept_before_it",),
    "W-5": (
        LOOP,
        "test test_a_window_that_overflows_steps_neither_optimizer_nor_scheduler_and_halves_the_scale",
        "test test_gradients_are_averaged_once_before_each_step",
        "test test_a_plan_for_the_processes_of_torch_xla_is_applied_and_trains",
        "test test_lbfgs_steps_with_a_closure_and_says_so_without_one",
    ),
    "W-6": ("test test_a_window_that_overflows_steps_neither_optimizer_nor_scheduler_and_halves_the_scale",),
    "W-7": (
        NO_WRAPPER,
        "test test_an_optimizer_with_a_mode_of_its_own_follows_and_its_weights_are_not_saved_meanwhile",
        "test test_a_mode_of_an_optimizer_s_own_reaches_the_model_under_every_engine",
    ),
    "W-8": ("step MoveToXLA", "test test_the_optimizer_follows_its_parameters_by_name_with_its_state"),
    "W-9": (NO_WRAPPER,),
}

SCHEDULER: dict[str, Answers] = {
    "W-10": (NO_WRAPPER, "test test_the_scheduler_ticks_as_often_as_the_plan_says"),
    "W-11": ("rule scheduler.other-optimizer", "rule scheduler.without-optimizer"),
    "W-12": (
        "rule values.scheduler-ticks",
        "test test_the_scheduler_ticks_as_often_as_the_plan_says",
        "deviation the scheduler ticks after optimizer steps alone; under the face of accelerate where the script says",
        REACHED,
    ),
    "W-13": (
        "test test_gradients_are_cleared_after_a_step_and_kept_before_it",
        "test test_two_processes_equal_the_plain_loop",
    ),
    "W-14": ("test test_a_window_that_overflows_steps_neither_optimizer_nor_scheduler_and_halves_the_scale",),
    "W-15": ("row W-16",),
    "W-16": (
        "test test_the_scheduler_ticks_as_often_as_the_plan_says",
        "test test_a_scheduler_is_not_stepped_past_its_end",
        "test test_a_schedule_over_the_processes_stops_where_accelerate_s_does",
        "rule loop.scheduler-at-end",
        "deviation scheduler_ticks per optimizer step, 1 by default, however many processes run",
        REACHED,
    ),
    "W-17": (
        "deviation no warning of torch is silenced",
        "test test_saving_and_resuming_change_no_warning_filter_and_warn_of_nothing",
    ),
}

ENGINE: dict[str, Answers] = {
    "W-20": (
        "test test_every_stage_learns_what_torch_learns_with_accumulation_clipping_and_a_scheduler",
        "test test_a_window_whose_step_the_engine_skips_is_told_as_skipped",
    ),
    "W-22": (
        "rule deepspeed.scheduler-ticks",
        "test test_a_function_makes_the_scheduler_which_deepspeed_then_steps",
        "test test_optimizer_and_scheduler_of_the_config_are_made_and_stepped_by_deepspeed",
    ),
    "W-23": (
        "test test_a_window_that_ends_early_loses_no_micro_batch",
        "test test_every_stage_learns_what_torch_learns_with_accumulation_clipping_and_a_scheduler",
    ),
    "W-24": (
        "test test_every_stage_learns_what_torch_learns_with_accumulation_clipping_and_a_scheduler",
        "test test_each_advice_across_ranks_works_as_it_is_written",
    ),
    "W-25": (LOOP, "test test_every_stage_learns_what_torch_learns_with_accumulation_clipping_and_a_scheduler"),
}

ACCUMULATION: dict[str, Answers] = {
    "W-30": (
        "test test_a_window_that_is_ended_early_is_averaged_and_stepped",
        "test test_the_last_batch_of_a_pass_ends_the_window",
        REACHED,
    ),
    "W-31": (
        "test test_gradients_are_averaged_at_the_end_of_a_window_only",
        "test test_averaging_in_every_micro_batch_gives_the_same_and_keeps_no_whole_gradients",
        REACHED,
    ),
    "W-32": (
        "test test_gradients_are_averaged_at_the_end_of_a_window_only",
        "test test_a_window_that_no_sync_left_unaveraged_is_not_stepped",
        "test test_each_advice_across_ranks_works_as_it_is_written",
    ),
    "W-33": (NO_SINGLETON, "test test_each_counts_its_own_micro_batches_whatever_a_variable_says"),
}

WRAPPERS: dict[str, Answers] = {**OPTIMIZER, **SCHEDULER, **ENGINE, **ACCUMULATION}
