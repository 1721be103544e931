"""Options of ``torch.compile``, and those that inductor lists in each release (``torch._inductor.list_options()``)."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from prepkit.config import CompileBlocks, CompileModel, Config
from prepkit.facts import Facts
from prepkit.findings import Severity
from prepkit.findings.text import did_you_mean, some
from prepkit.resolve.engines import traits
from prepkit.resolve.resolved import Resolved
from prepkit.rules.rule import Hit, Moment, Rule

# --- options of inductor ---------------------------------------------------------------------------------------------


_OF_2_13 = {
    "": """
        TYPE_CHECKING _cache_config_factory_keys _cache_config_ignore_prefix _conv_default_backends
        _fuse_ddp_bucket_size _fuse_ddp_communication _fuse_ddp_communication_passes _micro_pipeline_tp
        _post_fusion_custom_pass _pre_fusion_custom_pass _profile_var _raise_error_for_testing
        _realize_acc_reads_threshold_default _realize_opcount_threshold_default _save_config_ignore
        _use_fp64_for_unbacked_floats add_pre_grad_passes aggressive_fusion align_random_eager alignment_asserts
        allow_buffer_reuse always_keep_tensor_constants annotate_training apply_gumbel_max_trick
        assert_indirect_indexing assume_32bit_indexing assume_aligned_inputs assume_unaligned_fallback_output
        autoheuristic_log_path autotune_fallback_to_aten autotune_in_subproc autotune_local_cache
        autotune_lookup_table autotune_multi_device autotune_num_choices_displayed autotune_remote_cache
        b2b_gemm_pass batch_fusion batch_invariant benchmark_combo_kernel benchmark_epilogue_fusion
        benchmark_fusion benchmark_harness benchmark_kernel bucket_all_gathers_bucket_mode bucket_all_gathers_fx
        bucket_all_gathers_fx_bucket_size_determinator bucket_all_reduces_fx
        bucket_all_reduces_fx_bucket_size_determinator bucket_reduce_scatters_bucket_mode
        bucket_reduce_scatters_fx bucket_reduce_scatters_fx_bucket_size_determinator
        bundle_triton_into_fx_graph_cache bundled_autotune_remote_cache bw_outputs_user_visible
        cache_sdpa_constraint can_inplace_pad_graph_input check_stack_no_cycles_TESTING_ONLY
        collective_benchmark_nruns collective_benchmark_timeout combo_kernel_allow_mixed_sizes
        combo_kernel_autotune_grouping combo_kernel_foreach_dynamic_shapes combo_kernel_max_distance
        combo_kernel_max_num_args combo_kernel_max_num_nodes combo_kernel_peak_memory_increase_gb
        combo_kernel_peak_memory_pct_threshold combo_kernel_per_subkernel_blocks combo_kernels
        combo_kernels_autotune combo_kernels_pointwise_only comment_origin compile_threads
        compile_worker_wait_timeout comprehensive_padding compute_all_bounds constant_and_index_propagation
        conv_1x1_as_mm coordinate_descent_check_all_directions coordinate_descent_search_radius
        coordinate_descent_tuning cpp_cache_precompile_headers cpp_wrapper cpp_wrapper_build_separate
        cpu_backend cpu_gpu_bw cuda_backend cudagraph_policy cudagraph_unsafe_unbacked_ops custom_partitioner_fn
        custom_should_partition_ops cutedsl_enable_autotuning dce debug debug_fusion debug_index_asserts
        debug_ir_traceback decompose_mem_bound_mm dedup_reduce_scatters delay_realize_cheap_outputs
        deterministic developer_warnings disable_cpp_codegen disable_padding_cpu disable_progress
        disabled_passes distributed_max_autotune_gemm do_not_emit_runtime_assertions dynamic_scale_rblock
        efficient_conv_bn_eval_fx_passes emulate_precision_casts emulate_precision_casts_on_saved_tensors
        enable_auto_functionalized_v2 enable_autograd_for_aot enable_caching_generated_triton_templates
        enable_linear_binary_folding enabled_metric_tables epilogue_fusion epilogue_fusion_first
        epilogue_fusion_user_defined_triton_kernel epilogue_fusion_with_atomic_add estimate_op_runtime
        expand_dimension_for_pointwise_nodes external_matmul fallback_by_default
        fallback_embedding_bag_byte_unpack fallback_random file_lock_timeout
        force_disable_cudagraph_TESTING_ONLY force_fuse_int_mm_with_mul force_layout_optimization
        force_pointwise_cat force_shape_pad freezing freezing_discard_parameters fx_graph_cache
        fx_graph_remote_cache fx_passes_numeric_check fx_wrapper generate_intermediate_hooks global_cache_dir
        graph_partition group_fusion implicit_fallbacks incremental_autotune inductor_choices_class
        inductor_default_autotune_rep inductor_default_autotune_warmup inplace_buffers inplace_padding
        inter_node_bw intra_node_bw is_nightly_or_source is_predispatch joint_custom_post_pass
        joint_custom_pre_pass joint_graph_constant_folding keep_addmm_fused_for_half_dtypes keep_output_stride
        keep_static_cubin_raw kernel_name_max_ops layout_opt_default layout_optimization log_tlparse
        loop_index_inversion_in_fusion loop_ordering_after_fusion loop_reindexing_after_fusion max_autotune
        max_autotune_allow_flexible_layouts max_autotune_conv_backends max_autotune_conv_bwd_input_backends
        max_autotune_conv_bwd_weight_backends max_autotune_flex_search_space max_autotune_gemm
        max_autotune_gemm_backends max_autotune_gemm_search_space max_autotune_pointwise
        max_autotune_prune_choices_based_on_shared_mem max_autotune_report_choices_stats
        max_autotune_subproc_graceful_timeout_seconds max_autotune_subproc_result_timeout_seconds
        max_autotune_subproc_terminate_timeout_seconds max_complex_pointwise_cat_inputs
        max_epilogue_benchmarked_choices max_fusion_buffer_group_pairwise_attempts max_fusion_size
        max_fusion_unique_io_buffers max_pointwise_cat_inputs memory_planning memory_pool min_num_split
        min_overlap_ratio mixed_mm_choice multi_kernel_hints nan_asserts non_blocking_remote_cache_write
        nvgemm_max_profiling_configs nvgemm_supplement_configs online_softmax optimize_scatter_upon_const_tensor
        pad_channels_last pad_dynamic_shapes pad_outputs padding_alignment_bytes padding_stride_threshold
        partitioned_scatter_enabled partitioned_scatter_max_partitions partitioned_scatter_memory_budget
        partitioned_scatter_min_partitions pattern_matcher permute_fusion pick_loop_orders
        pipeline_max_autotune_gemm post_grad_custom_post_pass post_grad_custom_pre_pass post_grad_fusion_options
        pre_grad_custom_pass pre_grad_fusion_options pre_grad_pass_timing precompilation_timeout_seconds
        profile_bandwidth profile_bandwidth_output profile_bandwidth_regex
        profile_bandwidth_with_do_bench_using_profiling profiler_mark_wrapper_call prologue_fusion
        quiesce_async_compile_pool quiesce_async_compile_time realize_acc_reads_size_threshold
        realize_acc_reads_threshold realize_cpu_acc_reads_threshold realize_cpu_opcount_threshold
        realize_opcount_threshold realize_reads_threshold remote_gemm_autotune_cache remove_pre_grad_passes
        reorder_for_compute_comm_overlap reorder_for_compute_comm_overlap_passes reorder_for_locality
        reorder_for_peak_memory reorder_for_peak_memory_debug reorder_prefetch_limit run_jit_post_compile_hook
        runtime_estimations_mms_benchmark runtime_triton_nan_asserts save_args scalar_asserts
        score_fusion_memory_threshold search_autotune_cache selective_decompose shape_padding size_asserts
        size_threshold_for_succ_based_strategy sleep_sec_TESTING_ONLY small_memory_access_threshold
        split_cat_fx_passes split_reductions static_launch_user_defined_triton_kernels static_weight_shapes
        strict_static_cuda_launcher torchinductor_worker_logpath tpu_backend triton_disable_device_detection
        triton_kernel_default_layout_constraint unbacked_symint_fallback unroll_reductions_threshold
        unsafe_ignore_unsupported_triton_autotune_args unsafe_marked_cacheable_functions
        unsafe_skip_cache_dynamic_shape_guards use_dce use_experimental_benchmarker use_fast_math
        use_fast_triton_launcher use_joint_graph_passes use_launch_metadata_schema use_mixed_mm
        use_post_grad_passes use_pre_grad_passes use_static_cuda_launcher use_torch_profiler_benchmarker
        verbose_progress warn_mix_layout worker_log_path worker_start_method worker_suppress_logging
        wrap_inductor_compiled_regions write_are_deterministic_algorithms_enabled xpu_backend
    """,
    "_collective": """
        auto_select one_shot_all_reduce_threshold_bytes
    """,
    "aot_inductor": """
        allow_stack_allocation aoti_shim_library aoti_shim_library_path autotune_per_kernel_alloc
        check_lowerbound compile_wrapper_opt_level cross_target_platform custom_op_libs custom_ops_to_c_shims
        debug_compile debug_intermediate_value_printer debug_symbols dump_aoti_minifier dynamic_linkage
        embed_kernel_binary emit_multi_arch_kernel enable_frame_pointer enable_line_tables enable_lto
        filtered_kernel_names force_mmap_weights link_libtorch metadata model_name_for_generated_files
        output_path package package_constants_in_so package_constants_on_disk_format package_cpp_only
        precompile_headers presets raise_error_on_ignored_optimization repro_level serialized_in_spec
        serialized_out_spec use_consts_asm_build use_minimal_arrayref_interface use_runtime_constant_folding
        weight_use_caching_allocator
    """,
    "aot_inductor_mode": """
        compile_standalone
    """,
    "aten_distributed_optimizations": """
        allow_comms_decompositions bucket_exposed_first bucket_mode bucket_only_internode_comms
        collective_bucketing collective_estimator compute_estimator compute_overlap_multipler
        custom_runtime_estimation enable_fusion_regions enable_low_contention_collectives
        enable_overlap_scheduling insert_overlap_deps log_final_collectives_estimations
        low_contention_min_bytes_per_rank low_contention_skip_overlap_check max_coll_distance
        max_compute_pre_fetch max_in_flight_gb max_memory_increase_gb max_memory_increase_ratio
        overlap_scheduling_autofix_cycles pre_bucketing_fsdp_collectives
        pre_bucketing_fsdp_collectives_bucket_cap_mb pre_bucketing_fsdp_collectives_max_bucket_cap_mb
        pre_bucketing_fsdp_collectives_min_bucket_cap_mb
        pre_bucketing_fsdp_collectives_saturation_calibration_multiplier pre_bucketing_fsdp_collectives_verbose
        prioritize_bucketing_during_scheduling profile_guided_estimations_profile_path spmd_check spmd_mismatch
    """,
    "auto_chunker": """
        amplify_ratio_threshold enable num_chunk output_size_threshold
    """,
    "autoheuristic_collect": """
        mixed_mm pad_mm
    """,
    "autoheuristic_use": """
        mixed_mm pad_mm
    """,
    "cpp": """
        cxx descriptive_names dynamic_threads enable_concat_linear enable_floating_point_contract_flag
        enable_grouped_gemm_template enable_kernel_profile enable_loop_tail_vec enable_tiling_heuristics
        enable_unsafe_math_opt_flag fallback_scatter_reduce_sum force_inline_kernel gemm_cache_blocking
        gemm_max_k_slices gemm_thread_factors inject_log1p_bug_TESTING_ONLY inject_relu_bug_TESTING_ONLY march
        max_horizontal_fusion_size min_chunk_size no_redundant_loops simdlen threads use_constexpr_for_int_array
        use_decompose_tanh use_small_dequant_buffer use_two_step_variance_threshold vec_isa_ok weight_prepack
    """,
    "cuda": """
        arch binary_remote_cache_force_write compile_opt_level cuda_cxx cutlass_backend_min_gemm_size
        cutlass_dir cutlass_dynamic_cluster_fallback cutlass_dynamic_cluster_shape cutlass_enabled_ops
        cutlass_epilogue_fusion_enabled cutlass_hash_with_compile_cmd cutlass_instantiation_level
        cutlass_max_profiling_configs cutlass_max_profiling_swizzle_options cutlass_op_allowlist_regex
        cutlass_op_denylist_regex cutlass_prescreening cutlass_tma_only enable_caching_codegen enable_cuda_lto
        enable_debug_info enable_ptxas_info generate_test_runner nvgemm_max_profiling_configs
        upload_to_binary_remote_cache use_binary_remote_cache use_fast_math version
    """,
    "cutlass": """
        binary_remote_cache_force_write compile_opt_level cutlass_backend_min_gemm_size cutlass_dir
        cutlass_dynamic_cluster_fallback cutlass_dynamic_cluster_shape cutlass_enabled_ops
        cutlass_epilogue_fusion_enabled cutlass_hash_with_compile_cmd cutlass_instantiation_level
        cutlass_max_profiling_configs cutlass_max_profiling_swizzle_options cutlass_op_allowlist_regex
        cutlass_op_denylist_regex cutlass_prescreening cutlass_tma_only enable_caching_codegen enable_debug_info
        generate_test_runner upload_to_binary_remote_cache use_binary_remote_cache use_fast_math
    """,
    "eager_numerics": """
        disable_ftz division_rounding use_pytorch_libdevice
    """,
    "halide": """
        asserts cpu_target debug gpu_target scan_kernels scheduler_cpu scheduler_cuda
    """,
    "lookup_table": """
        check_src_hash table
    """,
    "mtia": """
        disable_welford_reduction
    """,
    "rocm": """
        arch ck_dir ck_max_profiling_configs ck_supported_arch ck_tile_max_profiling_configs compile_opt_level
        contiguous_threshold flush_denormals generate_test_runner is_debug kBatch_sweep n_max_profiling_configs
        origami origami_topk print_kernel_resource_usage rocm_home save_temps split_k_threshold use_fast_math
        use_preselected_instances
    """,
    "test_configs": """
        assume_bucketing_reduces_latency autotune_choice_desc_regex autotune_choice_name_regex
        bisect_keep_custom_backend_for_inductor bisect_pre_grad_graph distort_benchmarking_result
        force_custom_op_decomposition force_extern_kernel_in_multi_template force_filter_reduction_configs
        force_no_impl_grouping graphsafe_rng_func_ignores_fallback_random max_flex_configs max_mm_configs
        runtime_triton_dtype_assert runtime_triton_shape_assert static_cpp_dtype_assert track_memory_lifecycle
        use_libtorch
    """,
    "trace": """
        compile_profile debug_dir debug_log dot_graph_shape draw_orig_fx_graph enabled fx_graph
        fx_graph_transformed graph_diagram graph_diagram_format info_log ir_post_fusion ir_pre_fusion
        log_autotuning_results log_url_for_graph_xform orig_fx_graph_diagram_format output_code
        provenance_tracking_level save_real_tensors upload_tar
    """,
    "triton": """
        autotune_at_compile_time autotune_cublasLt autotune_pointwise autotune_with_sample_inputs
        coalesce_tiling_analysis codegen_upcast_to_fp32 cooperative_reductions cudagraph_capture_sizes
        cudagraph_dynamic_shape_warn_limit cudagraph_min_partition_size cudagraph_or_error
        cudagraph_partition_memory_budget cudagraph_skip_dynamic_graphs cudagraph_support_input_mutation
        cudagraph_trees cudagraph_trees_history_recording cudagraph_trees_objgraph
        cudagraph_unexpected_rerecord_limit cudagraphs debug_dump_kernel_inputs debug_sync_graph
        debug_sync_kernel decompose_k_threshold decompose_sort_ops dense_indexing descriptive_names
        disallow_failing_autotune_kernels_TESTING_ONLY divisible_by_16 dynamic_disable_pipelining
        emit_pointer_range_32 enable_pdl enable_persistent_tma_matmul enable_template_tma_store
        enable_tma_load_for_template_epilogue fast_path_cudagraph_asserts force_cooperative_reductions
        force_cudagraph_sync force_cudagraphs_warmup inject_relu_bug_TESTING_ONLY max_kernel_dump_occurrences
        max_tiles min_split_scan_rblock mix_order_reduction mix_order_reduction_allow_multi_stages
        mix_order_reduction_autotune_split_size mix_order_reduction_initial_xblock mix_order_reduction_max_reads
        mix_order_reduction_non_strict_mode mix_order_reduction_split_size multi_kernel native_matmul
        nested_reduction num_decompose_k_splits persistent_reductions prefer_nd_tiling proton_group_by_sm
        proton_output_dir proton_per_cta_occupancy proton_profiling proton_split_invocations
        reorder_for_reducing_graph_partitions skip_cudagraph_warmup skip_l1_cache slow_path_cudagraph_asserts
        spill_threshold store_cubin tile_reductions tiling_prevents_pointwise_fusion
        tiling_prevents_reduction_fusion transpose_discontiguous_tensor_descriptor unique_kernel_names
        unique_user_kernel_names use_block_ptr use_tensor_descriptor use_two_step_variance_min_numel
        use_two_step_variance_threshold
    """,
    "xpu": """
        arch binary_remote_cache_force_write compile_opt_level cutlass_backend_min_gemm_size cutlass_dir
        cutlass_dynamic_cluster_fallback cutlass_dynamic_cluster_shape cutlass_enabled_ops
        cutlass_epilogue_fusion_enabled cutlass_hash_with_compile_cmd cutlass_instantiation_level
        cutlass_max_profiling_configs cutlass_max_profiling_swizzle_options cutlass_op_allowlist_regex
        cutlass_op_denylist_regex cutlass_prescreening cutlass_tma_only enable_caching_codegen enable_debug_info
        generate_test_runner oneapi_root upload_to_binary_remote_cache use_binary_remote_cache use_fast_math
        version
    """,
}
"""Groups of inductor's settings; the one without a name first. A new release gets a row of its own below."""

