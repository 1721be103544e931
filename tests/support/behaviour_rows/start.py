"""Section 1: what is known before anything is prepared."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import REACHED, TYPED, Answers

START: dict[str, Answers] = {
    "ST-1": (
        "test test_a_backend_that_is_asked_for_is_started_whatever_the_device",
        "deviation SageMaker's own backend is not chosen by itself: write its name in config.backend",
        REACHED,
    ),
    "ST-3": (
        "rule environment.backend",
        "step StartProcessGroup",
        "test test_every_accelerator_kind_has_its_collectives_and_its_local_device",
    ),
    "ST-4": (
        "test test_each_launcher_says_how_many_processes_there_are",
        "test test_a_launcher_that_forgot_variables_is_refused_by_their_names",
        "test test_every_mpi_says_who_this_process_is",
        "test test_processes_that_mpirun_started_train_as_under_torchrun",
        "test test_mpirun_on_several_nodes_is_told_what_to_pass_on",
        "deviation gloo is the backend of CPUs also where mpi is there; write backend='mpi' for it",
    ),
    "ST-5": ("rule mesh.single-many-ranks",),
    "ST-6": ("rule environment.launcher-flag", "deviation the engine is config: no variable chooses it"),
    "ST-7": ("rule environment.launcher-flag", "deviation the engine is config: no variable chooses it"),
    "ST-8": ("rule environment.launcher-flag", "deviation Megatron-LM is not offered"),
    "ST-9": (
        "test test_checkpointed_compiled_offloaded_shards_learn_what_one_process_learns",
        "test test_two_processes_learn_what_one_learns",
        "test test_fsdp2_checkpoints_before_it_compiles_before_it_shards_between_release_and_rebind",
        "test test_units_cast_their_inputs_or_take_them_as_they_come",
        "deviation FSDP runs on the CPU and in one process (G-3); XLA and FSDP are two engines",
        REACHED,
    ),
    "ST-10": (
        "rule environment.device",
        "rule environment.launcher-flag",
        "deviation ACCELERATE_TORCH_DEVICE is recorded, not obeyed; config.device is a type, its index is bound late",
        REACHED,
    ),
    "ST-11": (
        "test test_a_cpu_computes_in_bfloat16_and_has_no_device_memory_of_its_own",
        "test test_a_real_accelerator_has_memory_and_a_capability",
    ),
    "ST-12": (
        "test test_the_device_is_the_local_rank_s_unless_one_alone_is_visible",
        "test test_more_processes_than_devices_are_refused",
    ),
    "ST-13": ("rule environment.world-size", "rule mesh.single-many-ranks"),
    "ST-14": ("rule mesh.ddp-alone",),
    "ST-16": (
        "rule environment.offload-backend",
        "test test_offload_on_an_accelerator_asks_for_a_cpu_backend_as_well",
    ),
    "ST-20": (
        "test test_an_unknown_kind_anywhere_is_a_finding_at_its_path",
        "test test_everything_that_is_wrong_is_said_at_once",
        "rule environment.launcher-flag",
        "test test_a_flag_is_a_warning_where_the_config_says_otherwise_and_silent_where_it_agrees",
        REACHED,
    ),
    "ST-23": (
        "rule precision.fp16-unsupported",
        "rule precision.loss-scale",
        "step CreateGradScaler",
        "test test_the_scaler_is_that_of_the_device_and_sharded_under_fsdp1_alone",
        "test test_every_accelerator_gets_torch_s_scaler_for_its_type",
        "test test_an_overflow_on_one_rank_skips_the_step_on_all",
        REACHED,
    ),
    "ST-24": (
        "rule precision.fp16-unsupported",
        "deviation float16 on the CPU is an error, not a silent float32",
    ),
    "ST-25": (
        "rule precision.bf16-unsupported",
        "test test_bfloat16_is_refused_where_the_device_does_not_compute_in_it",
    ),
    "ST-28": ("deviation compiling switches nothing on globally: set torch.backends.cuda.matmul.fp32_precision",),
    "ST-40": (TYPED, "test test_an_unknown_key_anywhere_is_a_finding_at_its_path"),
    "ST-41": (TYPED,),
    "ST-46": ("rule environment.torch-version", "rule environment.torch-unknown"),
    "ST-48": (
        "rule mesh.not-world-size",
        "rule mesh.size-below-one",
        "rule mesh.two-rests",
        "rule environment.launcher-flag",
        "step BuildMesh",
        REACHED,
    ),
    "ST-49": (TYPED, "rule values.accumulation", REACHED),
    "ST-50": (
        "rule environment.launcher-flag",
        "deviation no environment variable overrides the config: accumulation is its field alone",
    ),
}
