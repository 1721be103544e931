"""Which layers are cut, how their parameters lie, and what is refused."""

from __future__ import annotations

import pytest
from attrs import evolve

from prepkit.config import FSDP2, Config, Mesh, TensorParallel, TPLayer, TPPlan, TPPlanFromModel
from prepkit.facts import ArchitectureFacts, ClassFact, Facts, ModelFacts, ModuleFact, ParamFact
from prepkit.plan import Plan
from prepkit.plan.layout import local_shape
from prepkit.planner import plan
from prepkit.resolve.resolved import Resolved
from prepkit.rules import check
from prepkit.steps import BuildMesh, ParallelizeModules, ShardLoader, ShardUnits
from prepkit.testing import tiny_facts, tiny_loader, tiny_model

ROWS = TPPlan(
    (
        TPLayer("embed", "rowwise"),
        TPLayer("layers.*.attn", "colwise"),
        TPLayer("layers.*.mlp", "rowwise", input_layout="replicate"),
        TPLayer("norm", "sequence", output_layout="replicate"),
        TPLayer("head", "colwise", output_layout="replicate"),
    )
)
ALONE = Config(engine=TensorParallel(), tp_plan=ROWS)
SHARDED = Config(engine=FSDP2(), mesh=Mesh(tensor=2), tp_plan=ROWS)


def made(cfg: Config, facts: Facts) -> Plan:
    return plan(cfg, facts).unwrap()


def steps(planned: Plan, kind: type) -> list[object]:
    return [one.step for one in planned.steps if isinstance(one.step, kind)]


def rules(cfg: Config, facts: Facts) -> list[str]:
    return [finding.rule for finding in check(cfg, facts) if finding.rule.startswith(("tensor.", "mesh."))]


def test_rows_become_paths_with_every_layout_said() -> None:
    (step,) = steps(made(ALONE, tiny_facts(world=2)), ParallelizeModules)
    assert isinstance(step, ParallelizeModules)
    assert step.axis == "tensor"
    assert [(cut.paths, cut.style, cut.input_layout, cut.output_layout) for cut in step.styles] == [
        (("embed",), "rowwise", "replicate", "replicate"),
        (("layers.0.attn", "layers.1.attn"), "colwise", "replicate", "features"),
        (("layers.0.mlp", "layers.1.mlp"), "rowwise", "replicate", "replicate"),
        (("norm",), "sequence", "sequence", "replicate"),
        (("head",), "colwise", "replicate", "replicate"),
    ]


def test_the_mesh_has_the_tensor_axis_last_and_data_is_divided_over_the_others() -> None:
    facts = tiny_facts(world=8, loader=tiny_loader())
    both = made(SHARDED, facts)
    assert [(axis.name, axis.size) for axis in both.mesh] == [("shard", 4), ("tensor", 2)]
    assert steps(both, BuildMesh)[0].axes == both.mesh  # type: ignore[attr-defined]  # a BuildMesh
    assert [step.axes for step in (*steps(both, ShardUnits), *steps(both, ShardLoader))] == [("shard",)] * 2  # type: ignore[attr-defined]
    alone = made(ALONE, tiny_facts(world=2, loader=tiny_loader()))
    assert [step.axes for step in steps(alone, ShardLoader)] == [()]  # type: ignore[attr-defined]


def test_the_layout_says_how_each_parameter_lies_on_each_axis() -> None:
    lies = {one.name: one.placements for one in made(ALONE, tiny_facts(world=2)).layout}
    assert lies["embed.weight"] == lies["head.weight"] == lies["layers.0.attn.weight"] == ("shard(0)",)
    assert lies["layers.0.mlp.weight"] == ("shard(1)",)
    assert lies["norm.weight"] == ("replicate",)
    some = evolve(SHARDED, tp_plan=TPPlan(ROWS.layers[1:3]))
    lies = {one.name: one.placements for one in made(some, tiny_facts(world=8)).layout}
    assert lies["layers.0.attn.weight"] == ("strided(0)", "shard(0)")
    assert lies["layers.0.mlp.weight"] == ("shard(0)", "shard(1)")
    assert lies["head.weight"] == ("shard(0)", "off-mesh")


