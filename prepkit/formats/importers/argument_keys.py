"""Keys of transformers' ``TrainingArguments``: those that it has, and those that it had, with what is written today.

Read from the fields of ``training_args.py`` of the releases 4.36 to 5.23; ``tests/formats/importers`` compares them
with the installed one.
"""

from __future__ import annotations

from attrs import frozen

_NOW = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval data_seed
dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers
ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed disable_tqdm do_eval
do_predict do_train enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start
eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config full_determinism
gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push
hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip include_for_metrics
include_num_input_tokens_seen label_names label_smoothing_factor learning_rate length_column_name
liger_kernel_config load_best_model_at_end local_rank log_level log_level_replica log_on_each_node
logging_first_step logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type
max_grad_norm max_steps metric_for_best_model neftune_noise_alpha num_train_epochs optim optim_args
optim_target_modules output_dir parallelism_config per_device_eval_batch_size per_device_train_batch_size
prediction_loss_only project push_to_hub remove_unused_columns report_to restore_callback_states_from_checkpoint
resume_from_checkpoint run_name save_on_each_node save_only_model save_steps save_strategy save_total_limit seed
skip_memory_metrics tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy use_cache use_cpu
use_liger_kernel warmup_steps weight_decay
"""
NOW = frozenset(_NOW.split())
"""Fields of ``TrainingArguments`` of transformers 5.23."""


@frozen
class Gone:
    """A key that later releases refuse."""

    until: str
    """The first release that has it no longer."""
    instead: str = ""
    """What is written in its place; empty: nothing, as it does nothing any more, or is done always."""


GONE: dict[str, Gone] = {
    "adafactor": Gone("5.0", "optim: adafactor"),
    "dispatch_batches": Gone("4.51", "accelerator_config: {dispatch_batches: ...}"),
    "evaluation_strategy": Gone("4.51", "eval_strategy, which 4.41 and later read"),
    "fp16_backend": Gone("5.0"),
    "fp16_opt_level": Gone("5.0"),
    "fsdp_min_num_params": Gone("5.0", "fsdp_config: {min_num_params: ...}"),
    "fsdp_transformer_layer_cls_to_wrap": Gone("5.0", "fsdp_config: {transformer_layer_cls_to_wrap: ...}"),
    "group_by_length": Gone("5.2", "train_sampling_strategy: group_by_length"),
    "half_precision_backend": Gone("5.0"),
    "include_inputs_for_metrics": Gone("5.0", "include_for_metrics: [inputs]"),
    "include_tokens_per_second": Gone("5.0", "include_num_input_tokens_seen: true"),
    "jit_mode_eval": Gone("5.0"),
    "logging_dir": Gone("5.15", "the folder into the variable TENSORBOARD_LOGGING_DIR"),
    "mp_parameters": Gone("5.0"),
    "no_cuda": Gone("5.0", "use_cpu"),
    "overwrite_output_dir": Gone("5.0"),
    "past_index": Gone("5.0"),
    "per_gpu_eval_batch_size": Gone("5.0", "per_device_eval_batch_size"),
    "per_gpu_train_batch_size": Gone("5.0", "per_device_train_batch_size"),
    "push_to_hub_model_id": Gone("5.0", "hub_model_id"),
    "push_to_hub_organization": Gone("5.0", "hub_model_id: ORGANIZATION/NAME"),
    "push_to_hub_token": Gone("5.0", "hub_token"),
    "ray_scope": Gone("5.0"),
    "save_safetensors": Gone("5.0"),
    "split_batches": Gone("4.51", "accelerator_config: {split_batches: ...}"),
    "torchdynamo": Gone("5.0", "torch_compile_backend"),
    "tp_size": Gone("4.52", "parallelism_config"),
    "tpu_metrics_debug": Gone("5.0", "debug: tpu_metrics_debug"),
    "tpu_num_cores": Gone("5.0"),
    "use_ipex": Gone("4.57"),
    "use_legacy_prediction_loop": Gone("5.0"),
    "use_mps_device": Gone("5.0"),
    "warmup_ratio": Gone("5.15", "the same number as warmup_steps, which 5.0 and later take for a part of all steps"),
}
"""Key to the release that refuses it."""
