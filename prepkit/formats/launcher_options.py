"""Options of the launchers themselves: those that a value follows, and those that stand alone.

Data, as the launchers need not be here; a test compares it with those that are. Without the dashes before them, and
with ``_`` between words, as each launcher takes both.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class LauncherOptions:
    """What a launcher takes before the name of a script."""

    valued: frozenset[str]
    switches: frozenset[str]
    shortened: bool
    """Whether it takes the beginning of an option for it, where no other begins so."""
    older: frozenset[str] = frozenset()
    """What other releases take, and the one that was looked at does not."""

    @property
    def every(self) -> frozenset[str]:
        """Every option that some release takes."""
        return self.valued | self.switches | self.older

    def name(self, typed: str) -> str | None:
        """Return the option that is meant by what was typed; None: there is no such option."""
        if typed in self.every:
            return typed
        begins = [one for one in self.every if one.startswith(typed)] if self.shortened and len(typed) > 1 else []
        return begins[0] if len(begins) == 1 else None


def _set(names: str) -> frozenset[str]:
    return frozenset(names.split())


LAUNCHERS: Mapping[str, LauncherOptions] = {
    "torchrun": LauncherOptions(
        valued=_set(
            "duplicate_stderr_filters duplicate_stdout_filters event_log_handler local_addr local_ranks_filter "
            "log_dir logs_specs master_addr master_port max_restarts monitor_interval nnodes node_rank "
            "nproc_per_node numa_binding r rdzv_backend rdzv_conf rdzv_endpoint rdzv_id redirects role "
            "shutdown_timeout signals_to_handle start_method t tee"
        ),
        switches=_set("h help m module no_python run_path standalone virtual_local_rank"),
        shortened=True,
        older=_set("local_rank use_env"),
    ),
    "accelerate": LauncherOptions(
        valued=_set(
            "aws_access_key_id aws_secret_access_key config_file deepspeed_config_file deepspeed_exclusion_filter "
            "deepspeed_hostfile deepspeed_inclusion_filter deepspeed_moe_layer_cls_names "
            "deepspeed_multinode_launcher dynamo_backend dynamo_mode env fp8_amax_compute_algo "
            "fp8_amax_history_len fp8_backend fp8_enable_fsdp_float8_all_gather fp8_format fp8_interval "
            "fp8_margin fp8_opt_level fp8_override_linear_precision fp8_pad_inner_dim "
            "fsdp_activation_checkpointing fsdp_activation_checkpointing_offload fsdp_auto_wrap_policy "
            "fsdp_backward_prefetch fsdp_cpu_ram_efficient_loading fsdp_forward_prefetch fsdp_min_num_params "
            "fsdp_offload_params fsdp_reshard_after_forward fsdp_sharding_strategy fsdp_state_dict_type "
            "fsdp_sync_module_states fsdp_transformer_layer_cls_to_wrap fsdp_use_orig_params fsdp_version gpu_ids "
            "gradient_accumulation_steps gradient_clipping log_dir machine_rank main_process_ip main_process_port "
            "main_training_function max_restarts megatron_lm_attention_backend megatron_lm_attention_dropout "
            "megatron_lm_attention_softmax_in_fp32 megatron_lm_calculate_per_token_loss "
            "megatron_lm_context_parallel_size megatron_lm_decoder_last_pipeline_num_layers "
            "megatron_lm_eod_mask_loss megatron_lm_expert_model_parallel_size "
            "megatron_lm_expert_tensor_parallel_size megatron_lm_gradient_clipping megatron_lm_hidden_dropout "
            "megatron_lm_no_load_optim megatron_lm_no_save_optim megatron_lm_num_micro_batches "
            "megatron_lm_optimizer_cpu_offload megatron_lm_overlap_cpu_optimizer_d2h_h2d megatron_lm_pp_degree "
            "megatron_lm_recompute_activations megatron_lm_recompute_granularity megatron_lm_recompute_method "
            "megatron_lm_recompute_num_layers megatron_lm_sequence_parallelism megatron_lm_tp_degree "
            "megatron_lm_use_custom_fsdp megatron_lm_use_distributed_optimizer "
            "megatron_lm_use_precision_aware_optimizer megatron_lm_use_rotary_position_embeddings mixed_precision "
            "monitor_interval mpirun_hostfile num_cpu_threads_per_process num_machines num_processes "
            "offload_optimizer_device offload_optimizer_nvme_path offload_param_device offload_param_nvme_path "
            "parallelism_config_cp_backend parallelism_config_cp_comm_strategy parallelism_config_cp_size "
            "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size "
            "parallelism_config_sp_attn_implementation parallelism_config_sp_backend "
            "parallelism_config_sp_seq_length parallelism_config_sp_seq_length_is_variable "
            "parallelism_config_sp_size parallelism_config_tp_size rdzv_backend rdzv_conf role t tee vm "
            "zero3_init_flag zero3_save_16bit_model zero_stage"
        ),
        switches=_set(
            "cpu debug downcast_bf16 dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation "
            "enable_cpu_affinity fp8_use_autocast_during_eval h help m module multi_gpu no_python no_tpu_cluster "
            "q quiet same_network tpu tpu_cluster tpu_use_sudo use_deepspeed use_fsdp use_megatron_lm "
            "use_parallelism_config"
        ),
        shortened=False,
        older=_set(
            "aml fp16 fsdp_backward_prefetch_policy ipex  mps sagemaker tpu_use_cluster use_cpu use_mps_device use_xpu"
        ),
    ),
    "deepspeed": LauncherOptions(
        valued=_set(
            "H autotuning bind_core_list e enable_each_rank_log exclude hostfile i include launcher launcher_args "
            "log_level master_addr master_port node_rank num_accelerators num_gpus num_nodes ssh_port venv_script"
        ),
        switches=_set(
            "bind_cores_to_rank force_multi h help module no_local_rank no_python no_ssh no_ssh_check q quiet save_pid"
        ),
        shortened=True,
        older=_set("deepspeed deepspeed_config elastic_training max_elastic_nodes min_elastic_nodes"),
    ),
}
"""Launcher to its options."""
