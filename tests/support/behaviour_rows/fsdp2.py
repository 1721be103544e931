"""Section 4: FSDP2, and its helpers."""

from __future__ import annotations

from tests.support.behaviour_rows.answers import NO_REGISTRY, ON_ONE_MODULE, REACHED, Answers

FSDP2: dict[str, Answers] = {
    "P2-1": ("step ShardLoader", "test test_loaders_are_sharded_unless_they_are_kept", ON_ONE_MODULE),
    "P2-2": ("test test_a_scheduler_made_before_still_drives_the_optimizer_after",),
    "P2-3": (ON_ONE_MODULE, "rule optimizer.none"),
    "P2-4": ("rule wrap.class-not-found", "test test_one_config_prepares_two_models_of_other_classes"),
    "P2-5": ("step CheckpointModules", "rule blocks.none-selected", "rule blocks.one-unit", REACHED),
    "P2-6": (
        "test test_fsdp2_checkpoints_before_it_compiles_before_it_shards_between_release_and_rebind",
        "deviation no setting of dynamo is changed",
    ),
    "P2-7": ("test test_parameters_that_share_an_address_stay_apart",),
    "P2-8": ("step ReleaseOptimizer", "test test_sharding_frees_every_old_parameter_once_the_optimizer_is_released"),
    "P2-9": (NO_REGISTRY,),
    "P2-10": ("step ShardUnits",),
    "P2-11": (NO_REGISTRY, "rule model.already-wrapped"),
    "P2-12": (NO_REGISTRY,),
    "P2-13": ("step RebindOptimizer", "test test_an_optimizer_over_a_meta_model_steps_every_parameter"),
    "P2-14": ("step RebindOptimizer", "rule optimizer.foreign-parameters"),
    "P2-15": (NO_REGISTRY,),
    "M2-1": (
        "rule sharded.differs",
        "test test_a_model_that_arrives_sharded_stays_and_trains_as_by_hand",
        "deviation left as it is where the config says what stands, else refused with what to write",
    ),
    "M2-2": ("deviation units are paths in the plan, resolved once",),
    "M2-3": ("test test_sharding_frees_every_old_parameter_once_the_optimizer_is_released",),
    "M2-4": ("step ShardUnits", "test test_units_compute_in_the_planned_dtype_and_the_root_returns_its_own", REACHED),
    "M2-5": ("step BuildMesh", "test test_hsdp_has_a_mesh_of_two_axes_and_shards_over_the_second", REACHED),
    "M2-6": (
        "test test_what_is_packed_is_ignored_and_everything_else_sharded",
        "test test_what_stays_whole_trains_saves_resumes_and_exports_as_in_one_process",
        REACHED,
    ),
    "M2-7": (
        "rule units.packed",
        "rule units.packed-whole",
        "test test_an_adapter_is_sharded_by_fsdp2_learns_what_ddp_learns_and_the_bytes_stay",
        "test test_packed_weights_are_sharded_by_fsdp2_and_the_adapter_learns_what_ddp_learns",
    ),
    "M2-8": ("step StashTensors", "step AllocateTensors", "test test_buffers_that_have_values_keep_them"),
    "M2-9": ("rule wrap.class-not-found", "rule blocks.one-unit"),
    "M2-10": (
        "test test_a_selection_gives_children_before_parents_and_never_the_root",
        "rule wrap.container",
    ),
    "M2-11": ("deviation embedding, final norm and head stay with the root, which is gathered once and kept",),
    "M2-12": ("test test_the_root_alone_holds_everything_when_nothing_is_wrapped",),
    "M2-13": (
        "step ReadTensors",
        "step SendTensors",
        "test test_a_model_that_rank_0_alone_has_trains_as_in_one_process",
        "test test_each_stage_gets_the_values_and_learns_what_the_plain_model_learns",
        "deviation asked for with BroadcastWeights; with files every rank reads its own bytes, and none broadcasts",
        REACHED,
    ),
    "M2-14": (
        "step InitializeTensors",
        "test test_buffers_are_read_whole_computed_or_kept_shared",
        "test test_buffers_of_both_kinds_keep_rank_0_s_values_and_dtypes",
    ),
    "M2-15": ("deviation trained parameters alone are cast (M2-16)",),
    "M2-16": ("step UpcastParameters", "test test_frozen_parameters_are_not_upcast", REACHED),
    "M2-17": ("test test_every_unit_is_sharded_on_dim_0_and_ties_hold",),
}
