"""Rules one by one: their golden messages, and the cases that laws over drawn values would rarely meet.

After a message was changed on purpose: ``PREPKIT_WRITE_GOLDEN=1 python -m pytest tests/rules/test_rules.py -k golden``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from attrs import evolve

from prepkit.config import (
    BF16,
    DDP,
    FP16,
    FSDP1,
    FSDP2,
    XLA,
    AdamW,
    CheckpointBlocks,
    ClipNorm,
    CommHook,
    CompileBlocks,
    CompressHook,
    Config,
    Intent,
    KeepLoaders,
    Mesh,
    OffloadToCPU,
    PowerSGDHook,
    Wrap,
    WrapBlocks,
    WrapClasses,
    WrapPaths,
    WrapRoot,
    WrapSize,
)
from prepkit.facts import ArchitectureFacts, ClassFact, Env, Facts, ModelFacts, ModuleFact, ParamFact
from prepkit.findings import Finding, Severity
from prepkit.resolve.modules import select
from prepkit.rules import RULES, check, split
from prepkit.rules.rule import Hit, Rule
from prepkit.testing import COUNTEREXAMPLES
from prepkit.testing.tiny import marked, tiny_facts, tiny_loader, tiny_model, with_batchnorm

GOLDEN = Path(__file__).parent / "golden"
by_rule = pytest.mark.parametrize("rule", RULES, ids=[rule.id for rule in RULES])


def ids(cfg: Config, facts: Facts | None = None) -> list[str]:
    return [finding.rule for finding in check(cfg, facts or tiny_facts())]


def said(rule: str, cfg: Config, facts: Facts | None = None) -> Finding:
    (found,) = [finding for finding in check(cfg, facts or tiny_facts()) if finding.rule == rule]
    return found


# --- the table -----------------------------------------------------------------------------------------------------


def test_every_rule_has_a_provoking_pair_and_every_pair_a_rule_in_the_same_order() -> None:
    assert list(COUNTEREXAMPLES) == [rule.id for rule in RULES]


def test_no_two_rules_have_the_same_id() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)


@by_rule
def test_every_rule_says_what_holds_what_to_do_and_where_it_comes_from(rule: Rule) -> None:
    assert rule.summary.endswith(".")
    assert rule.fix.endswith(".")
    assert rule.source
    assert rule.overridable or rule.severity is Severity.ERROR


@by_rule
def test_golden_message(rule: Rule) -> None:
    lines = [str(finding) for finding in check(*COUNTEREXAMPLES[rule.id]()) if finding.rule == rule.id]
    text = "\n".join(lines) + "\n"
    path = GOLDEN / f"{rule.id}.txt"
    if os.environ.get("PREPKIT_WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"no golden message; see the top of {Path(__file__).name}"
    assert text == path.read_text(encoding="utf-8")


def test_no_golden_message_is_left_of_a_rule_that_is_gone() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {rule.id for rule in RULES}


# --- check and split -----------------------------------------------------------------------------------------------


def test_a_usual_config_has_no_finding() -> None:
    assert check(Config(), tiny_facts()) == ()
    assert check(Config(engine=DDP(), precision=BF16()), tiny_facts(world=8)) == ()
    assert check(Config(engine=FSDP2(), compile=CompileBlocks()), tiny_facts(world=8, device="cuda")) == ()


def test_all_findings_come_at_once() -> None:
    found = ids(
        Config(engine=FSDP2(wrap=WrapClasses(("Blok",))), mesh=Mesh(replicate=3), accumulation=0, timeout_s=-1.0)
    )
    assert found == ["mesh.not-world-size", "wrap.class-not-found", "values.accumulation", "values.timeout"]


def test_an_override_moves_an_error_out_of_what_stands() -> None:
    cfg = Config(overrides=("mesh.single-many-ranks",))
    standing, accepted = split(cfg, check(cfg, tiny_facts(world=2)))
    assert (standing, [finding.rule for finding in accepted]) == ((), ["mesh.single-many-ranks"])


def test_an_override_of_a_rule_without_which_there_is_no_plan_is_an_error_that_stands() -> None:
    cfg = Config(engine=FSDP2(), mesh=Mesh(shard=3), overrides=("mesh.not-world-size", "overrides.unknown"))
    standing, accepted = split(cfg, check(cfg, tiny_facts(world=8)))
    assert accepted == ()
    assert [f.rule for f in standing] == ["mesh.not-world-size", "overrides.unknown", "overrides.unknown"]


def test_the_id_of_a_rule_of_the_users_own_is_known_to_the_overrides() -> None:
    mine = Rule(
        id="mine.no-training", summary="Never.", check=lambda *_: iter((Hit("config", "It trains."),)), fix="Stop."
    )
    cfg = Config(overrides=("mine.no-training",))
    found = check(cfg, tiny_facts(), (*RULES, mine))
    assert [(f.rule, f.fix) for f in found] == [("mine.no-training", "Stop.")]
    assert split(cfg, found, (*RULES, mine)) == ((), found)
    assert "overrides.unknown" in ids(cfg)


# --- mesh ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "world", "rules"),
    [
        (Config(engine=FSDP2(), mesh=Mesh(replicate=2)), 8, []),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=-1, shard=4)), 8, []),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=2, shard=4)), 8, []),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=5)), 8, ["mesh.not-world-size"]),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=-2, shard=0)), 8, ["mesh.size-below-one"] * 2),
        (Config(engine=FSDP2(), mesh=Mesh(replicate=8)), 8, ["mesh.nothing-sharded"]),
        (Config(engine=DDP(), mesh=Mesh(replicate=8)), 8, []),
        (Config(engine=DDP(), mesh=Mesh(replicate=-1, shard=1)), 8, []),
        (Config(engine=DDP(), mesh=Mesh(replicate=3)), 8, ["mesh.not-world-size"]),
        (Config(engine=DDP(), mesh=Mesh(replicate=4, shard=2)), 8, ["mesh.ddp-does-not-shard"]),
        (Config(engine=DDP(), mesh=Mesh()), 8, ["mesh.ddp-does-not-shard"]),
        (Config(mesh=Mesh()), 1, []),
        (Config(mesh=Mesh(shard=2)), 1, ["mesh.single-has-none"]),
    ],
)
def test_a_mesh_is_refused_exactly_when_engine_and_world_size_do_not_allow_it(
    cfg: Config, world: int, rules: list[str]
) -> None:
    assert ids(cfg, tiny_facts(world=world)) == rules


def test_a_mesh_that_does_not_multiply_is_told_the_nearest_ones_and_is_mended_to_the_first() -> None:
    cfg, facts = Config(engine=FSDP2(), mesh=Mesh(replicate=5, shard=8)), tiny_facts(world=24)
    assert "Mesh(replicate=4, shard=6) or Mesh(replicate=3, shard=8)" in said("mesh.not-world-size", cfg, facts).fix
    (rule,) = [rule for rule in RULES if rule.id == "mesh.not-world-size"]
    assert rule.repair is not None
    assert rule.repair(cfg, facts).mesh == Mesh(replicate=4, shard=6)


def test_no_mesh_is_proposed_in_which_nothing_is_sharded() -> None:
    cfg = Config(engine=FSDP2(), mesh=Mesh(replicate=6, shard=2))
    fix = said("mesh.not-world-size", cfg, tiny_facts(world=7)).fix
    assert "Mesh(replicate=1, shard=7)" in fix
    assert "replicate=7" not in fix


@pytest.mark.parametrize(
    ("size", "fires"), [(True, 0), (False, 0), (2, 0), (4, 0), (1, 1), (8, 1), (3, 1), (0, 1), (-2, 1), (16, 1)]
)
def test_a_number_to_reshard_to_is_a_proper_factor_of_the_shard_size(size: bool | int, fires: int) -> None:
    cfg = Config(engine=FSDP2(reshard_after_forward=size))
    assert ids(cfg, tiny_facts(world=8)) == ["reshard.not-a-factor"] * fires


# --- selections ----------------------------------------------------------------------------------------------------


def wrapped(wrap: Wrap, model: ModelFacts | None = None) -> tuple[Config, Facts]:
    return Config(engine=FSDP2(wrap=wrap)), tiny_facts(model, world=2)


def test_a_class_in_the_wrong_case_gets_the_right_spelling() -> None:
    assert said("wrap.class-not-found", *wrapped(WrapClasses(("block",)))).fix == 'Write WrapClasses(("Block",)).'


def test_a_base_class_is_told_which_class_inherits_from_it() -> None:
    model = tiny_model()
    classes = tuple(evolve(cls, mro=("BaseBlock",)) if cls.name == "Block" else cls for cls in model.classes)
    finding = said("wrap.class-not-found", *wrapped(WrapClasses(("BaseBlock",)), evolve(model, classes=classes)))
    assert "`Block` inherits from it" in finding.what
    assert finding.fix == 'Write WrapClasses(("Block",)).'


def test_the_class_of_the_root_is_not_found_below_it() -> None:
    assert ids(*wrapped(WrapClasses(("Tiny",)))) == ["wrap.class-not-found"]


@pytest.mark.parametrize("wrap", [WrapClasses(("ModuleList",)), WrapPaths(("layers",)), WrapPaths(("layer?",))])
def test_naming_only_containers_is_refused(wrap: Wrap) -> None:
    assert ids(*wrapped(wrap)) == ["wrap.container"]


def test_a_pattern_that_meets_a_container_among_others_passes_it_over() -> None:
    cfg, facts = wrapped(WrapPaths(("*",)))
    assert ids(cfg, facts) == []
    assert select(WrapPaths(("*",)), facts.model) == ("embed", "norm", "head")


@pytest.mark.parametrize("wrap", [WrapClasses(()), WrapPaths(()), WrapPaths(("layers.*", " "))])
def test_a_list_that_names_nothing_is_refused(wrap: Wrap) -> None:
    assert ids(*wrapped(wrap)) == ["wrap.empty"]


@pytest.mark.parametrize("wrap", [WrapRoot(), WrapSize(10**6)])
def test_one_unit_for_the_whole_model_is_a_warning_for_fsdp2_and_an_error_for_blocks(wrap: Wrap) -> None:
    assert ids(*wrapped(wrap)) == ["blocks.one-unit"]
    assert ids(Config(checkpointing=CheckpointBlocks(blocks=wrap))) == ["blocks.none-selected"]


def test_declared_blocks_of_which_one_is_present_are_in_order() -> None:
    model = evolve(tiny_model(), declared_blocks=("Block", "VisionLayer"))
    assert ids(*wrapped(WrapBlocks(), model)) == []


def test_lists_of_lists_are_not_taken_for_blocks() -> None:
    classes = (ClassFact(name="Net", module="m"), ClassFact(name="ModuleList", module="m", has_forward=False))
    tree = (("", 0), ("layers", 1), ("layers.0", 1), ("layers.1", 1))
    model = ModelFacts(
        classes=classes,
        modules=tuple(ModuleFact(path=path, cls=cls) for path, cls in tree),
        params=(ParamFact(name="weight", shape=(2,), dtype="float32"),),
    )
    assert select(WrapBlocks(), model) == ()
    assert select(WrapBlocks(), evolve(model, declared_blocks=("ModuleList",))) == ()


def test_mending_a_size_of_zero_leaves_no_selection_that_does_nothing() -> None:
    model = tiny_model(blocks=0)
    bare = evolve(model, params=(ParamFact(name="scale", shape=(4,), dtype="float32"),))
    cfg, facts = Config(checkpointing=CheckpointBlocks(blocks=WrapSize(0))), tiny_facts(bare)
    (rule,) = [rule for rule in RULES if rule.id == "wrap.size-below-one"]
    assert rule.repair is not None
    assert ids(cfg, facts) == ["wrap.size-below-one"]
    assert ids(rule.repair(cfg, facts), facts) == []


# --- ties and units ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "rules"),
    [
        (WrapBlocks(), []),
        (WrapPaths(("head",)), ["ties.split"]),
        (WrapPaths(("embed", "head")), ["ties.split"]),
        (WrapPaths(("norm",)), []),
    ],
)
def test_a_tie_is_refused_exactly_where_two_units_would_hold_it(wrap: Wrap, rules: list[str]) -> None:
    assert ids(*wrapped(wrap, tiny_model(tied=True))) == rules


def test_a_module_that_is_used_twice_is_no_split_tie() -> None:
    model = evolve(tiny_model(), ties=(("layers.0.attn.weight", "layers.7.attn.weight"),))
    assert ids(*wrapped(WrapBlocks(), model)) == []


def test_master_weights_make_the_dtypes_of_a_unit_uniform() -> None:
    model = tiny_model(extra=(ParamFact(name="layers.0.attn.lora", shape=(4,), dtype="bfloat16"),))
    cfg, facts = wrapped(WrapBlocks(), model)
    assert "units.mixed-dtypes" in ids(cfg, facts)
    assert ids(evolve(cfg, precision=BF16()), facts) == []
    assert "units.mixed-dtypes" in ids(evolve(cfg, precision=BF16(master_weights=False)), facts)


def test_frozen_parameters_may_have_a_dtype_of_their_own() -> None:
    lora = ParamFact(name="layers.0.attn.lora", shape=(4,), dtype="bfloat16", requires_grad=False)
    assert ids(*wrapped(WrapBlocks(), tiny_model(extra=(lora,)))) == ["units.mixed-requires-grad"]


def test_dtypes_that_differ_between_units_only_are_in_order() -> None:
    facts = tiny_facts(world=2)
    params = (evolve(p, dtype="float64") if p.name.startswith("layers.1.") else p for p in facts.model.params)
    cfg = Config(engine=FSDP2())
    mixed = evolve(facts, model=evolve(facts.model, params=tuple(params)))
    assert ids(cfg, mixed) == []
    assert ids(evolve(cfg, engine=FSDP2(wrap=WrapRoot())), mixed) == ["blocks.one-unit", "units.mixed-dtypes"]


# --- environment ---------------------------------------------------------------------------------------------------


def run_in(cfg: Config, **env: object) -> list[str]:
    usual = {"world_size": 4, "device": "cuda"}
    return ids(cfg, evolve(tiny_facts(), env=Env(**{**usual, **env})))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "rules"),
    [
        (None, []),
        ("cpu:gloo,cuda:nccl", []),
        ("gloo", []),
        ("nccl", ["environment.offload-backend"]),
        ("cpu:gloo", ["environment.backend"]),
        ("cpu:gloo, cuda:nccl", []),
        ("of-my-own", []),
    ],
)
def test_offloading_needs_a_backend_for_the_cpu_too(backend: str | None, rules: list[str]) -> None:
    assert run_in(Config(engine=FSDP2(offload=OffloadToCPU()), backend=backend)) == rules


def test_a_device_without_a_known_backend_is_refused_for_engines_of_several_processes_only() -> None:
    assert run_in(Config(engine=DDP()), device="mps") == ["environment.backend"]
    assert run_in(Config(engine=DDP(), device="cpu"), device="mps") == []
    assert run_in(Config(), device="mps", world_size=1) == []


def test_the_planner_knows_a_backend_for_every_device_that_passes() -> None:
    from prepkit.planner.pieces import COLLECTIVES

    refused = {kind for kind in (*COLLECTIVES, "mps", "tpu") if run_in(Config(engine=DDP()), device=kind)}
    assert refused == {"mps", "tpu"}


@pytest.mark.parametrize(
    ("device", "fix"),
    [("cuda", None), ("cpu", None), ("cuda:0", 'Write device="cuda".'), ("xpu", "Leave config.device out")],
)
def test_a_device_is_asked_for_by_the_type_that_is_there(device: str, fix: str | None) -> None:
    cfg, facts = Config(device=device), tiny_facts(device="cuda")
    found = [finding.fix for finding in check(cfg, facts) if finding.rule == "environment.device"]
    assert [text[: len(fix or "")] for text in found] == ([fix] if fix else [])


def test_a_device_that_is_not_there_hides_no_finding_about_the_one_that_is() -> None:
    found = run_in(Config(engine=DDP(), device="cuda", backend="nccl"), device="cpu")
    assert found == ["environment.device", "environment.backend"]


@pytest.mark.parametrize(("tasks", "fires"), [("4", 0), ("2", 0), ("1", 0), ("8", 1), ("3", 1), ("", 0), ("4(x2)", 0)])
def test_slurm_tasks_divide_the_world_size(tasks: str, fires: int) -> None:
    found = run_in(Config(engine=DDP()), variables=(("SLURM_NTASKS", tasks),))
    assert found == ["environment.slurm-tasks"] * fires


@pytest.mark.parametrize(
    ("name", "value", "engine", "fires"),
    [
        ("ACCELERATE_USE_FSDP", "True", DDP(), 1),
        ("ACCELERATE_USE_FSDP", "true", FSDP2(), 0),
        ("ACCELERATE_USE_FSDP", "false", DDP(), 0),
        ("ACCELERATE_USE_DEEPSPEED", "1", FSDP2(), 1),
    ],
)
def test_a_launcher_flag_of_another_engine_is_a_warning(name: str, value: str, engine: DDP | FSDP2, fires: int) -> None:
    assert run_in(Config(engine=engine), variables=((name, value),)) == ["environment.launcher-flag"] * fires


@pytest.mark.parametrize("value", ["true", "1", "false"])
def test_only_the_config_keeps_a_device_map_and_a_variable_that_says_so_is_named(value: str) -> None:
    facts = tiny_facts(
        evolve(tiny_model(), device_map=(("embed", "cuda:0"), ("head", "cuda:1"))),
        world=2,
        variables=(("ACCELERATE_BYPASS_DEVICE_MAP", value),),
    )
    fix = said("model.device-map", Config(engine=DDP()), facts).fix
    assert fix.endswith(f"keep_device_map=True. prepkit does not obey ACCELERATE_BYPASS_DEVICE_MAP={value}.")
    assert ids(Config(engine=DDP(), keep_device_map=True), facts) == []
    assert ids(Config(), evolve(facts, env=Env())) == []


@pytest.mark.parametrize("engine", [FSDP1(), FSDP2(), XLA()], ids=["fsdp1", "fsdp2", "xla"])
def test_only_ddp_keeps_a_model_that_is_spread(engine: FSDP1 | FSDP2 | XLA) -> None:
    spread = evolve(tiny_model(), device_map=(("embed", "cuda:0"), ("head", "cuda:1")))
    cfg, facts = Config(engine=engine, keep_device_map=True), tiny_facts(spread, world=2)
    assert "keep_device_map" not in said("model.device-map", cfg, facts).fix


def test_a_device_map_of_one_entry_is_no_map() -> None:
    facts = tiny_facts(evolve(tiny_model(), device_map=(("", "cuda:1"),)), world=2)
    assert ids(Config(engine=DDP()), facts) == []


@pytest.mark.parametrize(
    ("torch", "device", "ranks", "trains", "says"),
    [
        ("2.6.0", "cpu", 1, False, "fails where a unit is gathered"),
        ("2.6.1+cu124", "cpu", 4, True, "fails where a unit is gathered"),
        ("2.6.0", None, 4, True, ""),
        ("2.7.0", "cpu", 4, True, "adds the ranks' gradients up"),
        ("2.8.1+cpu", "cpu", 2, True, "adds the ranks' gradients up"),
        ("2.8.0", "cpu", 1, True, ""),
        ("2.8.0", "cpu", 4, False, ""),
        ("2.9.0", "cpu", 4, True, ""),
        ("", "cpu", 4, True, ""),
    ],
)
def test_fsdp2_gathers_and_averages_on_the_cpu(
    torch: str, device: str | None, ranks: int, trains: bool, says: str
) -> None:
    intent = Intent.TRAINING if trains else Intent.INFERENCE
    facts = evolve(tiny_facts(), env=Env(torch=torch, device="cuda", world_size=ranks))
    found = check(Config(engine=FSDP2(), device=device, intent=intent), facts)
    assert [says in one.what for one in found if one.rule == "environment.fsdp2-on-cpu"] == [True] * bool(says)
    assert run_in(Config(engine=FSDP1(), device=device), torch=torch) == []


@pytest.mark.parametrize(
    ("torch", "fires"),
    [("2.6.0", 0), ("2.13.0+cpu", 0), ("3.0", 0), ("", 0), ("2.5.1", 1), ("1.13.1", 1), ("nightly", 0)],
)
def test_torch_is_compared_by_number(torch: str, fires: int) -> None:
    assert run_in(Config(engine=DDP()), torch=torch) == ["environment.torch-version"] * fires


# --- precision, values, loaders ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "device", "fires"),
    [
        ({"capability": (7, 5)}, None, 1),
        ({"capability": (7, 5), "bf16": True}, None, 1),
        ({"capability": (7, 5)}, "cpu", 0),
        ({"capability": (8, 0)}, None, 0),
        ({"bf16": False}, None, 1),
        ({}, None, 0),
    ],
)
def test_bfloat16_is_refused_where_the_device_does_not_compute_in_it(
    env: dict[str, object], device: str | None, fires: int
) -> None:
    assert (
        run_in(Config(engine=DDP(), precision=BF16(), device=device), **env) == ["precision.bf16-unsupported"] * fires
    )


def test_bfloat16_on_xla_is_no_matter_of_the_gpu_beside_it() -> None:
    found = run_in(Config(engine=XLA(), precision=BF16()), capability=(7, 5), libraries=(("torch_xla", "2.9.0"),))
    assert found == []


@pytest.mark.parametrize(
    "spec",
    [
        AdamW(lr=-1.0),
        AdamW(lr=float("nan")),
        AdamW(lr=float("inf")),
        AdamW(betas=(1.0, 0.9)),
        AdamW(betas=(0.9, -0.1)),
        AdamW(eps=-1e-8),
        AdamW(weight_decay=-0.1),
    ],
)
def test_numbers_that_torch_refuses_are_refused_here(spec: AdamW) -> None:
    assert ids(Config(optimizer=spec), tiny_facts(optimizer=False)) == ["values.optimizer"]


@pytest.mark.parametrize(("limit", "fires"), [(1.0, 0), (float("inf"), 0), (0.0, 1), (-1.0, 1), (float("nan"), 1)])
def test_gradients_are_clipped_to_a_limit_above_zero(limit: float, fires: int) -> None:
    assert ids(Config(clip=ClipNorm(limit))) == ["values.clip"] * fires


@pytest.mark.parametrize("changes", [{"iterable": True}, {"custom_batches": True}, {"sampler": "custom"}])
def test_a_loader_that_cannot_be_split_is_refused_only_where_it_would_be(changes: dict[str, object]) -> None:
    facts = tiny_facts(world=2, loader=tiny_loader(**changes))
    assert len(ids(Config(engine=DDP()), facts)) == 1
    assert not [f for f in check(Config(engine=DDP(), loaders=KeepLoaders()), facts) if f.severity is Severity.ERROR]
    assert ids(Config(), evolve(facts, env=Env())) == []


@pytest.mark.parametrize(
    ("length", "batch", "drop", "rules"),
    [
        (64, 32, True, []),
        (63, 32, True, []),
        (62, 32, True, ["loaders.no-batch"]),
        (62, 32, False, []),
        (1, 1, False, ["loaders.fewer-than-ranks"]),
        (0, 1, False, ["loaders.no-batch"]),
        (None, 4, True, []),
    ],
)
def test_every_rank_gets_a_batch(length: int | None, batch: int, drop: bool, rules: list[str]) -> None:
    loader = tiny_loader(length=length, batch_size=batch, drop_last=drop)
    assert ids(Config(engine=DDP()), tiny_facts(world=2, loader=loader)) == rules


# --- quantised -----------------------------------------------------------------------------------------------------


def packed(*devices: str, bitsandbytes: str = "0.50.2", world: int = 1, device: str = "cuda") -> Facts:
    device_map = tuple((f"layers.{index}", held) for index, held in enumerate(devices))
    model = evolve(tiny_model(), quantised="8bit", device_map=device_map)
    env = Env(world_size=world, device=device, libraries=(("bitsandbytes", bitsandbytes),))
    return evolve(tiny_facts(model), env=env)


@pytest.mark.parametrize(
    ("facts", "rules"),
    [
        (packed(), []),
        (packed("cuda:local", "cuda:local"), []),
        (packed("cuda:local"), []),
        (packed("local"), []),
        (packed("xpu:local"), ["quantised.other-device"]),
        (packed("cuda:1"), ["quantised.other-device"]),
        (packed("cuda:0", "cuda:1"), []),  # one process may be a pipeline
        (packed("disk"), ["quantised.on-disk"]),
        (packed("cuda:0", "disk"), ["quantised.on-disk"]),
        (packed("cpu"), ["quantised.on-cpu"]),
        (packed("cpu", device="cpu"), []),
        (packed("cpu", device="cpu", bitsandbytes="0.45.0"), ["quantised.on-cpu"]),
        (packed("cuda:0", "cpu"), []),
        (packed("cuda:0", "cpu", bitsandbytes="0.43.3"), ["quantised.on-cpu"]),
        (packed("xpu:0", "cpu", device="xpu"), ["quantised.on-cpu"]),
        (packed("cuda:local", device="cpu"), ["quantised.other-device"]),
        (packed("cuda:0", device="cpu"), ["quantised.other-device"]),
    ],
    ids=str,
)
def test_packed_weights_lie_where_they_are_computed_with(facts: Facts, rules: list[str]) -> None:
    assert ids(Config(), facts) == rules


def test_a_packed_model_on_several_devices_is_refused_in_several_processes_also_when_the_map_is_kept() -> None:
    facts = packed("cuda:0", "cuda:1", world=2)
    assert ids(Config(engine=DDP()), facts) == ["model.device-map"]
    assert ids(Config(engine=DDP(), keep_device_map=True), facts) == ["quantised.spread"]
    assert ids(Config(engine=DDP()), packed("cuda:local", world=2)) == []


def test_an_environment_that_does_not_name_bitsandbytes_is_trusted() -> None:
    facts = packed("cpu", device="cpu")
    assert ids(Config(), evolve(facts, env=evolve(facts.env, libraries=()))) == []


@pytest.mark.parametrize(
    ("param", "fires"),
    [
        (ParamFact(name="head.w", shape=(64, 64), dtype="float32", requires_grad=False, cls="Params4bit"), 1),
        (ParamFact(name="head.w", shape=(2048, 1), dtype="uint8", requires_grad=False, cls="Params4bit"), 0),
        (ParamFact(name="head.w", shape=(1024, 1), dtype="bfloat16", requires_grad=False, cls="Params4bit"), 0),
        (ParamFact(name="head.w", shape=(64, 64), dtype="float16", requires_grad=False, cls="Int8Params"), 1),
        (ParamFact(name="head.w", shape=(64, 64), dtype="int8", requires_grad=False, cls="Int8Params"), 0),
        (ParamFact(name="head.w", shape=(64, 64), dtype="float32", cls="Int8Params"), 0),  # has_fp16_weights
    ],
)
def test_weights_that_are_not_packed_yet_are_refused(param: ParamFact, fires: int) -> None:
    assert ids(Config(), tiny_facts(tiny_model(extra=(param,)))) == ["quantised.not-packed"] * fires


# --- float16 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "asked", "fires"),
    [("cpu", None, 1), ("cuda", None, 0), ("cuda", "cpu", 1), ("mps", None, 0), ("neuron", None, 1), ("hpu", None, 0)],
)
def test_float16_is_refused_where_no_loss_is_scaled(device: str, asked: str | None, fires: int) -> None:
    found = run_in(Config(precision=FP16(), device=asked), device=device, world_size=1)
    assert found == ["precision.fp16-unsupported"] * fires


def test_float16_weights_need_float32_masters_under_float16_only() -> None:
    facts = tiny_facts(tiny_model(dtype="float16"), device="cuda")
    assert ids(Config(precision=FP16()), facts) == []
    found = ids(Config(precision=FP16(master_weights=False)), facts)
    assert found == ["precision.fp16-trains-fp16", "precision.no-master-weights"]
    assert (
        ids(Config(precision=FP16(master_weights=False), intent=Intent.INFERENCE), evolve(facts, optimizer=None)) == []
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"init_scale": 0.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
    ],
    ids=str,
)
def test_a_loss_scale_that_torch_refuses_or_that_never_moves_is_refused(wrong: dict[str, float]) -> None:
    facts = tiny_facts(device="cuda")
    finding = said("precision.loss-scale", Config(precision=FP16(**wrong)), facts)  # type: ignore[arg-type]
    assert finding.where == f"config.precision.{next(iter(wrong))}"


# --- DDP and checkpointing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "device", "rules"),
    [
        (CompressHook(dtype="float16"), "cpu", []),
        (CompressHook(dtype="bfloat16"), "cpu", ["ddp.hook-dtype"]),
        (CompressHook(dtype="bfloat16"), "cuda", []),
        (CompressHook(dtype="bfloat16"), "xpu", []),
        (CompressHook(dtype="bfloat16"), "npu", ["ddp.hook-dtype"]),
        (PowerSGDHook(wrapper="bfloat16"), "cpu", ["ddp.hook-dtype"]),
        (PowerSGDHook(wrapper="float16"), "cpu", []),
        (PowerSGDHook(start_iter=1), "cpu", ["ddp.powersgd"]),
        (PowerSGDHook(start_iter=0, use_error_feedback=False, warm_start=False), "cpu", []),
        (PowerSGDHook(rank=0, min_compression_rate=0.0), "cpu", ["ddp.powersgd"] * 2),
    ],
    ids=str,
)
def test_a_hook_is_refused_where_torch_would_refuse_it_later(hook: CommHook, device: str, rules: list[str]) -> None:
    assert run_in(Config(engine=DDP(hook=hook)), device=device) == rules


@pytest.mark.parametrize(
    ("engine", "rules"),
    [
        (DDP(find_unused_parameters=True), ["ddp.reentrant-unused"]),
        (DDP(), []),
        (FSDP2(), []),
    ],
)
def test_unused_parameters_and_reentrant_checkpointing_clash_under_ddp(engine: DDP | FSDP2, rules: list[str]) -> None:
    model = marked(marked(tiny_model(), "checkpointed", "layers.0"), "reentrant", "layers.0")
    assert ids(Config(engine=engine), tiny_facts(model, world=2)) == rules


def test_batch_norms_are_synchronised_where_there_are_any_and_on_accelerators_only() -> None:
    cfg, normed = Config(engine=DDP(sync_batchnorm=True)), with_batchnorm(tiny_model())
    assert ids(cfg, tiny_facts(normed, world=2, device="cuda")) == []
    assert ids(cfg, tiny_facts(normed, world=2)) == ["ddp.sync-batchnorm-on-cpu"]
    assert ids(cfg, tiny_facts(world=2)) == ["ddp.no-batchnorm"]
    inference = evolve(cfg, intent=Intent.INFERENCE)
    assert ids(inference, tiny_facts(normed, world=2, optimizer=False)) == []


def test_a_frozen_embedding_under_reentrant_checkpointing_needs_inputs_that_require_a_gradient() -> None:
    model = marked(tiny_model(frozen=("embed.weight",)), "reentrant", "layers.0")
    assert ids(Config(), tiny_facts(model)) == ["checkpoint.frozen-input"]
    assert ids(Config(), tiny_facts(evolve(model, grad_inputs=True))) == []
    assert ids(Config(), tiny_facts(marked(tiny_model(), "reentrant", "layers.0"))) == []
    assert ids(Config(), tiny_facts(tiny_model(frozen=("embed.weight",)))) == []


@pytest.mark.parametrize(("use_cache", "fires"), [(True, 1), (False, 0), (None, 0)])
def test_a_cache_that_recomputation_would_find_filled_is_a_warning(use_cache: bool | None, fires: int) -> None:
    facts = tiny_facts(evolve(tiny_model(), architecture=ArchitectureFacts(use_cache=use_cache)))
    assert ids(Config(checkpointing=CheckpointBlocks()), facts) == ["checkpoint.cache"] * fires
    assert ids(Config(), facts) == []


def test_units_that_mix_frozen_and_trained_parameters_are_counted_in_one_warning() -> None:
    model = tiny_model(frozen=("layers.0.attn.weight", "layers.1.attn.weight", "embed.weight"))
    finding = said("units.mixed-requires-grad", Config(engine=FSDP2()), tiny_facts(model, world=2))
    assert finding.what.startswith("3 of 3 units mix frozen and trained parameters (`model")
    assert ids(Config(engine=DDP()), tiny_facts(model, world=2)) == []
    whole = tiny_model(frozen=("layers.0.attn.weight", "layers.0.mlp.weight"))
    assert ids(Config(engine=FSDP2()), tiny_facts(whole, world=2)) == []


def test_what_prepkit_has_made_of_a_model_is_said_when_it_comes_again() -> None:
    model = evolve(marked(tiny_model(), "prepared"), prepared="DDP, BF16, config 0123456789ab")
    finding = said("model.already-wrapped", Config(), tiny_facts(model))
    assert "DDP, BF16, config 0123456789ab" in finding.what
    assert "ready.unwrap(" in finding.fix


# --- cost ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [WrapBlocks(), WrapPaths(tuple(f"layers.{index}" for index in range(16_666)))])
def test_a_model_of_fifty_thousand_modules_is_checked_in_seconds_at_most(wrap: Wrap) -> None:
    lora = ParamFact(name="layers.9.attn.lora", shape=(4,), dtype="bfloat16")
    model = tiny_model(blocks=16_666, tied=True, extra=(lora,))
    cfg = Config(engine=FSDP2(wrap=wrap), checkpointing=CheckpointBlocks(), compile=CompileBlocks())
    facts = tiny_facts(model, world=512, loader=tiny_loader(length=10**6))
    began = time.process_time()
    found = ids(cfg, facts)
    taken = time.process_time() - began
    assert "units.mixed-dtypes" in found
    assert taken < 3, f"took {taken:.2f} s"  # 0.6 s on an idle core; what is quadratic takes 13 s and more
