"""Compilation: the backends that torch brings, and what a config without one is mended to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from torch._dynamo import list_backends
from torch._inductor import list_options

from prepkit.config import DDP, XLA, CompileBlocks, CompileModel, CompileOption, Config, Engine
from prepkit.facts import Env
from prepkit.rules import check
from prepkit.rules.compile import BACKENDS, RELEASES
from tests.support.counterexamples import COUNTEREXAMPLES
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
        (CompileModel(options={"max_autotune": 1}, mode="max-autotune"), ["compile.options"]),
        (CompileModel(options={"max_autotune": 1}, backend="aot_eager"), ["compile.options"]),
        (CompileModel(options={"max_autotune": 1}, backend="tvm"), []),
        (CompileModel(options=(CompileOption(name="max_autotune", value=1),) * 2), ["compile.options"]),
        (CompileModel(options={}, backend="eager", mode="max-autotune"), []),
        (CompileModel(recompile_limit=1), []),
        (CompileModel(recompile_limit=0), ["compile.recompile-limit"]),
    ],
)
def test_options_go_to_a_backend_that_takes_them_once_and_in_the_place_of_a_mode(
    asked: CompileModel | CompileBlocks, ids: list[str]
) -> None:
    assert rule_ids(Config(compile=asked)) == ids


def test_every_option_of_this_torch_is_known_and_no_other_of_its_release() -> None:
    here = set(list_options())
    names = RELEASES.get(Env(torch=torch.__version__).release)
    assert names is None or here == names, here ^ names


@pytest.mark.parametrize(
    ("torch_version", "options", "backend", "said"),
    [
        ("2.13.0+cpu", {"max_autotun": True}, "inductor", "Did you mean `max_autotune`"),
        ("2.13.0", {"triton.cudagraph": True}, "inductor", "`triton.cudagraphs`"),
        ("2.13.0", {"max-autotune": True, "triton.cudagraphs": True}, "inductor", None),
        ("2.13.0", {"max_autotun": True}, "tvm", None),
        ("2.7.1", {"max_autotun": True}, "inductor", None),
        ("", {"max_autotun": True}, "inductor", None),
    ],
)
def test_an_option_that_inductor_lacks_is_refused_with_the_nearest_where_its_release_is_known(
    torch_version: str, options: dict[str, Any], backend: str, said: str | None
) -> None:
    cfg = Config(compile=CompileModel(options=options, backend=backend))
    _, facts = COUNTEREXAMPLES["compile.unknown-option"]()
    hits = check(cfg, evolve(facts, env=evolve(facts.env, torch=torch_version)))
    fixes = [hit.fix for hit in hits if hit.rule == "compile.unknown-option"]
    assert len(fixes) == (said is not None)
    assert said is None or said in fixes[0]


def test_an_option_that_inductor_lacks_is_mended_by_leaving_it_out_and_no_other() -> None:
    _, facts = COUNTEREXAMPLES["compile.unknown-option"]()
    cfg = Config(compile=CompileModel(options={"max_autotun": True, "max-autotune": True}))
    compiled = mended("compile.unknown-option", cfg, facts).compile
    assert isinstance(compiled, CompileModel)
    assert [option.name for option in compiled.options] == ["max-autotune"]


def test_options_are_a_mapping_or_pairs_and_the_same_value_either_way() -> None:
    pairs = (CompileOption(name="max_autotune", value=True), CompileOption(name="max_fusion_size", value=8))
    assert CompileModel(options={"max_autotune": True, "max_fusion_size": 8}) == CompileModel(options=pairs)
