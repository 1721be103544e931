"""What was prepared, an audit gives back: the config, a plan with the same steps and layout, and the same tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

import prepkit as pk
from prepkit import config as c
from prepkit.auditing.reconstruction import reconstruct
from prepkit.auditing.reconstruction.selection import selection
from prepkit.config import Config
from prepkit.facts.run import RunFacts
from prepkit.render.plan import tables
from prepkit.testing import tiny_model
from tests.audit import by_sharding, clean
from tests.audit.case import Case, adam, divided, net
from tests.audit.fabric_double import set_up
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang
from tests.support.launch import launched
from tests.support.reconstructed import differences

ADAM = c.AdamW(lr=0.05, groups=(c.Group(names=("*.bias",), weight_decay=0.0),))
CUT = c.TPPlan((c.TPLayer("enter", "colwise", None, "replicate"), c.TPLayer("blocks.*.inner", "replicate")))
BLOCKS = c.WrapClasses(("Block",))
CONFIGS: dict[str, Config] = {
    "DDP": Config(
        engine=c.DDP(bucket_cap_mb=1.0, static_graph=True, hook=c.CompressHook(dtype="float16")),
        precision=c.BF16(),
        checkpointing=c.CheckpointBlocks(blocks=BLOCKS, keep_ops=("aten.mm",)),
        optimizer=c.SGD(lr=0.1, momentum=0.9),
    ),
    "FSDP1": Config(
        engine=c.FSDP1(wrap=BLOCKS, sharding="SHARD_GRAD_OP", use_orig_params=False),
        precision=c.BF16(reduce_dtype="bfloat16"),
        checkpointing=c.CheckpointBlocks(blocks=BLOCKS, offload=True),
        optimizer=c.AdamW(lr=0.05),
    ),
    "FSDP2": Config(
        engine=c.FSDP2(wrap=BLOCKS, offload=c.OffloadToCPU(pin_memory=False), ignored=("head",)),
        precision=c.BF16(output_dtype="bfloat16"),
        compile=c.CompileBlocks(blocks=BLOCKS, backend="eager", dynamic=False),
        checkpointing=c.CheckpointBlocks(blocks=c.WrapPaths(("blocks.1",)), preserve_rng_state=False),
        optimizer=c.Adam(amsgrad=True),
    ),
    "FSDP2, whole": Config(
        engine=c.FSDP2(wrap=BLOCKS, reshard_after_forward=False),
        compile=c.CompileModel(mode="max-autotune", fullgraph=True),
        optimizer=c.RMSprop(),
    ),
    "TensorParallel": Config(engine=c.TensorParallel(), tp_plan=CUT, precision=c.BF16(), optimizer=c.Adagrad()),
    "ZeRO 1": Config(engine=c.DeepSpeed(stage=1, micro_batch=2), clip=c.ClipNorm(0.5), accumulation=3, optimizer=ADAM),
    "ZeRO 3": Config(
        engine=c.DeepSpeed(stage=3, micro_batch=2),
        precision=c.BF16(),
        checkpointing=c.CheckpointBlocks(blocks=BLOCKS),
        accumulation=1,
        optimizer=c.AdamW(lr=0.05),
    ),
}
"""One for each engine; together they vary what leaves a trace."""


def told(rank: int, world: int, name: str) -> tuple[Config, str, str, str]:
    """The config that an audit tells, what its plan has other than the true one, and the two plans' tables."""
    if name.startswith("ZeRO"):
        lean()
    plan = pk.build_plan(CONFIGS[name], net())
    ready = pk.apply(plan)
    try:
        audit = pk.audit(ready.model, ready.optimizer)
        return audit.config(), differences(plan, audit.plan()), audit.explain(), tables(plan)
    finally:
        ready.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_two_processes_tell_what_they_were_prepared_with(gang2: Gang, name: str) -> None:
    if name.startswith("ZeRO"):
        pytest.importorskip("deepspeed")
    true = CONFIGS[name]
    for config, unlike, explained, shown in gang2.run(told, name):
        assert unlike == ""
        assert explained.endswith(shown)
        if not name.startswith("ZeRO"):  # whose own JSON says it all, and in other words
            assert (config.engine, config.optimizer) == (true.engine, true.optimizer)
        for field in ("mesh", "precision", "compile", "checkpointing", "accumulation", "clip"):
            assert getattr(config, field) == getattr(true, field), field


def flattened_ties(rank: int, world: int) -> list[tuple[str, Any, Any]]:
    """Of a tied parameter and of a shared block: the true ties, and those that flat parameters tell."""
    seen = []
    for wrap in (c.WrapRoot(), BLOCKS):
        model = net()
        if wrap == BLOCKS:
            model.blocks[2] = model.blocks[0]
        else:
            model.blocks[1].inner.weight = model.enter.weight
        plan = pk.build_plan(Config(engine=c.FSDP1(wrap=wrap, use_orig_params=False), optimizer=c.AdamW()), model)
        ready = pk.apply(plan)
        told = pk.audit(ready.model, ready.optimizer).plan()
        seen.append((differences(plan, told), plan.facts.model.ties, told.facts.model.ties))
        ready.close()
    return seen


