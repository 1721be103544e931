"""Options of the launchers themselves: those that a value follows, those that stand alone, and what each takes.

Data, as the launchers need not be here; a test compares it with those that are (torch 2.13, accelerate 1.15, DeepSpeed
0.19). Without the dashes before them, and with ``_`` between words.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from attrs import field, frozen

PORT, COUNT = (0, 2**16 - 1), (1, 2**31 - 1)
"""The least and the greatest of what an option counts."""


@frozen
class LauncherOptions:
    """What a launcher takes before the name of a script."""

    valued: frozenset[str]
    switches: frozenset[str]
    shortened: bool
    """Whether it takes the beginning of an option for it, where no other begins so."""
    older: frozenset[str] = frozenset()
    """What other releases take, and the one that was looked at does not."""

    dashed: bool = True
    """Whether ``-`` between words is taken as well as ``_``."""
    numbers: frozenset[str] = frozenset()
    """Those whose value is a whole number."""
    ranges: Mapping[str, tuple[int, int]] = field(factory=dict)
    """Those of them that take no other numbers."""
    words: Mapping[str, str] = field(factory=dict)
    """Those whose value is one of some words, with ``|`` between them."""
    forms: Mapping[str, tuple[str, str]] = field(factory=dict)
    """Those whose value has a form, as an expression and in words."""
    unread: Mapping[str, str] = field(factory=dict)
    """Those that nobody looks at beside one of others."""
    least: tuple[tuple[str, str, int], ...] = ()
    """Switches, each with an option that it takes from a number on alone."""
    apart: tuple[tuple[str, ...], ...] = ()
    """Groups of options, with blanks between those of one, of which a line has one group at most."""

    @property
    def every(self) -> frozenset[str]:
        """Every option that some release takes."""
        return self.valued | self.switches | self.older

    def name(self, typed: str) -> str | None:
        """Return the option that is meant by what was typed, without dashes before it; None: it is not taken."""
        plain = typed.replace("-", "_")
        if plain in self.every and (self.dashed or plain == typed):
            return plain
        begun = self.begun(typed) if self.shortened and len(typed) > 1 else ()
        return begun[0].replace("-", "_") if len(begun) == 1 else None

    def begun(self, typed: str) -> tuple[str, ...]:
        """Return the ways to type an option that begin so; argparse refuses what begins several, be they of one."""
        ways = {one for name in self.every for one in (name, name.replace("_", "-") if self.dashed else name)}
        return tuple(sorted(way for way in ways if way.startswith(typed)))

    def near(self, typed: str) -> str:
        """Return the option that is spelt nearly so; empty: none is."""
        plain = typed.lstrip("-").replace("-", "_")
        return next(iter(difflib.get_close_matches(plain, sorted(self.valued | self.switches), 1, 0.85)), "")

    def meant(self, typed: str) -> str:
        """Return the option that may be meant by one that is not taken; empty: it may be one of somebody's own.

        A near one, one that it is the beginning of, or one whose letters it has in order (``main_port``).
        """
        plain, known = typed.replace("-", "_"), sorted(self.valued | self.switches)
        if near := self.near(typed):
            return near
        inside = re.compile(".*".join(map(re.escape, plain)))
        ways = [name for name in known if name.startswith(plain)] or [name for name in known if inside.match(name)]
        return min(ways, key=len) if len(plain) > _SHORT and ways else ""

    def refused(self, name: str, value: str | bool) -> tuple[str, str] | None:
        """Return what it takes in the place of a value, and what to type; None: it takes the value, or nobody knows."""
        if isinstance(value, bool) or _LATER.search(value):
            return None
        if name in self.words:
            words = self.words[name].split("|")
            near = difflib.get_close_matches(value, words, 1)
            right = near[0] if near else " or ".join(words[:2])
            return None if value in words else (f"one of {', '.join(words[:4])}", right)
        if name in self.forms:
            form, text = self.forms[name]
            return None if re.fullmatch(form, value) else (text, text)
        if name not in self.numbers:
            return None
        least, most = self.ranges.get(name, (-(2**31), 2**31))
        if re.fullmatch(r"[+-]?\d{1,10}", value) is None:
            return "a whole number", "a whole number"
        between = f"a number from {least} to {most}" if most == PORT[1] else f"a number from {least}"
        return None if least <= int(value) <= most else (between, between)


_LATER = re.compile(r"[$`{<\\]|^[A-Z_]+$|x{2,}")
"""A value that is known when it runs, or that stands in a page for one."""

_SHORT = 3
"""Letters that stand in too many names, in order."""


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
        numbers=_set("max_restarts node_rank master_port shutdown_timeout"),
        ranges={"master_port": PORT, "max_restarts": (0, COUNT[1])},
        unread={"master_port": "rdzv_endpoint rdzv_backend standalone"},
        words={"start_method": "spawn|fork|forkserver", "numa_binding": "node|socket|exclusive|core-complex"},
        forms={
            "nproc_per_node": (
                r"[1-9]\d*|cpu|gpu|xpu|auto|npu|mlu|musa|sdaa|hpu|maca|privateuseone|openreg",
                "a number from 1, gpu, cpu or auto",
            ),
            "nnodes": (r"[1-9]\d*(:[1-9]\d*)?", "a number from 1, or two as LEAST:MOST"),
            "rdzv_endpoint": (
                r"(?!.*:(?:6553[6-9]|655[4-9]\d|65[6-9]\d\d|6[6-9]\d{3}|[7-9]\d{4}|\d{6,})$).*",
                "a port below 65536",
            ),
        },
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
        numbers=_set(
            "fp8_amax_history_len fp8_interval fp8_margin fsdp_min_num_params gradient_accumulation_steps machine_rank "
            "main_process_port max_restarts megatron_lm_context_parallel_size "
            "megatron_lm_decoder_last_pipeline_num_layers megatron_lm_expert_model_parallel_size "
            "megatron_lm_expert_tensor_parallel_size megatron_lm_num_micro_batches megatron_lm_pp_degree "
            "megatron_lm_recompute_num_layers megatron_lm_tp_degree num_cpu_threads_per_process num_machines "
            "num_processes parallelism_config_cp_size parallelism_config_dp_replicate_size "
            "parallelism_config_dp_shard_size parallelism_config_sp_size parallelism_config_tp_size zero_stage"
        ),
        ranges={"main_process_port": PORT, "num_machines": COUNT},
        unread={"main_process_port": "cpu"},
        words={
            "mixed_precision": "no|fp16|bf16|fp8",
            "dynamo_mode": "default|reduce-overhead|max-autotune",
            "fsdp_version": "1|2",
            "fp8_backend": "ao|te|msamp",
            "fp8_format": "HYBRID|E4M3|E5M2",
            "fp8_amax_compute_algo": "max|most_recent",
            "fp8_opt_level": "O1|O2",
            "parallelism_config_cp_backend": "torch",
            "parallelism_config_sp_backend": "deepspeed",
            "dynamo_backend": "no|eager|aot_eager|inductor|aot_ts_nvfuser|nvprims_nvfuser|cudagraphs|ofi|fx2trt|onnxrt"
            "|tensorrt|aot_torchxla_trace_once|torhchxla_trace_once|tvm",
        },
        least=(("multi_gpu", "num_processes", 2),),
        apart=(("multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp"),),
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
        dashed=False,
        numbers=_set("master_port node_rank num_accelerators num_gpus num_nodes ssh_port"),
        ranges={"master_port": PORT, "ssh_port": PORT},
        words={"autotuning": "tune|run", "log_level": "debug|info|warning|error|critical"},
        apart=(("include i exclude e", "num_gpus num_accelerators num_nodes"), ("include i", "exclude e")),
    ),
}
"""Launcher to its options."""


def refuses(launcher: str, name: str, value: str | bool) -> bool:
    """Return whether a launcher is known to refuse a value."""
    return launcher in LAUNCHERS and LAUNCHERS[launcher].refused(name, value) is not None