RELEASES = {
    (2, 13): frozenset(
        f"{group}.{name}" if group else name for group, names in _OF_2_13.items() for name in names.split()
    )
}
"""Release of torch to the names that its inductor takes."""


MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes that every torch since 2.6 knows."""
BACKENDS = ("inductor", "cudagraphs", "openxla", "tvm", "eager", "aot_eager", "aot_ts", "ts")
"""Backends that torch itself brings, those for finding mistakes included; others register themselves when imported."""
TAKE_NO_OPTIONS = frozenset(BACKENDS) - {"inductor", "tvm"}
"""torch's own backends that ignore ``options``, or fail at them in the first forward."""
_SWITCHES = (("TORCH_COMPILE_DISABLE", "1"), ("TORCHDYNAMO_DISABLE", "1"))


def _asked(cfg: Config) -> CompileModel | CompileBlocks | None:
    return cfg.compile


def _mode(resolved: Resolved) -> Iterator[Hit]:
    if (asked := _asked(resolved.cfg)) and asked.mode not in MODES:
        fix = f"Write one of {', '.join(MODES)}.{did_you_mean(asked.mode, MODES)}"
        yield Hit("config.compile.mode", f"torch.compile has no mode `{asked.mode}`.", fix)


def _backend(resolved: Resolved) -> Iterator[Hit]:
    if (asked := _asked(resolved.cfg)) and not asked.backend.strip():
        yield Hit("config.compile.backend", f"{asked.backend!r} names no backend.")


