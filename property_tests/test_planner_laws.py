"""Laws of planning: a function of its inputs, rank-free, in an order that every engine can stand on."""

from __future__ import annotations

from math import prod

from attrs import asdict
from hypothesis import given

from prepkit import codec
from prepkit.config import DDP, FSDP1, XLA, Config, DeepSpeed, Single, TensorParallel
from prepkit.facts import Facts
from prepkit.plan import Plan
from prepkit.plan.layout import local_shape
from prepkit.planner import plan
from prepkit.testing import legal, plans

DEEPSPEED = (
    "StartProcessGroup",
    "Agree",
    "CheckFiles",
    "StashTensors",
    "CastForward",
    "CheckpointModules",
    "MarkLeafModules",
    "PartitionParameters",
    "AllocateTensors",
    "InitializeTensors",
    "ReadTensors",
    "SendTensors",
    "CreateOptimizer",
    "ConvertOptimizer",
    "InitializeDeepSpeed",
    "CompileModules",
    "RegisterEntryPoints",
    "ShardLoader",
)
"""The order under DeepSpeed, which takes the optimizer with the model, and is compiled as it stands."""
ORDER = (
    "StartProcessGroup",
    "Agree",
    "CheckFiles",
    "StashTensors",
    "BuildMesh",
    "ReleaseOptimizer",
    "MoveModel",
    "MakeContiguous",
    "UpcastParameters",
    "ParallelizeModules",
    "ConvertSyncBatchNorm",
    "AutocastForward",
    "CheckpointModules",
    "CompileModules",
    "ShardUnits",
    "WrapFSDP1",
    "AllocateTensors",
    "InitializeTensors",
    "ReadTensors",
    "SendTensors",
    "WrapDDP",
    "RebindOptimizer",
    "RegroupOptimizer",
    "CreateOptimizer",
    "CreateGradScaler",
    "AverageGradients",
    "ShardLoader",
)
"""The one order that all engines keep, but for ``PLACED``."""
PLACED = {
    "ConvertFP8Linears",
    "ConvertTransformerEngine",
    "AutocastFP8Forward",
    "InitializeMSAMP",
    "PrecomputeFloat8Scales",
    "MoveToXLA",
    "ReduceXLAGradients",
    "RegisterEntryPoints",
}
"""Float8, XLA and entry points have laws of their own; the compilation of a whole model goes around DDP and FSDP1, and
the move of a model whose layers are cut waits until they are."""
ASIDE = {
    "CreateOptimizer",
    "CreateGradScaler",
    "ReduceXLAGradients",
    "PrecomputeFloat8Scales",
    "AverageGradients",
    "ShardLoader",
    "WrapLoader",
}
"""What changes no module."""
SHARDS = {"ShardUnits", "WrapFSDP1"}
CUTS = {"ParallelizeModules"}
REBINDS = {"RebindOptimizer", "RegroupOptimizer"}
WRITES = {"InitializeTensors", "ReadTensors", "SendTensors"}
"""What they write over is lost."""
NO_WAY_BACK = SHARDS | WRITES
"""``InitializeDeepSpeed`` has none either; compilation comes after it, and can only fail where DeepSpeed has."""


WHOLE = ("replicate", "off-mesh")


def kinds(made: Plan) -> list[str]:
    return [type(one.step).__name__ for one in made.steps]


@given(legal())
def test_equal_inputs_give_equal_plans_byte_for_byte(pair: tuple[Config, Facts]) -> None:
    once, again = plan(*pair).unwrap(), plan(*pair).unwrap()
    assert codec.dumps(once) == codec.dumps(again)


@given(plans())
def test_steps_keep_their_order(made: Plan) -> None:
    names = set(kinds(made))
    order = DEEPSPEED if "InitializeDeepSpeed" in names else ORDER
    wrapped = isinstance(made.config.engine, DDP | FSDP1)
    own = PLACED | {"CompileModules"} if wrapped else PLACED
    own |= {"MoveModel"} if "ParallelizeModules" in names else set()
    prepared = [kind.replace("WrapLoader", "ShardLoader") for kind in kinds(made)]  # loader after loader
    found = [order.index(kind) for kind in prepared if kind not in own]
    assert found == sorted(found)