def test_the_tensor_axis_cuts_before_shards_are_made() -> None:
    planned = made(evolve(SHARDED, mesh=Mesh(shard=3, tensor=2)), tiny_facts(tiny_model(width=8), world=6))
    attn = next(one for one in planned.layout if one.name == "layers.0.attn.weight")
    assert [local_shape(attn, planned.mesh, rank) for rank in range(6)] == [(2, 8)] * 4 + [(0, 8)] * 2


def test_the_models_own_plan_is_mapped_and_what_torch_lacks_is_refused_by_path_and_style() -> None:
    own = (("embed", "embedding_rowwise"), ("layers.*.attn", "colwise"), ("norm", "replicate"))
    model = evolve(tiny_model(), tensor_plan=own)
    cfg = Config(engine=TensorParallel())
    resolved = Resolved(cfg=cfg, facts=tiny_facts(model, world=2))
    assert [style.style for style in resolved.tp.styles] == ["rowwise", "colwise"]
    assert rules(cfg, tiny_facts(model, world=2)) == []
    model = evolve(model, tensor_plan=(*own, ("layers.*.mlp", "packed_colwise")))
    (finding,) = (f for f in check(cfg, tiny_facts(model, world=2)) if f.rule == "tensor.style-unknown")
    assert "`packed_colwise`" in finding.what
    assert finding.where == "model.layers.*.mlp"


@pytest.mark.parametrize(
    ("path", "own", "expected"),
    [
        ("layers.*.attn", "colwise", ("colwise", "replicate", "features")),
        ("layers.*.attn", "colwise_rep", ("colwise", "replicate", "replicate")),
        ("layers.*.attn", "colwise_gather_output", ("colwise", "replicate", "replicate")),
        ("embed", "embedding_colwise", ("colwise", "replicate", "replicate")),
        ("layers.*.attn", "rowwise", ("rowwise", "features", "replicate")),
        ("layers.*.attn", "rowwise_rep", ("rowwise", "replicate", "replicate")),
        ("layers.*.attn", "rowwise_split_input", ("rowwise", "replicate", "replicate")),
        ("embed", "embedding_rowwise", ("rowwise", "replicate", "replicate")),
        ("norm", "sequence_parallel", ("sequence", "sequence", "sequence")),
        ("norm", "replicated_with_grad_allreduce", ("replicate", "heads", "heads")),
    ],
)
def test_each_style_of_transformers_has_the_layouts_that_it_has_there(
    path: str, own: str, expected: tuple[str, str, str]
) -> None:
    facts = tiny_facts(evolve(tiny_model(), tensor_plan=((path, own),)), world=2)
    (style,) = Resolved(cfg=Config(engine=TensorParallel()), facts=facts).tp.styles
    assert (style.style, style.input_layout, style.output_layout) == expected


def attention(heads: int, kv_heads: int) -> ModelFacts:
    """One attention of width 64 with its projections."""
    names = ("q_proj", "k_proj", "o_proj")
    classes = tuple(ClassFact(name=name, module="m") for name in ("Model", "SelfAttention", "Linear"))
    modules = (("", 0), ("attn", 1), *((f"attn.{name}", 2) for name in names))
    return ModelFacts(
        classes=classes,
        modules=tuple(ModuleFact(path=path, cls=cls) for path, cls in modules),
        params=tuple(ParamFact(name=f"attn.{name}.weight", shape=(64, 64), dtype="float32") for name in names),
        architecture=ArchitectureFacts(heads=heads, kv_heads=kv_heads),
        tensor_plan=tuple((f"attn.{name}", "rowwise" if name == "o_proj" else "colwise") for name in names),
    )


@pytest.mark.parametrize(("kv_heads", "fits"), [(8, True), (4, True), (2, False)])
def test_heads_have_to_divide_and_the_valid_degrees_are_named(kv_heads: int, fits: bool) -> None:
    facts = tiny_facts(attention(8, kv_heads), world=4)
    found = [f for f in check(Config(engine=TensorParallel()), facts) if f.rule == "tensor.not-divisible"]
    assert (not found) is fits
    if not fits:
        assert "model.config's kv_heads is 2: not to be divided over 4 tensor ranks" in found[0].what
        assert "Cut over 1 or 2 ranks" in found[0].fix