def _foreign_backend(resolved: Resolved) -> Iterator[Hit]:
    if (asked := _asked(resolved.cfg)) and asked.backend.strip() and asked.backend not in BACKENDS:
        fix = f"Import what registers it before apply, or write one of {', '.join(BACKENDS)}."
        what = f"torch itself brings no backend `{asked.backend}`."
        yield Hit("config.compile.backend", what, fix + did_you_mean(asked.backend, BACKENDS), milder=True)


def _options(resolved: Resolved) -> Iterator[Hit]:
    asked = _asked(resolved.cfg)
    if asked is None or not asked.options:
        return
    names = [option.name for option in asked.options]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        yield Hit("config.compile.options", f"{some(twice)}: given more than once.", "Give each option once.")
    if asked.mode != "default":
        what = f'torch takes a mode or options, and not both: mode="{asked.mode}" is a set of options of its own.'
        yield Hit("config.compile.mode", what, 'Write mode="default", or leave options out.')
    if asked.backend in TAKE_NO_OPTIONS:
        what = f"The backend `{asked.backend}` takes no options."
        yield Hit("config.compile.options", what, 'Leave options out, or write backend="inductor".')


def _unknown_option(resolved: Resolved) -> Iterator[Hit]:
    """Asks inductor alone, and releases of torch whose options are known; ``apply`` asks the torch that is there."""
    asked, env = _asked(resolved.cfg), resolved.facts.env
    known = RELEASES.get(env.release)
    if asked is None or known is None or asked.backend != "inductor":
        return
    for name in dict.fromkeys(option.name for option in asked.options):
        if name.replace("-", "_") not in known:
            what = f"inductor of torch {env.torch} has no option `{name}`."
            fix = f"Write a name that torch._inductor.list_options() has, or leave it out.{did_you_mean(name, known)}"
            yield Hit("config.compile.options", what, fix)