@given(plans())
def test_entry_points_go_through_what_is_around_the_model_by_then(made: Plan) -> None:
    names = kinds(made)
    if "RegisterEntryPoints" in names:
        later = set(names[names.index("RegisterEntryPoints") + 1 :])
        patched = isinstance(made.config.engine, Single | TensorParallel | XLA)  # what compiles goes around that
        assert later <= ASIDE | REBINDS | WRITES | {"AllocateTensors"} | ({"CompileModules"} if patched else set())


@given(plans())
def test_what_has_no_way_back_comes_after_all_that_changes_the_model(made: Plan) -> None:
    changes = {
        "ConvertFP8Linears",
        "AutocastFP8Forward",
        "MoveModel",
        "UpcastParameters",
        "AutocastForward",
        "CheckpointModules",
        "CompileModules",
    }
    names = kinds(made)
    for index, name in enumerate(names):
        if name in NO_WAY_BACK:
            # The whole model is the wrapper; whether the float8 autocast can be made was asked before.
            wrapped = isinstance(made.config.engine, DDP | FSDP1 | DeepSpeed)
            around = {"CompileModules", "AutocastFP8Forward"} if wrapped else set()
            assert not (changes - around) & set(names[index:])


@given(plans())
def test_layers_are_cut_after_the_cast_and_before_they_are_moved_checkpointed_compiled_and_sharded(made: Plan) -> None:
    names = kinds(made)
    if "ParallelizeModules" in names:
        cut = names.index("ParallelizeModules")
        assert not {"BuildMesh", "ReleaseOptimizer", "UpcastParameters"} & set(names[cut:])
        assert not {"MoveModel", "CheckpointModules", "CompileModules", "ShardUnits"} & set(names[:cut])


@given(plans())
def test_an_optimizer_is_released_exactly_where_it_is_rebound_after_sharding(made: Plan) -> None:
    names = kinds(made)
    replaced = [names.index(kind) for kind in (*CUTS, *SHARDS) if kind in names]
    if "ReleaseOptimizer" in names:
        (bind,) = REBINDS.intersection(names)
        assert names.index("ReleaseOptimizer") < min(replaced) <= max(replaced) < names.index(bind)
    stays = made.facts.model.units and not WRITES.intersection(names)  # it arrives sharded, and keeps its tensors
    released = bool(replaced) and made.facts.optimizer is not None and not stays
    assert released == ("ReleaseOptimizer" in names)


@given(plans())
def test_every_step_has_a_reason_and_a_source(made: Plan) -> None:
    assert all(one.reason and one.behaviour_ids for one in made.steps)


@given(plans())
def test_no_step_mentions_a_rank(made: Plan) -> None:
    for one in made.steps:
        assert not {"rank", "local_rank", "index_of_rank"} & set(asdict(one.step))


@given(plans())
def test_the_layout_is_of_every_parameter_and_its_parts_make_the_whole(made: Plan) -> None:
    assert [one.name for one in made.layout] == [param.name for param in made.facts.model.params]
    if made.world_size > 64:
        return
    for one in made.layout:
        if "partition" in one.placements:
            parts = [local_shape(one, made.mesh, rank)[0] for rank in range(made.world_size)]
            assert len(set(parts)) == 1
            assert 0 <= sum(parts) - prod(one.shape) < made.world_size
        elif one.flat is not None and one.flat.shards > 1:
            copies = made.mesh[0].size if len(made.mesh) > 1 else 1
            held = sum(local_shape(one, made.mesh, rank)[0] for rank in range(made.world_size))
            assert held == prod(one.shape) * copies
        elif one.cls == "DTensor":
            whole = (axis.size for axis, word in zip(made.mesh, one.placements, strict=True) if word in WHOLE)
            held = sum(prod(local_shape(one, made.mesh, rank)) for rank in range(made.world_size))
            assert held == prod(one.shape) * prod(whole)
        else:
            assert local_shape(one, made.mesh, made.world_size - 1) == one.shape


@given(plans())
def test_the_parameters_of_a_flat_one_lie_one_after_the_other_inside_it(made: Plan) -> None:
    ends: dict[str, int] = {}
    for one in made.layout:
        if one.flat is not None:
            assert ends.get(one.unit, 0) <= one.flat.start
            ends[one.unit] = one.flat.start + prod(one.shape)
            assert ends[one.unit] <= one.flat.size == one.flat.shard * one.flat.shards
