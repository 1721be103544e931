"""Keys of transformers' ``TrainingArguments``: those that it has, and those that it had, with what is written today.

Read from the fields of ``training_args.py`` of the releases 4.36 to 5.23; ``tests/formats/importers`` compares them
with the installed one. Beside them the keys that axolotl and LLaMA-Factory have at the top of their files; and which
files with keys of a library are those of another program.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from prepkit.findings.text import near
from prepkit.resolve.deepspeed.keys import SECTIONS

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

_AXOLOTL = """
accelerator_config activation_offloading adam_beta1 adam_beta2 adam_beta3 adam_epsilon adam_epsilon2 adapter
added_tokens_overrides api_key attn_implementation auto_find_batch_size auto_resume_from_checkpoints
axolotl_config_path backend base_model base_model_config base_url batch_flattening batch_size bench_dataset bench_split
bf16 bfloat16 bnb_config_kwargs center_rewards_coefficient chat_template chat_template_jinja chat_template_kwargs
chunked_cross_entropy chunked_cross_entropy_num_chunks cls_model_config comet_api_key comet_experiment_config
comet_experiment_key comet_mode comet_online comet_project_name comet_workspace context_parallel_size
cosine_constant_lr_ratio cosine_min_lr_ratio cpo_alpha curriculum_sampling cut_cross_entropy dataloader_drop_last
dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataset_exact_deduplication
dataset_keep_in_memory dataset_num_proc dataset_prepared_path dataset_processes dataset_shard_idx dataset_shard_num
datasets ddp ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout debug deepcompile deepspeed
default_system_message dense_mixer device device_map diffusion dion_lr dion_momentum dion_rank_fraction
dion_rank_multiple_of do_bench_eval do_causal_lm_eval dp_replicate_size dp_shard_size dpo_beta dpo_generate_during_eval
dpo_label_smoothing dpo_loss_type dpo_loss_weights dpo_norm_loss dpo_padding_free dpo_use_liger_kernel
dpo_use_logits_to_keep dpo_use_weighting dsv4_bf16_all dsv4_fp4_grouped_mode dsv4_fp8_lora_kernel
dsv4_fp8_nonexpert_mode dsv4_shared_mlp_lora_kernel dynamic_checkpoint eaft_alpha eaft_k eager_attention
early_stopping_patience ebft embedding_lr embedding_lr_scale embeddings_skip_upcast eot_tokens eps eval_batch_size
eval_causal_lm_metrics eval_max_new_tokens eval_sample_packing eval_sequence_len eval_steps eval_strategy
eval_table_size evals_per_epoch evaluation_strategy excess_length_strategy experimental_skip_move_to_device
expert_backend expert_parallel_backend expert_parallel_fallback_on_unsupported expert_parallel_num_nvl_bytes
expert_parallel_num_rdma_bytes expert_parallel_size expert_parallel_token_capacity experts_implementation
fix_untrained_tokens flash_attention flash_attn_cross_entropy flash_attn_d512 flash_attn_fuse_mlp flash_attn_fuse_qkv
flash_attn_rms_norm flash_optimum flex_attention flex_attn_compile_kwargs float16 float32 fp16 fp32_norm_classes
fp32_norms fp8 fp8_enable_fsdp_float8_all_gather freeze_mm_modules fsdp fsdp_config fsdp_final_state_dict_type
fsdp_version fused_attn_kernel future_timeout gc_collect_steps gc_steps gemma4_fp8_nonexpert gemma4_hybrid_attn_impl
gemma4_nf4_nonexpert generate_samples generation_do_sample generation_interval generation_max_length
generation_max_new_tokens generation_prompt_ratio generation_steps generation_temperature generation_top_k
generation_top_p gptq gpu_memory_limit gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs
gradio_max_new_tokens gradio_server_name gradio_server_port gradio_share gradio_temperature gradio_title
greater_is_better grokfast_alpha grokfast_lamb group_by_length hatchery heads_k_stride hf_mlflow_log_artifacts
hf_use_auth_token hub_model_id hub_revision hub_strategy image_resize_algorithm image_size importance_weighting
include_tkps include_tokens_per_second is_falcon_derived_model is_llama_derived_model is_mistral_derived_model
is_preprocess is_qwen_derived_model jagged_restart_anneal_steps jagged_restart_steps jagged_restart_warmup_steps
kd_alpha kd_beta kd_ce_alpha kd_normalize_topk kd_online_server kd_online_server_base_url kd_online_timeout
kd_online_topk kd_temperature kd_temperature_min kd_top_k_before_softmax kd_trainer kd_zscore_base_temp
kto_desirable_weight kto_undesirable_weight large_head_attention layer_offloading learning_rate liger_cross_entropy
liger_fused_linear_cross_entropy liger_glu_activation liger_layer_norm liger_rms_norm liger_rms_norm_gated liger_rope
liger_swiglu liger_use_token_scaling lisa_layers_attribute lisa_n_layers lisa_step_interval llama4_linearized_experts
llmcompressor lm_eval_batch_size lm_eval_model lm_eval_post_train lm_eval_tasks load_best_model_at_end load_in_4bit
load_in_8bit local_rank logging_steps lora_alpha lora_alpha_pattern lora_dropout lora_embedding_kernel
lora_fan_in_fan_out lora_mlp_kernel lora_model_dir lora_modules_to_save lora_o_kernel lora_on_cpu lora_qkv_kernel
lora_r lora_rank lora_rank_pattern lora_target_linear lora_target_modules lora_target_parameters loraplus_lr_embedding
loraplus_lr_ratio loss_fn loss_fn_config loss_watchdog_patience loss_watchdog_threshold low_cpu_mem_usage lr_div_factor
lr_groups lr_quadratic_warmup lr_scheduler lr_scheduler_kwargs mask_token_id mask_token_str max_grad_norm
max_mask_ratio max_memory max_packed_sequence_len max_prompt_len max_sample_tokens max_steps mean_resizing_embeddings
merge_lora merge_method metric_for_best_model micro_batch_size min_mask_ratio min_sample_len mlflow_experiment_name
mlflow_run_name mlflow_tracking_uri model_config model_kwargs model_quantization_config
model_quantization_config_kwargs model_revision model_type moe_bnb_fast moe_dequant_chunk_size moe_grouped_backend mora
mora_type multipack_real_batches neftune_noise_alpha nemo_gym_auto_clone nemo_gym_auto_start nemo_gym_config_paths
nemo_gym_datasets nemo_gym_dir nemo_gym_enabled nemo_gym_head_port nemo_gym_max_turns nemo_gym_model_name
nemo_gym_multi_turn nemo_gym_run_timeout nemo_gym_server_timeout nemo_gym_verify_timeout noise_schedule
noisy_embedding_alpha nonexpert_quantization num_dataset_shards_to_save num_diffusion_steps num_epochs
num_generation_samples num_labels num_samples nvfp4_merge_aware nvfp4_merge_aware_start_step optim_args
optim_target_modules optimizer orpo_alpha otel_metrics_host otel_metrics_port output_dir overrides_of_model_config
overrides_of_model_kwargs pad_to_multiple_of pad_to_sequence_len peft peft_autocast_adapter_dtype
peft_ensure_weight_tying peft_init_lora_weights peft_layer_replication peft_layers_pattern peft_layers_to_transform
peft_trainable_token_indices peft_use_dora peft_use_rslora pipeline plugins pose_max_context_len pose_num_chunks
pose_split_on_token_ids precompute_ref_log_probs preprocess_iterable pretrain_multipack_attn
pretrain_multipack_buffer_size pretraining_dataset pretraining_sample_concatenation process_reward_model
processor_kwargs processor_type profiler_steps profiler_steps_start project_id push_dataset_to_hub qat
qgalore_cos_threshold qgalore_gamma_proj qgalore_proj_bits qgalore_proj_group_size qgalore_proj_quant qgalore_proj_type
qgalore_queue_size qgalore_rank qgalore_scale qgalore_update_proj_gap qlora_sharded_model_loading quantization
quantize_moe_experts ray_num_workers ray_run_name recipe reinit_weights relora relora_anneal_steps relora_cpu_offload
relora_prune_method relora_prune_ratio relora_steps relora_warmup_steps remove_unused_columns
resize_token_embeddings_to_32x resources_per_worker resume_from_checkpoint revision_of_model reward_funcs reward_model
ring_attn_func rl rl_beta role_boundaries rope_scaling rpo_alpha s2_attention sage_attention sample_packing
sample_packing_bin_size sample_packing_eff_est sample_packing_group_size sample_packing_mp_start_method
sample_packing_sequentially sample_temperature save_compressed save_first_step save_name_prefix save_only_model
save_safetensors save_steps save_strategy save_total_limit saves_per_epoch scaling_softmax scaling_softmax_bias
scaling_softmax_factor sdp_attention sdpa_varlen seed selective_checkpointing sequence_len sequence_parallel_degree
shrink_embeddings shuffle_before_merging_datasets shuffle_merged_datasets simpo_gamma skip_prepare_dataset
special_tokens spectrum_model_name spectrum_top_fraction streaming streaming_multipack_buffer_size strict
swanlab_api_host swanlab_api_key swanlab_completion_log_interval swanlab_completion_max_buffer swanlab_description
swanlab_experiment_name swanlab_lark_secret swanlab_lark_webhook_url swanlab_log_completions swanlab_log_model
swanlab_mode swanlab_project swanlab_web_host swanlab_workspace tensor_parallel_size test_datasets tf32 tiled_mlp
tiled_mlp_num_shards tiled_mlp_use_original_mlp tokenizer_config tokenizer_legacy tokenizer_save_jinja_files
tokenizer_type tokenizer_use_fast tokenizer_use_mistral_common tokens torch_compile torch_compile_backend
torch_compile_mode torch_compile_options torch_empty_cache_steps torchdistx_path total_num_tokens
total_supervised_tokens trackio_project_name trackio_run_name trackio_space_id train_attn train_mlp train_on_inputs
train_unembed trainer_cls trl trust_remote_code type_of_model unfrozen_parameters unsloth_cross_entropy_loss
unsloth_lora_mlp unsloth_lora_o unsloth_lora_qkv unsloth_rms_norm unsloth_rope use_comet use_dsv4_kernels use_eaft
use_glm_dsa_kernels use_kernels use_mlflow use_mora use_onebitllms use_otel_metrics use_pose use_ray use_scattermoe
use_sonicmoe use_swanlab use_tensorboard use_trackio use_wandb val_set_size vllm wandb_entity wandb_log_model
wandb_mode wandb_name wandb_project wandb_run_id wandb_watch warmup_ratio warmup_steps weight_decay world_size
xformers_attention
"""
_LLAMA_FACTORY = """
account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split adapter_folder adapter_name_or_path
add_special_tokens add_tokens additional_target apollo_layerwise apollo_proj apollo_proj_type apollo_rank apollo_scale
apollo_scale_front apollo_scale_type apollo_target apollo_update_interval apply_rope_fusion asft_alpha
audio_sampling_rate badam_mask_mode badam_mode badam_start_block badam_switch_block_every badam_switch_interval
badam_switch_mode badam_update_ratio badam_verbose batch_size bias_activation_fusion buffer_size cache_dir cache_path
calculate_per_token_loss checkpoint_dir chunk_size compute_accuracy compute_dtype context_parallel_size cpu_infer
create_new_adapter crop_to_patches cross_entropy_loss_fusion cutoff_len data_shared_file_system dataset dataset_dir
default_system dev_ratio disable_gradient_checkpointing disable_shuffling disable_version_checking do_sample
double_quantization download_mode dpo_beta dpo_ftx dpo_label_smoothing dpo_loss dpo_ref_model dpo_ref_model_checkpoint
eaft_alpha early_stopping_steps enable_liger_kernel enable_thinking enable_torch_profiler eval_dataset eval_num_beams
eval_on_each_dataset expert_model_parallel_size export_device export_dir export_hf_on_finish export_hub_model_id
export_legacy_format export_quantization_bit export_quantization_dataset export_quantization_maxlen
export_quantization_nsamples export_size extra_config finetuning_type flash_attn fp8 fp8_backend
fp8_enable_fsdp_float8_all_gather freeze_extra_modules freeze_language_model freeze_multi_modal_projector
freeze_trainable_layers freeze_trainable_modules freeze_vision_tower galore_layerwise galore_proj_type galore_rank
galore_scale galore_target galore_update_interval generation_config generation_max_length generation_num_beams
hf_auth_token hf_hub_token hyper_parallel_args hyper_parallel_cp_size ignore_pad_token_for_loss image_dir
image_do_pan_and_scan image_max_pixels image_min_pixels image_resolution include_effective_tokens_per_second
infer_backend infer_dtype init_special_tokens interleave_probs kt_config kt_cpu_activation kt_expert_checkpoint_path
kt_force_think kt_lora_expert_intermediate_size kt_lora_expert_num kt_maxlen kt_mode kt_non_expert_weight_path
kt_optimize_rule kt_use_cuda_graph kt_use_lora_experts kt_weight_path kto_chosen_weight kto_rejected_weight lang
ld_alpha length_penalty lora_alpha lora_bf16_mode lora_dropout lora_rank lora_target loraplus_lr_embedding
loraplus_lr_ratio low_cpu_mem_usage mask_history masked_softmax_fusion master_addr master_port max_length
max_new_tokens max_samples max_source_length max_target_length media_dir megatron_pretrained_checkpoint mix_strategy
mixed_precision mixture_of_depths mode model_max_length model_name_or_path model_revision module_dropout
moe_aux_loss_coef moe_grouped_gemm moe_token_dispatcher_type ms_hub_token n_shot name_module_trainable neat_packing
neft_alpha new_special_tokens new_special_tokens_config num_beams num_hidden_layers num_layer_trainable offload_folder
oft_block_size oft_rank oft_target om_hub_token orpo_beta overlap_grad_reduce overlap_param_gather overwrite_cache
overwrite_output_dir packing padding_side pipeline_model_parallel_size pissa_convert pissa_init pissa_iter
placement_strategy plot_loss ppo_buffer_size ppo_epochs ppo_logger ppo_score_norm ppo_target ppo_whiten_rewards
predict_with_generate pref_bco_weight pref_beta pref_ftx pref_loss preprocessing_batch_size preprocessing_num_workers
preserve_thinking print_param_status profile_modules profiler_active_steps profiler_output_dir profiler_profile_memory
profiler_record_shapes profiler_repeat profiler_wait_steps profiler_warmup_steps profiler_with_stack prompt_template
pure_bf16 quantization_bit quantization_device_map quantization_method quantization_type ray_init_kwargs
ray_num_workers ray_run_name ray_storage_filesystem ray_storage_path recompute_granularity recompute_method
recompute_num_layers ref_model ref_model_adapters ref_model_checkpoint ref_model_quantization_bit repetition_penalty
reserved_label_len resize_vocab resources_per_worker resume_lora_training reward_model reward_model_adapters
reward_model_checkpoint reward_model_quantization_bit reward_model_type rope_scaling save_dir sequence_parallel
sft_packing sglang_config sglang_lora_backend sglang_maxlen sglang_mem_fraction sglang_tp_size shift_attn simpo_gamma
skip_special_tokens sortish_sampler source_prefix split split_special_tokens stage streaming swanlab_api_key
swanlab_lark_secret swanlab_lark_webhook_url swanlab_logdir swanlab_mode swanlab_project swanlab_run_name
swanlab_workspace system_prompt task task_dir temperature template tensor_model_parallel_size tokenized_path
tool_format top_k top_p train_from_scratch train_mm_proj_only train_on_prompt trust_remote_code upcast_layernorm
upcast_lmhead_output use_adam_mini use_apollo use_asft_loss use_audio_in_video use_auth_token use_badam use_dft_loss
use_distributed_optimizer use_dora use_eaft_loss use_fast_tokenizer use_galore use_hyper_parallel use_kt use_kv_cache
use_llama_pro use_mca use_megatron_bridge use_muon use_packed_sequences use_reentrant_gc use_rslora use_swanlab
use_unsloth use_unsloth_gc use_v1_kernels val_size video_fps video_max_pixels video_maxlen video_min_pixels
video_resolution virtual_pipeline_model_parallel_size visual_inputs vllm_config vllm_dtype vllm_enforce_eager
vllm_gpu_util vllm_max_lora_rank vllm_maxlen
"""
KEYS: dict[str, frozenset[str]] = {
    "transformers": NOW,
    "axolotl": frozenset(_AXOLOTL.split()),
    "llamafactory": NOW | GONE.keys() | frozenset(_LLAMA_FACTORY.split()),
}
"""Library to the keys that it has had: the fields of its classes, axolotl 0.4 to 0.18, LLaMA-Factory 0.1 to 0.9.5."""

_BESIDE = """
attn_implementation beta block_size config_name dataset_config dataset_config_name dataset_kwargs dataset_name
dataset_test_split dataset_text_field dataset_train_split do_predict dtype eos_token ignore_pad_token_for_loss loss_type
lora_r lora_target_modules max_completion_length max_eval_samples max_prompt_length max_seq_length max_steps
max_train_samples model_init_kwargs pad_token preprocessing_num_workers reward_funcs task_name test_file tokenizer_name
torch_dtype train_file use_peft use_vllm validation_file validation_split_percentage
"""
_THEIRS = frozenset().union(*KEYS.values(), _BESIDE.split())
"""Keys of programs that read ``TrainingArguments``: axolotl, LLaMA-Factory, TRL, the examples of transformers."""
_DEEPSPEED = frozenset(SECTIONS[""]) | {"_", "//", "#"}
_ONE_OF_ITS_OWN = {
    "transformers": (frozenset(NOW) | GONE.keys(), _THEIRS, 16, 1 / 3),
    "deepspeed": (_DEEPSPEED, _DEEPSPEED, 100, 1.0),
}
"""Library to its keys; those that say nothing of another program; how many of its own no other program has; and the
share of strange ones to its own from which on a file is another's.