def _limit(resolved: Resolved) -> Iterator[Hit]:
    asked = _asked(resolved.cfg)
    if asked and asked.recompile_limit is not None and asked.recompile_limit < 1:
        what = f"recompile_limit={asked.recompile_limit} would compile nothing."
        yield Hit("config.compile.recompile_limit", what)


def _dynamic(resolved: Resolved) -> Iterator[Hit]:
    if (asked := _asked(resolved.cfg)) and asked.dynamic and resolved.tp.planned:
        what = "dynamic=True, and layers that are cut: torch 2.13 was seen to recurse without end while it traces them."
        yield Hit("config.compile.dynamic", what)


def _disabled(resolved: Resolved) -> Iterator[Hit]:
    for name, value in _SWITCHES:
        if _asked(resolved.cfg) and (name, value) in resolved.facts.env.variables:
            what = f"{name}={value} is set: torch.compile would return what it gets, and nobody would notice."
            yield Hit(f"env.variables.{name}", what, f"Write `unset {name}`, or compile=None.")


def _default_mode(cfg: Config, _: Facts) -> Config:
    asked = _asked(cfg)
    return evolve(cfg, compile=evolve(asked, mode="default")) if asked else cfg


def _without_options(cfg: Config, _: Facts) -> Config:
    asked = _asked(cfg)
    return evolve(cfg, compile=evolve(asked, options=())) if asked else cfg


