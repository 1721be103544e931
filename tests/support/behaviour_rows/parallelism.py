"""Section 9: the mesh, and what is done before any engine."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import FLAG, NO_CONTEXT_PARALLEL, REACHED, Answers

MESH: dict[str, Answers] = {
    "PC-1": (FLAG, "test test_a_mesh_that_the_launcher_laid_out_otherwise_is_named_by_its_axes", REACHED),
    "PC-2": ("rule mesh.size-below-one",),
    "PC-3": (NO_CONTEXT_PARALLEL,),
    "PC-4": (NO_CONTEXT_PARALLEL, "test test_what_prepkit_does_not_do_or_accelerate_refuses_is_refused"),
    "PC-5": ("rule mesh.nothing-sharded", "test test_replicas_of_cut_layers_are_refused_where_nothing_is_sharded"),
    "PC-6": (NO_CONTEXT_PARALLEL,),
    "PC-7": ("step BuildMesh", "rule environment.torch-version", "test test_another_mesh_is_named"),
    "PC-8": ("rule mesh.not-world-size", "test test_a_mesh_that_does_not_multiply_to_the_world_is_refused"),
    "PC-9": ("rule mesh.nothing-sharded",),
    "PC-10": ("rule mesh.single-has-none", "rule mesh.tensor-needs-dtensors", "rule mesh.ddp-does-not-shard"),
    "PC-11": ("rule tensor.not-read",),
}

BEFORE: dict[str, Answers] = {
    "X-1": (
        "step ParallelizeModules",
        "test test_shards_of_cut_layers_on_four_processes_learn_what_one_process_learns",
        "deviation parameters that no row names stay plain, and the optimizer follows by name",
        REACHED,
    ),
    "X-2": (NO_CONTEXT_PARALLEL,),
    "X-3": (
        "step ConvertTransformerEngine",
        "rule fp8.optimizer-missing",
        "test test_the_optimizer_trains_the_new_parameters_and_keeps_its_state",
    ),
    "X-4": (
        "step PrecomputeFloat8Scales",
        "rule fp8.library-missing",
        "test test_two_ranks_of_fsdp2_gather_float8_weights_with_scales_from_the_step_before",
        REACHED,
    ),
    "X-5": ("step InitializeMSAMP", "rule fp8.msamp-deprecated", "rule fp8.msamp-optimizer"),
    "X-6": (NO_CONTEXT_PARALLEL,),
}

PARALLELISM: dict[str, Answers] = {**MESH, **BEFORE}