Of some 220 public files those that transformers reads have 18 to 33 keys of its class, and others, which have borrowed
names from it for a class of their own (open-instruct, ms-swift, DPR), at most 13.
"""
_STRANGE = 3
"""Keys that no library here has, and that are near to none: fewer may be keys of a script, or slips."""


def strange_keys(kind: str, keys: Iterable[str]) -> tuple[str, ...]:
    """Keys at the top that make a file one of another program, with arguments of its own; empty: it is the library's.

    What such a program does with a key that the library has no longer, or never had, cannot be known here.

    >>> strange_keys("transformers", ("output_dir", "learning_rate", "warmup_ratio", "warmup_stepz"))
    ()
    >>> borrowed = ("output_dir", "warmup_ratio", "with_tracking", "dataset_mixer", "checkpointing_steps")
    >>> strange_keys("transformers", borrowed)
    ('with_tracking', 'dataset_mixer', 'checkpointing_steps')
    """
    own, told, most, share = _ONE_OF_ITS_OWN[kind]
    given = tuple(map(str, keys))
    strange = [key for key in given if key not in told]
    least = max(_STRANGE, share * sum(key in own for key in given))
    if len(strange) < least or sum(key in own for key in given) >= most:
        return ()
    far = tuple(key for key in strange if not near(key, own, 1, _NEAR))
    return far if len(far) >= least else ()


_NEAR = 0.87
"""How near a strange key is to a known one that it is a slip for."""