def test_ties_are_told_of_flat_parameters(gang2: Gang) -> None:
    for seen in gang2.run(flattened_ties):
        for unlike, true, ties in seen:
            assert unlike == ""
            assert true != ()
            assert sorted(ties) == sorted(true)


# --- what others have prepared ---


def by_others(rank: int, world: int) -> dict[str, Any]:
    """The config and what a plan of FSDP2 changes; or the reasons against one, and what is explained all the same."""
    seen: dict[str, Any] = {}
    for make in (
        *(clean.accelerated_mixed, clean.accelerated_accumulation, clean.plain_ddp, clean.ddp_compiled),
        *(clean.fsdp1_flat, clean.fsdp1_mixed, clean.fsdp2_mixed, clean.tensor_parallel, clean.llama_under_fsdp2),
        *(unlike_units, root_without_unit, by_sharding.fsdp1_under_checkpoints, compiled_inside_ddp, cut_by_hand),
    ):
        with launched(rank, world):
            case = make(rank, world)
            audit = pk.audit(case.model, case.optimizer, case.scheduler, case.loaders, env=HERE)
        try:
            config = audit.config()
            mine = pk.build_plan(c.Config(engine=c.FSDP2(), optimizer=config.optimizer), audit.plan().facts)
            seen[make.__name__] = config, [str(change) for change in pk.diff(audit.plan(), mine)]
        except pk.PlanRejected as refused:
            seen[make.__name__] = [finding.what for finding in refused.findings], audit.explain()
    return seen


HERE = pk.Env.declare(world_size=2, device="cpu", torch=torch.__version__)


