"""Compilation: the backends that torch brings, and what a config without one is mended to."""

from __future__ import annotations

import pytest
from torch._dynamo import list_backends

from prepkit.config import DDP, XLA, CompileBlocks, CompileModel, CompileOption, Config, Engine
from prepkit.rules.compile import BACKENDS
from tests.support.rule_findings import mended, rule_ids


def test_every_backend_that_torch_offers_is_known_to_be_its_own() -> None:
    assert set(list_backends()) <= set(BACKENDS) <= set(list_backends(exclude_tags=()))
    for backend in BACKENDS:
        assert rule_ids(Config(compile=CompileModel(backend=backend))) == []
    assert rule_ids(Config(compile=CompileModel(backend="inductr"))) == ["compile.foreign-backend"]


@pytest.mark.parametrize(("engine", "backend"), [(XLA(), "openxla"), (DDP(), "inductor")], ids=["xla", "ddp"])
@pytest.mark.parametrize("asked", [CompileModel(backend=" "), CompileBlocks(backend=" ")], ids=["model", "blocks"])
def test_a_backend_without_a_name_is_mended_to_the_usual_one_of_the_engine(
    engine: Engine, backend: str, asked: CompileModel | CompileBlocks
) -> None:
    compiled = mended("compile.no-backend", Config(engine=engine, compile=asked)).compile
    assert isinstance(compiled, type(asked))
    assert compiled.backend == backend


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        (CompileModel(options={"max_autotune": True}), []),
        (CompileBlocks(options={"max_autotune": True}), []),
        (CompileModel(options={"a": 1}, mode="max-autotune"), ["compile.options"]),
        (CompileModel(options={"a": 1}, backend="aot_eager"), ["compile.options"]),
        (CompileModel(options={"a": 1}, backend="tvm"), []),
        (CompileModel(options=(CompileOption(name="a", value=1),) * 2), ["compile.options"]),
        (CompileModel(options={}, backend="eager", mode="max-autotune"), []),
        (CompileModel(recompile_limit=1), []),
        (CompileModel(recompile_limit=0), ["compile.recompile-limit"]),
    ],
)
def test_options_go_to_a_backend_that_takes_them_once_and_in_the_place_of_a_mode(
    asked: CompileModel | CompileBlocks, ids: list[str]
) -> None:
    assert rule_ids(Config(compile=asked)) == ids


def test_options_are_a_mapping_or_pairs_and_the_same_value_either_way() -> None:
    pairs = (CompileOption(name="max_autotune", value=True), CompileOption(name="max_fusion_size", value=8))
    assert CompileModel(options={"max_autotune": True, "max_fusion_size": 8}) == CompileModel(options=pairs)