def test_heads_do_not_count_where_no_attention_is_cut() -> None:
    model = attention(8, 2)
    cfg = Config(engine=TensorParallel(), tp_plan=TPPlan((TPLayer("attn.o_proj", "rowwise"),)))
    assert rules(cfg, tiny_facts(model, world=4)) == []


@pytest.mark.parametrize(
    ("embed", "head", "broken"),
    [
        ("rowwise", "colwise", False),
        ("colwise", "rowwise", False),
        ("rowwise", "rowwise", True),
        (None, "colwise", True),
    ],
)
def test_a_tie_needs_the_same_cut_under_all_of_its_names(embed: str | None, head: str, broken: bool) -> None:
    rows = tuple(TPLayer(path, style) for path, style in (("embed", embed), ("head", head)) if style)  # type: ignore[arg-type]
    cfg = Config(engine=TensorParallel(), tp_plan=TPPlan(rows))
    assert ("tensor.tie-broken" in rules(cfg, tiny_facts(tiny_model(tied=True), world=2))) is broken


def test_packed_weights_and_layers_of_other_classes_are_no_layers_to_cut() -> None:
    packed = tuple(evolve(p, cls="Params4bit", dtype="uint8") for p in tiny_model().params)
    assert "tensor.not-a-layer" in rules(ALONE, tiny_facts(evolve(tiny_model(), params=packed), world=2))
    whole = evolve(ALONE, tp_plan=TPPlan((TPLayer("layers.0", "replicate"),)))
    assert "tensor.not-a-layer" in rules(whole, tiny_facts(world=2))


@pytest.mark.parametrize(
    ("mesh", "world", "expected"),
    [
        (Mesh(tensor=2), 8, []),
        (Mesh(tensor=-1), 8, ["mesh.two-rests", "tensor.not-read"]),
        (Mesh(tensor=0), 8, ["mesh.size-below-one", "tensor.not-read"]),
        (Mesh(tensor=3), 8, ["mesh.not-world-size", "tensor.not-read"]),
        (Mesh(shard=1, tensor=8), 8, ["mesh.tensor-takes-all", "tensor.not-divisible"]),
        (Mesh(replicate=4, shard=1, tensor=2), 8, ["mesh.nothing-sharded"]),
    ],
)
def test_the_tensor_size_of_a_mesh_obeys_the_same_rules_as_the_others(
    mesh: Mesh, world: int, expected: list[str]
) -> None:
    assert rules(evolve(SHARDED, mesh=mesh), tiny_facts(world=world)) == expected


def test_a_mesh_that_does_not_fit_is_answered_with_the_nearest_that_do() -> None:
    found = check(evolve(SHARDED, mesh=Mesh(replicate=2, shard=3, tensor=2)), tiny_facts(world=16))
    (finding,) = (f for f in found if f.rule == "mesh.not-world-size")
    assert "replicate 2 x shard 3 x tensor 2 = 12" in finding.what
    assert "Mesh(replicate=2, shard=4, tensor=2)" in finding.fix


def test_without_a_tensor_axis_the_models_own_plan_is_not_looked_at() -> None:
    odd = evolve(tiny_model(), tensor_plan=(("layers", "moe_tp_experts"),))
    cfg = Config(engine=FSDP2(), tp_plan=TPPlanFromModel())
    resolved = Resolved(cfg=cfg, facts=tiny_facts(odd, world=8))
    assert not resolved.tp.planned
    assert rules(cfg, tiny_facts(odd, world=8)) == []
    assert resolved.tp.placements == {}


def test_data_is_counted_by_readers_and_not_by_ranks() -> None:
    few = tiny_facts(world=8, loader=tiny_loader(length=4, drop_last=False))
    assert "loaders.fewer-than-ranks" in {f.rule for f in check(Config(engine=FSDP2()), few)}
    assert "loaders.fewer-than-ranks" not in {f.rule for f in check(SHARDED, few)}