def _known_options(cfg: Config, facts: Facts) -> Config:
    asked, known = _asked(cfg), RELEASES.get(facts.env.release)
    if asked is None or known is None:
        return cfg
    kept = tuple(option for option in asked.options if option.name.replace("-", "_") in known)
    return evolve(cfg, compile=evolve(asked, options=kept))


def _usual_limit(cfg: Config, _: Facts) -> Config:
    asked = _asked(cfg)
    return evolve(cfg, compile=evolve(asked, recompile_limit=None)) if asked else cfg


def _usual_backend(cfg: Config, _: Facts) -> Config:
    asked, usual = _asked(cfg), "openxla" if traits(cfg).device == "xla" else "inductor"
    return evolve(cfg, compile=evolve(asked, backend=usual, options=())) if asked else cfg  # they are another's


def _as_needed(cfg: Config, _: Facts) -> Config:
    asked = _asked(cfg)
    return evolve(cfg, compile=evolve(asked, dynamic=None)) if asked else cfg


def _eager(cfg: Config, _: Facts) -> Config:
    return evolve(cfg, compile=None)


RULES: tuple[Rule, ...] = (
    Rule(
        id="compile.unknown-mode",
        summary="torch.compile knows the mode.",
        check=_mode,
        fix='Write mode="default".',
        source=("CM-3", "torch._inductor.list_mode_options"),
        repair=_default_mode,
    ),
    Rule(
        id="compile.no-backend",
        summary="A backend of torch.compile has a name.",
        check=_backend,
        fix='Write backend="inductor", or compile=None.',
        source=("CM-1", "CM-3"),
        repair=_usual_backend,
    ),
    Rule(
        id="compile.foreign-backend",
        summary="The backend of torch.compile is one of torch's own.",
        check=_foreign_backend,
        fix="Import what registers it before apply.",
        at=(Moment.PLAN, Moment.ACT),
        milder="before apply",
        source=("CM-3", "K-DY1"),
        repair=_usual_backend,
    ),
    Rule(
        id="compile.options",
        summary="Options of torch.compile are given once, to a backend that takes them, and in the place of a mode.",
        check=_options,
        fix="Leave options out.",
        source=("K-DY5", "torch.compile"),
        repair=_without_options,
    ),
    Rule(
        id="compile.unknown-option",
        summary="inductor knows the options that torch.compile is given.",
        check=_unknown_option,
        fix="Write a name that torch._inductor.list_options() has, or leave it out.",
        at=(Moment.PLAN, Moment.ACT),
        source=("K-DY5", "torch._inductor.list_options"),
        repair=_known_options,
    ),
    Rule(
        id="compile.recompile-limit",
        summary="At least one compilation of a function is allowed.",
        check=_limit,
        fix="Write recompile_limit=None, or compile=None.",
        source=("K-DY5", "torch.compile"),
        repair=_usual_limit,
    ),
    Rule(
        id="compile.dynamic-cut",
        summary="Cut layers are compiled for the sizes that come, and for others when they change.",
        check=_dynamic,
        fix="Leave dynamic at None, or compile nothing.",
        severity=Severity.WARNING,
        source=("CM-3", "torch proxy_tensor.py"),
        repair=_as_needed,
    ),
    Rule(
        id="compile.switched-off",
        summary="No environment variable switches torch.compile off while it is asked for.",
        check=_disabled,
        fix="Unset the variable, or write compile=None.",
        source=("pain 20", "pain 25"),
        repair=_eager,
    ),
)
