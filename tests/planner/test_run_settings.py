"""Settings of the run in a plan: what the config asks for, and each engine's ways, in the plan and nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from attrs import evolve, fields
from returns.pipeline import is_successful

import prepkit
from prepkit.config import (
    BF16,
    DDP,
    FSDP1,
    FSDP2,
    SGD,
    XLA,
    CompileBlocks,
    CompileModel,
    CompileOption,
    Config,
    DeepSpeed,
    Engine,
    Intent,
    KeepLoaders,
    Single,
    TensorParallel,
    TPLayer,
    TPPlan,
)
from prepkit.plan import RunSettings
from prepkit.planner import plan
from prepkit.planner.pieces import _compile
from prepkit.steps import CompileModules
from prepkit.testing import tiny_facts
from prepkit.testing.tiny import LIBRARIES

CFG = Config(optimizer=SGD(lr=0.1))
TP = TPPlan((TPLayer("layers.*.mlp", "colwise", output_layout="replicate"),))
ENGINES: dict[str, tuple[Engine, str]] = {
    "Single": (Single(), "none, shows gradients, follows new, follows unfrozen"),
    "DDP": (DDP(), "torch, shows gradients, averages known"),
    "FSDP1": (FSDP1(), "torch, shards, steps frozen"),
    "FSDP2": (FSDP2(), "torch, shards, shows gradients, follows unfrozen"),
    "TensorParallel": (TensorParallel(), "torch, shards, shows gradients"),
    "XLA": (XLA(), "xla, shows gradients"),
    "DeepSpeed": (DeepSpeed(stage=3, micro_batch=1), "torch, engine steps, shards"),
}


def settings(cfg: Config) -> RunSettings:
    size = 1 if isinstance(cfg.engine, Single) else 2
    facts = tiny_facts(world=size, optimizer=False)
    tp_plan = TP if isinstance(cfg.engine, TensorParallel) else cfg.tp_plan
    made = plan(evolve(cfg, tp_plan=tp_plan), evolve(facts, env=evolve(facts.env, libraries=LIBRARIES, bf16=True)))
    assert is_successful(made), made.failure()
    return made.unwrap().run


def ways(run: RunSettings) -> str:
    said = (
        (run.collectives, True),
        ("engine steps", run.engine_steps),
        ("shards", run.shards_params),
        ("shows gradients", run.shows_gradients),
        ("averages known", run.averages_known_params),
        ("follows new", run.follows_new_params),
        ("follows unfrozen", run.follows_unfrozen),
        ("steps frozen", run.steps_frozen),
    )
    return ", ".join(word for word, holds in said if holds)


@pytest.mark.parametrize("name", ENGINES)
def test_a_plan_has_its_engines_ways(name: str) -> None:
    engine, expected = ENGINES[name]
    run = settings(evolve(CFG, engine=engine))
    assert (run.engine, run.precision, ways(run)) == (name, "None", expected)


def test_a_plan_has_what_the_config_asks_of_the_run() -> None:
    plain = settings(evolve(CFG, engine=DDP()))
    asked = settings(
        evolve(
            CFG,
            engine=DDP(),
            timeout_s=30.0,
            overrides=("optimizer.none",),
            average_each=True,
            loaders=KeepLoaders(),
            total_steps=7,
        )
    )
    values = ("timeout_s", "accepted", "average_each", "divides_loaders", "total_steps")
    assert [getattr(plain, name) for name in values] == [600.0, (), False, True, None]
    assert [getattr(asked, name) for name in values] == [30.0, ("optimizer.none",), True, False, 7]
    inferring = settings(Config(engine=DDP(), intent=Intent.INFERENCE))
    assert (plain.intent, inferring.intent) == (Intent.TRAINING, Intent.INFERENCE)


def test_parameters_are_their_own_master_weights_where_a_forward_computes_in_less() -> None:
    def in_place(**options: object) -> bool:
        return settings(evolve(CFG, engine=DDP(), **options)).master_weights_in_place

    assert in_place(precision=BF16())
    assert not in_place(precision=None)
    assert not in_place(precision=BF16(master_weights=False))
    assert not in_place(precision=BF16(), intent=Intent.INFERENCE, optimizer=None)
    assert not settings(evolve(CFG, engine=DeepSpeed(micro_batch=1), precision=BF16())).master_weights_in_place


def test_nothing_that_acts_reads_a_plans_config() -> None:
    rooms = ("applying", "loading", "objects", "observe", "ranks", "saving", "training")
    root = Path(prepkit.__file__).parent
    reads = [
        path.relative_to(root).as_posix()
        for room in rooms
        for path in sorted((root / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "config" and ast.unparse(node.value).endswith("plan")
    ]
    assert not reads


@pytest.mark.parametrize("kind", [CompileModel, CompileBlocks])
def test_every_setting_of_a_compilation_is_that_of_its_step(kind: type[CompileModel | CompileBlocks]) -> None:
    option = CompileOption(name="epilogue_fusion", value=True)
    others = {"backend": "eager", "mode": "max-autotune", "fullgraph": True, "dynamic": False, "options": (option,)}
    others |= {"recompile_limit": 3, "isolate_recompiles": True}
    assert others.keys() == {one.name for one in fields(kind)} & {one.name for one in fields(CompileModules)}
    for asked in (kind(), kind(**others)):
        (planned,) = _compile(asked, ("layers.0",), "asked", "CM-1")
        step = planned.step
        assert isinstance(step, CompileModules)
        held = {name: getattr(step, name) for name in others}
        held["options"] = tuple(CompileOption(name=one.name, value=one.value) for one in step.options)
        assert held == {name: getattr(asked, name) for name in others}
        assert planned.behaviour_ids == (("CM-1", "K-DY5") if asked.options else ("CM-1",))
