"""Section 8: data loaders."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import DIVIDED, MOVED, NO_REGISTRY, REACHED, Answers

LOADERS: dict[str, Answers] = {
    "DL-1": (NO_REGISTRY, "rule loaders.already-distributed"),
    "DL-2": (MOVED, "step WrapLoader", REACHED),
    "DL-3": (
        "step ShardLoader",
        "test test_the_mesh_has_the_tensor_axis_last_and_data_is_divided_over_the_others",
    ),
    "DL-4": ("deviation every rank reads its own samples unless dispatch=True is written", DIVIDED, REACHED),
    "DL-5": ("deviation what rank 0 sends may stay on the host: to_device is another field than dispatch",),
    "DL-6": (
        "test test_tensor_ranks_of_deepspeed_read_the_same_samples",
        "test test_ranks_that_hold_one_model_together_count_once",
    ),
    "DL-7": ("step ShardLoader", "test test_tensor_ranks_read_the_same_samples_and_shards_their_own"),
    "DL-8": ("rule loaders.split-batches", REACHED),
    "DL-9": ("rule loaders.split-batches", REACHED),
    "DL-10": (
        "test test_the_order_follows_seed_and_epoch_and_is_that_of_one_process",
        "test test_loaders_are_sharded_unless_they_are_kept",
        "test test_a_pass_that_was_left_early_is_not_taken_up_by_the_next_loop",
        "test test_ranks_read_and_draw_what_they_do_under_accelerate",
        REACHED,
    ),
    "DL-11": ("rule xla.loaders", "deviation under XLA loaders stay as they are given, their generators too"),
    "DL-12": (
        "deviation one process draws by seed and epoch too, so that the engine does not change the order",
        "test test_the_order_follows_seed_and_epoch_and_is_that_of_one_process",
        "test test_one_process_reads_and_draws_as_torch_alone_that_reads_a_batch_ahead",
    ),
    "DL-13": ("rule loaders.already-distributed", DIVIDED, "test test_a_loader_is_divided_as_it_draws"),
    "DL-14": (DIVIDED, "test test_a_stream_that_draws_at_random_is_divided_as_one"),
    "DL-15": (
        "test test_ranks_read_every_sample_once_whatever_generator_draws_the_order",
        "rule run.orders-apart",
        "rule run.order-lost",
        "test test_an_own_sampler_draws_alike_on_all_ranks_and_anew_in_every_epoch",
        "test test_everything_else_is_kept_and_the_given_loader_is_untouched",
        "test test_ranks_read_and_draw_what_they_do_under_accelerate",
    ),
    "DL-16": (
        "deviation no random state travels: what is drawn follows from seed and epoch; in the face the state of rank 0",
        "test test_ranks_read_and_draw_what_they_do_under_accelerate",
        "test test_an_own_sampler_draws_alike_on_all_ranks_and_anew_in_every_epoch",
    ),
    "DL-17": (
        "rule loaders.out-of-order",
        "test test_everything_else_is_kept_and_the_given_loader_is_untouched",
        "deviation batches come in order also from a loader with in_order=False, with a warning",
    ),
    "DL-18": ("rule xla.loaders", "rule loaders.own-iteration", DIVIDED),
    "DL-19": (
        "deviation a wrapper that says it is a DataLoader is a trap; its source.loader is one",
        "test test_everything_else_is_kept_and_the_given_loader_is_untouched",
    ),
    "DL-21": (
        "deviation a last round is shared out in equal parts, so that less than a sample per rank is repeated",
        "test test_every_sample_counts_once_and_in_order_but_for_what_the_tail_drops",
        "test test_all_ranks_read_as_many_batches_and_know_the_last",
        "test test_a_last_round_is_filled_up_as_accelerate_does",
        REACHED,
    ),
    "DL-21s": ("test test_a_batch_is_split_over_the_ranks_where_that_is_asked_for", DIVIDED, REACHED),
    "DL-21n": ("test test_whatever_a_loader_draws_by_is_split",),
    "DL-22": ("test test_whatever_a_loader_draws_by_is_split", "row DL-21"),
    "DL-23": (MOVED, "test test_the_last_batch_of_a_pass_ends_the_window", REACHED),
    "DL-24": (DIVIDED, "test test_ranks_that_wait_for_data_of_rank_0_hear_why_there_are_none", REACHED),
    "DL-25": (
        "test test_tensor_ranks_are_sent_the_same_batches",
        "deviation rank 0 may send over any mesh: ranks that read the same are sent the same",
        DIVIDED,
        REACHED,
    ),
    "DL-26": (
        "test test_the_micro_batch_is_that_of_the_loader",
        "test test_preparing_a_loader_draws_nothing",
        "rule loaders.split-batches",
    ),
    "DL-27": (
        "test test_one_loop_reads_moves_counts_and_gathers_alike_under_every_engine",
        "test test_metrics_are_gathered_inside_a_loop_and_by_sample",
        "test test_what_is_gathered_in_an_inner_loop_is_of_its_batches",
        "test test_every_kind_of_loader_is_divided_so_that_each_sample_counts_once",
        REACHED,
    ),
    "DL-28": (
        "test test_data_sets_and_streams_are_told_the_epoch_of_each_pass",
        "test test_a_new_epoch_reaches_the_sharded_loaders_and_passes_the_others_by",
        "test test_a_pass_that_was_left_early_is_not_taken_up_by_the_next_loop",
    ),
}
