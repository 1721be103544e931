"""Errors that can be decided before the first step, frozen before the audit was written.

Each is made for real with the library that makes it; ``python -m tests.tools.audit`` prints which rule finds it.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from tests.audit import by_gradients, by_habit, by_hand, by_libraries, by_numbers, by_sharding
from tests.audit.case import Case


@frozen
class PlantedError:
    """One error: its program, what is wrong in it, and the rule that has to say so."""

    make: Callable[[int, int], Case]
    """The program up to its first step, on this rank of so many."""
    rule: str
    library: str
    ranks: int
    what: str

    @property
    def id(self) -> str:
        return self.make.__name__


ERRORS: tuple[PlantedError, ...] = (
    # --- whose parameters the optimizer holds ---
    PlantedError(by_hand.optimizer_of_the_copy, "run.orphans", "torch", 1, "the optimizer steps a model's original"),
    PlantedError(by_hand.head_replaced, "run.orphans", "torch", 1, "a layer was replaced under the optimizer"),
    PlantedError(by_sharding.fsdp1_after_the_optimizer, "run.orphans", "torch", 2, "flat parameters came later"),
    PlantedError(by_sharding.fsdp2_after_the_optimizer, "run.orphans", "torch", 2, "shards came later"),
    PlantedError(
        by_libraries.trainer_given_another_models_optimizer,
        "run.orphans",
        "transformers",
        1,
        "another model's optimizer",
    ),
    PlantedError(by_hand.unfrozen_later, "run.missed", "torch", 1, "unfrozen once the optimizer was made"),
    PlantedError(by_hand.all_frozen, "run.nothing-trains", "torch", 1, "everything is frozen"),
    PlantedError(
        by_libraries.adapter_loaded_for_inference, "run.nothing-trains", "peft", 1, "an adapter made for inference"
    ),
    PlantedError(by_hand.trained_state_left_behind, "run.state-lost", "torch", 1, "state under the old parameters"),
    PlantedError(by_hand.two_optimizers_one_parameter, "run.stepped-twice", "torch", 1, "two step one parameter"),
    PlantedError(by_hand.ticked_with_each_micro_batch, "run.ticked-early", "torch", 1, "ticked by the micro-batch"),
    PlantedError(by_hand.rate_of_zero, "run.rate-zero", "torch", 1, "a learning rate of zero that nothing raises"),
    # --- the model itself ---
    PlantedError(by_hand.still_in_eval, "run.eval-mode", "torch", 1, "evaluation mode in training"),
    PlantedError(by_hand.part_still_in_eval, "run.part-in-eval", "torch", 1, "a part of it in evaluation mode"),
    PlantedError(by_hand.float16_weights, "run.no-master-weights", "torch", 1, "float16 weights without masters"),
    PlantedError(by_hand.bfloat16_weights, "run.no-master-weights", "torch", 1, "bfloat16 weights without masters"),
    PlantedError(by_hand.one_block_in_another_dtype, "run.unlike-dtypes", "torch", 1, "one block of another dtype"),
    PlantedError(by_hand.buffer_never_filled, "run.nan", "torch", 1, "a buffer of NaN"),
    PlantedError(by_hand.half_on_meta, "run.left-on-meta", "torch", 1, "a layer without data among others"),
    PlantedError(by_libraries.tie_that_broke, "run.tie-broken", "transformers", 1, "the config says tied"),
    # --- wrappers ---
    PlantedError(by_hand.ddp_in_ddp, "run.wrapped-twice", "torch", 2, "DDP in DDP"),
    PlantedError(by_libraries.prepared_by_two_accelerators, "run.wrapped-twice", "accelerate", 2, "DDP in DDP"),
    PlantedError(by_hand.checkpointed_twice, "run.checkpointed-twice", "torch", 1, "recomputed twice"),
    PlantedError(
        by_hand.checkpointed_inside_checkpointed, "run.checkpointed-twice", "torch", 1, "recomputed twice, inside"
    ),
    PlantedError(by_hand.checkpointed_as_a_whole, "run.checkpointed-whole", "torch", 1, "nothing is saved"),
    PlantedError(by_sharding.fsdp1_under_checkpoints, "run.checkpoint-outside", "torch", 2, "inside out"),
    PlantedError(
        by_libraries.lora_under_reentrant_checkpoints,
        "run.reentrant-frozen",
        "peft",
        1,
        "no gradient reaches adapters",
    ),
    PlantedError(by_hand.compile_switched_off, "run.compile-off", "torch", 1, "compiled code that never runs"),
    PlantedError(by_hand.forward_of_the_original, "run.forward-elsewhere", "torch", 1, "a copy runs its original"),
    PlantedError(
        by_hand.forward_bound_to_the_original, "run.forward-elsewhere", "torch", 1, "a method of another object"
    ),
    PlantedError(by_sharding.fsdp2_in_one_unit, "run.one-unit", "torch", 2, "one unit holds everything"),
    PlantedError(by_sharding.fsdp1_in_one_unit, "run.one-unit", "torch", 2, "one unit holds everything"),
    # --- who averages ---
    PlantedError(by_hand.no_wrapper, "run.not-averaged", "torch", 2, "no wrapper on two ranks"),
    PlantedError(by_hand.head_beside_ddp, "run.not-averaged", "torch", 2, "a layer outside DDP"),
    PlantedError(by_hand.unfrozen_after_ddp, "run.unfrozen", "torch", 2, "unfrozen after DDP"),
    PlantedError(by_hand.head_replaced_after_ddp, "run.not-averaged", "torch", 2, "replaced after DDP"),
    PlantedError(by_sharding.fsdp2_leaves_the_head, "run.not-averaged", "torch", 2, "ignored by fully_shard"),
    PlantedError(by_libraries.model_not_prepared, "run.not-averaged", "accelerate", 2, "model not prepared"),
    PlantedError(by_hand.frozen_after_ddp, "run.ddp-frozen", "torch", 2, "frozen things in DDP buckets"),
    PlantedError(by_sharding.fsdp2_over_one_rank, "run.averaged-over-part", "torch", 2, "a mesh of one rank"),
    PlantedError(by_sharding.fsdp1_hybrid_of_n_by_1, "run.averaged-over-part", "torch", 2, "HYBRID_SHARD on (n, 1)"),
    # --- ranks that part ---
    PlantedError(by_hand.frozen_on_one_rank, "run.ranks-models", "torch", 2, "ranks train other parameters"),
    PlantedError(by_hand.rate_by_rank, "run.ranks-optimizers", "torch", 2, "a rate for each rank"),
    PlantedError(by_hand.weights_read_on_rank_0_after_ddp, "run.ranks-values", "torch", 2, "one rank read weights"),
    PlantedError(by_hand.one_bit_of_one_rank, "run.ranks-values", "torch", 2, "one bit of one element"),
    PlantedError(by_sharding.replicated_part_of_tensor_ranks_differs, "run.ranks-values", "torch", 2, "a head by rank"),
    PlantedError(by_hand.buffer_of_one_rank, "run.ranks-values", "torch", 2, "a buffer by rank"),
    PlantedError(by_sharding.buffer_of_one_rank_under_fsdp2, "run.ranks-values", "torch", 2, "a buffer by rank"),
    PlantedError(by_hand.dropout_alike, "run.dropout-alike", "torch", 2, "every rank drops the same elements"),
    PlantedError(by_sharding.tensor_ranks_with_other_dropout, "run.dropout-unlike", "torch", 2, "tensor ranks part"),
    # --- loaders ---
    PlantedError(by_hand.same_samples, "run.same-samples", "torch", 2, "no distributed sampler"),
    PlantedError(by_hand.shuffled_alike, "run.same-samples", "torch", 2, "shuffled, but not divided"),
    PlantedError(by_hand.sampler_of_rank_0, "run.same-samples", "torch", 2, "rank 0's sampler everywhere"),
    PlantedError(by_hand.sampler_of_one_process, "run.same-samples", "torch", 2, "a sampler for one process"),
    PlantedError(by_libraries.loader_not_prepared, "run.same-samples", "accelerate", 2, "loader not prepared"),
    PlantedError(by_sharding.tensor_ranks_with_other_samples, "run.tensor-samples", "torch", 2, "tensor ranks part"),
    # --- the scheduler ---
    PlantedError(by_hand.scheduler_of_another_optimizer, "run.scheduler-elsewhere", "torch", 1, "of another optimizer"),
    PlantedError(
        by_libraries.scheduler_of_an_optimizer_never_prepared, "run.scheduler-elsewhere", "accelerate", 2, "likewise"
    ),
    PlantedError(by_hand.schedule_run_out, "run.scheduler-early", "torch", 1, "ends within the first pass"),
    PlantedError(by_libraries.scheduler_for_prepared_batches, "run.scheduler-early", "accelerate", 2, "ticks by rank"),
    # --- numbers ---
    PlantedError(by_numbers.rate_that_is_no_number, "run.rate-not-finite", "torch", 1, "a learning rate of NaN"),
    PlantedError(by_numbers.weight_that_overflowed, "run.infinite", "torch", 1, "an infinite weight"),
    PlantedError(by_numbers.running_variance_below_zero, "run.negative-variance", "torch", 1, "a variance of -1"),
    PlantedError(by_numbers.adapters_of_two_zeros, "run.never-moves", "peft", 1, "both matrices of an adapter are 0"),
    PlantedError(by_numbers.weights_of_zero, "run.never-moves", "torch", 1, "every weight is 0"),
    PlantedError(by_numbers.dropout_of_everything, "run.drops-all", "torch", 1, "dropout of 1"),
    PlantedError(by_numbers.state_of_other_groups, "run.state-misfit", "torch", 1, "moments of another shape"),
    PlantedError(by_numbers.state_of_a_run_that_diverged, "run.state-not-finite", "torch", 1, "moments of NaN"),
    PlantedError(by_numbers.pass_without_a_batch, "run.no-batches", "torch", 1, "drop_last leaves no batch"),
    PlantedError(by_numbers.mode_by_rank, "run.ranks-modes", "torch", 2, "one rank evaluates"),
    PlantedError(by_numbers.state_read_on_rank_0, "run.ranks-state", "torch", 2, "state on rank 0 alone"),
    PlantedError(by_numbers.state_by_rank, "run.ranks-state", "torch", 2, "a state for each rank"),
    PlantedError(by_numbers.betas_by_rank, "run.ranks-optimizers", "torch", 2, "betas for each rank"),
    PlantedError(by_numbers.scheduler_ticked_on_one_rank, "run.ranks-schedulers", "torch", 2, "one rank ticks"),
    PlantedError(by_numbers.order_by_rank, "run.ranks-orders", "torch", 2, "a sampler's seed for each rank"),
    PlantedError(by_numbers.parts_drawn_by_rank, "run.shares-overlap", "torch", 2, "a permutation for each rank"),
    PlantedError(by_numbers.rows_drawn_by_rank, "run.shares-overlap", "torch", 2, "rows of such"),
    PlantedError(by_numbers.parts_of_unlike_length, "run.ranks-batches", "torch", 2, "2 batches beside 6"),
    PlantedError(by_numbers.batches_of_unlike_size, "run.ranks-batches", "torch", 2, "batches of 2 beside 4"),
    PlantedError(by_numbers.no_sync_that_never_ended, "run.averaging-off", "torch", 2, "no_sync() never left"),
    PlantedError(by_numbers.sync_left_off_under_fsdp2, "run.averaging-off", "torch", 2, "no gradient sync in FSDP2"),
    # --- gradients at the first step ---
    PlantedError(by_gradients.gradients_thrown_away, "run.steps-nothing", "torch", 1, "zero_grad() before step()"),
    PlantedError(by_gradients.gradients_clipped_to_nothing, "run.steps-nothing", "torch", 1, "clipped to 0"),
    PlantedError(by_gradients.part_cut_off_from_the_loss, "run.without-gradient", "torch", 1, "detached on the way"),
    PlantedError(by_gradients.root_of_zero, "run.gradients-not-finite", "torch", 1, "the square root of 0"),
    PlantedError(by_gradients.forward_around_ddp, "run.gradients-part", "torch", 2, "model.module(x) under DDP"),
    PlantedError(by_gradients.part_that_ddp_waits_for, "run.gradients-waited-for", "torch", 2, "unused under DDP"),
    PlantedError(
        by_gradients.averaged_where_there_is_one, "run.gradients-on-some-ranks", "torch", 2, "averaged, kept by one"
    ),
    PlantedError(by_gradients.one_left_out_by_hand, "run.not-averaged", "torch", 2, "all but one are all-reduced"),
    PlantedError(by_gradients.sampler_of_another_world, "run.unread-samples", "torch", 2, "4 parts for 2 ranks"),
    # --- two owners, DeepSpeed ---
    PlantedError(by_libraries.two_schedulers, "run.two-schedulers", "deepspeed", 2, "one in the JSON, one by hand"),
    PlantedError(by_libraries.loader_of_another_batch_size, "run.micro-batch", "deepspeed", 2, "JSON against loader"),
    PlantedError(by_libraries.stepped_past_the_engine, "run.past-engine", "deepspeed", 2, "not the engine's optimizer"),
    PlantedError(by_libraries.two_who_accumulate, "run.two-accumulate", "accelerate, deepspeed", 2, "4 against 1"),
    # --- a second look ---
    PlantedError(by_habit.parameter_misspelt, "run.unread-setting", "torch", 1, "p.require_grad = False"),
    PlantedError(
        by_habit.module_without_its_underscore, "run.unread-setting", "torch", 1, "module.requires_grad = False"
    ),
    PlantedError(by_habit.group_misspelt, "run.unread-setting", "torch", 1, "weigth_decay in a group"),
    PlantedError(by_habit.rate_on_the_optimizer, "run.unread-setting", "torch", 1, "optimizer.lr = 1e-5"),
    PlantedError(by_habit.config_misspelt, "run.unread-setting", "transformers", 1, "config.attention_dropuot"),
    PlantedError(by_habit.epoch_misspelt, "run.unread-setting", "torch", 1, "sampler.epochs = 3"),
    PlantedError(by_habit.layers_in_a_list, "run.hidden-module", "torch", 1, "layers in a plain list"),
    PlantedError(by_habit.heads_in_a_dict, "run.hidden-module", "torch", 1, "heads in a dict of tuples"),
    PlantedError(by_habit.weights_in_a_tuple, "run.hidden-module", "torch", 1, "parameters in a tuple"),
    PlantedError(by_habit.gradients_off, "run.gradients-off", "torch", 1, "gradients switched off"),
    PlantedError(by_habit.launched_without_a_group, "run.no-group", "torch", 1, "torchrun without a group"),
    PlantedError(by_habit.samples_in_one_order, "run.in-order", "torch", 1, "shuffle=False in training"),
    PlantedError(by_habit.teacher_that_drops, "run.frozen-drops", "torch", 1, "a frozen teacher with dropout"),
    PlantedError(by_habit.norms_of_a_frozen_part, "run.frozen-norms", "torch", 1, "batch norms of a frozen part"),
    PlantedError(by_habit.norms_of_the_first_of_equal_blocks, "run.frozen-norms", "torch", 1, "a block like others"),
    PlantedError(by_habit.teacher_that_drops_and_is_held, "run.frozen-drops", "torch", 1, "a teacher that is held"),
    PlantedError(
        by_habit.checkpoints_that_forget, "run.checkpoint-forgets", "torch", 1, "preserve_rng_state=False over dropout"
    ),
    PlantedError(
        by_habit.norms_under_checkpoints, "run.checkpoint-norms", "torch", 1, "a batch norm under a checkpoint"
    ),
    PlantedError(by_habit.softmax_before_cross_entropy, "run.softmax-twice", "torch", 1, "softmax under cross-entropy"),
    PlantedError(by_habit.eval_of_a_number_in_the_config, "run.eval-mode", "torch", 1, "dropout as a number"),
    PlantedError(
        by_habit.ticked_before_the_first_step, "run.ticked-early", "torch", 1, "scheduler before the first step"
    ),
    PlantedError(by_habit.labels_shifted_twice, "run.samples-odd", "transformers", 1, "labels shifted twice"),
    PlantedError(by_habit.pads_without_a_mask, "run.samples-odd", "transformers", 1, "pads without a mask"),
    PlantedError(by_habit.adapters_merged, "run.adapters-off", "peft", 1, "adapters merged"),
    PlantedError(by_habit.adapters_disabled, "run.adapters-off", "peft", 1, "adapters disabled"),
    PlantedError(by_habit.adapters_scaled_by_zero, "run.adapters-zero", "peft", 1, "adapters scaled by 0"),
    PlantedError(by_habit.base_unfrozen, "run.adapters-base", "peft", 1, "the base trains"),
    PlantedError(by_habit.head_beside_a_model_frozen, "run.head-frozen", "peft", 1, "a head of its own is frozen"),
    PlantedError(by_habit.new_head_frozen, "run.head-frozen", "peft", 1, "a new head is frozen"),
    PlantedError(by_habit.replicas_that_begin_unlike, "run.ranks-values", "torch", 2, "HSDP's replicas differ"),
    PlantedError(by_habit.ddp_inside_ddp, "run.wrapped-twice", "torch", 2, "DDP of a part inside DDP"),
    PlantedError(by_habit.sampler_over_parts, "run.divided-twice", "torch", 2, "random_split by rank under a sampler"),
    PlantedError(
        by_habit.sampler_over_nodes, "run.divided-twice", "datasets", 2, "split_dataset_by_node under a sampler"
    ),
    *(
        PlantedError(made, "run.divided-twice", "datasets", 2, "split_dataset_by_node under accelerate")
        for made in (by_habit.nodes_under_a_dispatcher, by_habit.nodes_under_accelerate)
    ),
    *(
        PlantedError(made, "run.divided-twice", "accelerate", 2, "a stream that divides itself under accelerate")
        for made in (
            *(by_habit.stream_by_its_rank_under_accelerate, by_habit.stream_by_torch_under_accelerate),
            by_habit.stream_by_variables_under_accelerate,
            *(by_habit.stream_by_its_state_under_accelerate, by_habit.stream_by_its_rank_under_a_dispatcher),
        )
    ),
    PlantedError(by_habit.sampler_under_accelerate, "run.divided-twice", "accelerate", 2, "a sampler under accelerate"),
    PlantedError(by_habit.hook_that_averages_nothing, "run.gradients-part", "torch", 2, "a hook that averages nothing"),
    PlantedError(
        by_habit.raw_optimizer_under_accumulate, "run.raw-optimizer", "accelerate", 2, "raw optimizer in accumulate()"
    ),
    PlantedError(by_habit.accumulation_never_used, "run.unused-window", "accelerate", 2, "accumulate() never entered"),
    PlantedError(by_habit.buffers_of_frozen_norms, "run.ranks-values", "torch", 2, "buffers by rank, not broadcast"),
    PlantedError(by_habit.own_sampler_of_everything, "run.same-samples", "torch", 2, "an own sampler without ranks"),
    PlantedError(by_habit.with_replacement_alike, "run.same-samples", "torch", 2, "with replacement, one seed"),
    PlantedError(by_habit.stream_that_nobody_divides, "run.same-samples", "torch", 2, "a stream without ranks"),
    PlantedError(by_habit.batches_of_rank_0, "run.same-samples", "torch", 2, "own batches without ranks"),
)

NOT_MADE: tuple[tuple[str, str], ...] = (
    ("run.backend", "GPU tensors on gloo, or offloaded ones on nccl alone: needs a GPU; its rule is held on facts"),
    ("Fabric", "tests/audit/test_reconstruction.py and tests/training/test_fabric.py make them"),
)
"""What no program here makes, and why."""