def unlike_units(rank: int, world: int) -> Case:
    """One unit computes in bfloat16, the others as stored."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = net()
    fully_shard(model.blocks[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fully_shard(model.blocks[1])
    return Case(model=fully_shard(model), optimizer=adam(model))


def compiled_inside_ddp(rank: int, world: int) -> Case:
    model = net()
    model.compile()
    return Case(model=clean.ddp(model), optimizer=adam(model))


def cut_by_hand(rank: int, world: int) -> Case:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model, mesh = net(), init_device_mesh("cpu", (world,))
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0)]))
    return Case(model=model, optimizer=adam(model))


def root_without_unit(rank: int, world: int) -> Case:
    from torch.distributed.fsdp import fully_shard

    model = net()
    for block in model.blocks:
        fully_shard(block)
    return Case(model=model, optimizer=adam(model))


def test_what_other_libraries_have_prepared_has_a_config_or_every_reason_against_one(gang2: Gang) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    for seen in gang2.run(by_others, timeout=120.0):
        assert seen["plain_ddp"][0].engine == c.DDP(gradient_as_bucket_view=False)
        assert seen["ddp_compiled"][0].compile == c.CompileModel()
        assert seen["accelerated_mixed"][0].precision == c.BF16()
        assert seen["accelerated_mixed"][0].accumulation is None
        assert seen["accelerated_accumulation"][0].accumulation == 2
        assert seen["fsdp1_flat"][0].engine == c.FSDP1(wrap=BLOCKS, use_orig_params=False)
        assert seen["fsdp1_mixed"][0].precision == c.BF16(reduce_dtype="bfloat16", output_dtype="bfloat16")
        assert seen["fsdp2_mixed"][0].engine.wrap == BLOCKS
        assert seen["llama_under_fsdp2"][0].engine.wrap == c.WrapClasses(("LlamaDecoderLayer",))
        assert seen["tensor_parallel"][0].tp_plan == c.TPPlan(
            (
                c.TPLayer("enter", "colwise", "replicate", "features"),
                c.TPLayer("blocks.0.inner", "rowwise", "features", "replicate"),
            )
        )
        engines = [change for change in seen["plain_ddp"][1] if change.startswith("config.engine: ")]
        assert len(engines) == 1
        assert engines[0].startswith("config.engine: {'broadcast_buffers'")
        assert "'cast_forward_inputs': True" in engines[0].partition(" -> ")[2]
        what, explained = seen["unlike_units"]
        assert what == ["the dtype that units compute in is not the same everywhere: None and bfloat16"]
        assert "no config of prepkit asks for it" in explained
        assert "memory of a rank" in explained
        assert seen["root_without_unit"][0] == ["the root is no unit; what no unit holds stays whole"]
        (what,) = seen["fsdp1_under_checkpoints"][0]
        assert what.startswith("the unit is recomputed from outside")
        (what,) = seen["compiled_inside_ddp"][0]
        assert what.startswith("what is compiled stands inside the wrapper")
        assert seen["cut_by_hand"][0] == [
            "1 parameter cut over ranks without the hooks of torch's styles",
            "2 ranks train, and no wrapper averages their gradients",
        ]


# --- one process ---


def test_reasons_are_told_all_at_once() -> None:
    model = net()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0], CheckpointImpl.REENTRANT)
    optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(2))], maximize=True)
    audit = pk.audit(model, optimizer)
    with pytest.raises(pk.PlanRejected) as refused:
        audit.config()
    assert [(one.rule, one.where, one.what) for one in refused.value.findings] == [
        ("audit.no-config", "model.blocks.0", "it is recomputed by torch's reentrant checkpoint"),
        ("audit.no-config", "optimizer", "`AdamW` steps tensors that are none of the model's"),
        ("audit.no-config", "optimizer", "`AdamW` has maximize=True, which AdamW of prepkit has not"),
    ]
    with pytest.raises(pk.PlanRejected):
        audit.plan()


def test_an_optimizer_of_no_known_class_is_taken_as_it_is() -> None:
    model = net()
    audit = pk.audit(model, torch.optim.NAdam(model.parameters(), lr=0.1))
    assert audit.config().optimizer is None
    facts = audit.plan().facts.optimizer
    assert facts is not None
    assert (facts.name, len(facts.groups[0].slots)) == ("NAdam", len(list(model.parameters())))


def test_what_a_rule_would_have_refused_is_accepted_by_name() -> None:
    model = net().bfloat16()
    audit = pk.audit(model, torch.optim.AdamW(model.parameters()))
    overridden = [finding.rule for finding in audit.plan().overridden]
    assert overridden == list(audit.config().overrides)


def test_what_a_rank_holds_now_is_counted() -> None:
    model = net()
    optimizer = adam(model)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    size = 4 * sum(param.numel() for param in model.parameters())
    steps = 4 * len(list(model.parameters()))
    facts = pk.audit(model, optimizer).facts
    assert facts.preparation is not None
    assert {one.what: one.bytes for one in facts.preparation.held} == {
        "parameters": size,
        "gradients": size,
        "buffers": 64,
        "optimizer state": 2 * size + steps,
    }


def test_facts_by_hand_have_no_config() -> None:
    with pytest.raises(ValueError, match=r"take those of pk\.audit"):
        reconstruct(RunFacts(model=tiny_model(), params=()))


@pytest.mark.parametrize(
    ("paths", "wrap"),
    [
        ((), c.WrapRoot()),
        (("layers.0", "layers.1"), c.WrapClasses(("Block",))),
        (("layers.0.mlp", "layers.1.mlp"), c.WrapPaths(("layers.*.mlp",))),
        (("layers.1", "head"), c.WrapPaths(("layers.1", "head"))),
        (("layers",), None),
    ],
)
def test_modules_are_told_by_class_where_they_are_all_of_it(paths: tuple[str, ...], wrap: c.Wrap | None) -> None:
    assert selection(frozenset(paths), tiny_model()) == wrap


# --- Fabric ---


def by_fabric(rank: int, world: int) -> tuple[list[str], Config]:
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    module, optimizer, loader = set_up(model, wrapped, adam(model), divided(rank, world), "bf16-mixed")
    audit = pk.audit(module, optimizer, loaders=[loader])
    return [finding.rule for finding in audit.findings], audit.config()


def test_what_fabric_has_set_up_is_audited_as_what_is_inside(gang2: Gang) -> None:
    for rules, config in gang2.run(by_fabric):
        assert rules == []
        assert config.engine == c.DDP(gradient_as_bucket_view=False)
        assert config.precision == c.BF16()
        assert config.optimizer == c.AdamW(lr=1e-3)


def test_what_fabric_itself_has_set_up_is_told() -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    fabric.launch()
    model = net()
    module, optimizer = fabric.setup(model, adam(model))
    audit = pk.audit(module, optimizer, loaders=[fabric.setup_dataloaders(divided(0, 1))])
    assert audit.findings == ()
    assert (audit.config().engine, audit.config().precision) == (c.Single(), c.BF16())
    assert audit.config().optimizer == c.AdamW(lr=1e-3)
    assert audit.facts.loaders[0].seen.name == "DataLoader"


def test_an_error_inside_fabrics_wrappers_is_found() -> None:
    model = net()
    module, optimizer, loader = set_up(model, model, adam(net()), divided(0, 1), "32-true")
    audit = pk.audit(module, optimizer, loaders=[loader])
    assert [finding.rule for finding in audit.findings] == ["run.orphans"]
    assert audit.facts.model.modules[0].path == ""
    assert audit.facts.optimizers[0].name == "AdamW"
    assert audit.facts.loaders[0].seen.name == "DataLoader"
    assert not audit.facts.loaders[0].seen.foreign


def test_an_accelerator_for_something_else_in_the_process_says_nothing_of_what_it_has_not_prepared() -> None:
    accelerate = pytest.importorskip("accelerate")
    with launched(0, 1):
        ours = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
        model = net()
        optimizer = adam(model)
        assert pk.audit(model, optimizer).config().accumulation is None
        model, optimizer = ours.prepare(model, optimizer)
        assert pk.audit(model, optimizer).config().accumulation == 4
