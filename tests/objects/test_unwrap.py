"""The user's module out of its wrappers; and a model that apply has been at is known when it comes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prepkit as pk
from prepkit.objects import names
from prepkit.objects.forward import MARK
from prepkit.objects.target import Target
from prepkit.objects.unwrap import unwrap
from prepkit.steps import AutocastForward, CompileModules
from tests.support.fragile_model import TOKENS, Tiny
from tests.support.gang import Gang
from tests.support.single_step import do, gloo_alone

CFG = pk.Config(precision=pk.BF16(), compile=pk.CompileModel(backend="eager"), optimizer=pk.optim.SGD(lr=0.1))
AUTOCAST = AutocastForward(device="cpu", dtype="bfloat16", output_dtype="float32")


def refused(model: nn.Module) -> list[str]:
    return [
        f"{one.rule}: {one.what}"
        for one in pk.check(pk.Config(optimizer=pk.optim.SGD()), model)
        if one.severity == "error"
    ]


def test_a_prepared_model_is_refused_with_what_it_carries() -> None:
    model = Tiny()
    pk.apply(pk.build_plan(CFG, model))
    (first, *others) = refused(model)
    said = "model.already-wrapped: prepkit has prepared this model already: it carries Single, precision BF16, "
    assert first.startswith(said)
    assert [one.partition(":")[0] for one in others] == ["model.already-autocast"]


def test_the_same_plan_is_not_applied_twice() -> None:
    plan = pk.build_plan(pk.Config(optimizer=pk.optim.SGD()), Tiny())
    pk.apply(plan)
    with pytest.raises(pk.PlanRejected, match=r"plan\.model-changed"):
        pk.apply(plan)


def test_a_model_that_is_out_of_prepkit_s_hands_is_as_it_was_and_can_be_prepared_again() -> None:
    model = Tiny()
    before, expected = {name: set(vars(m)) for name, m in model.named_modules()}, model(TOKENS)
    ready = pk.apply(pk.build_plan(CFG, model))
    assert not torch.equal(ready.model(TOKENS), expected)
    assert ready.unwrap() is model
    assert MARK in vars(model)
    assert ready.unwrap(keep_autocast=False, keep_compiled=False) is model
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before
    assert torch.equal(model(TOKENS), expected)
    assert refused(model) == []


def test_a_refusal_leaves_the_model_as_it_was() -> None:
    model = Tiny()
    before = set(vars(model))
    for _ in range(2):
        with pytest.raises(pk.PlanRejected):
            pk.build_plan(pk.Config(precision=pk.FP16(), accumulation=0, optimizer=pk.optim.SGD()), model)
    assert set(vars(model)) == before
    assert pk.apply(pk.build_plan(pk.Config(optimizer=pk.optim.SGD()), model)).model is model


def plain(tokens: Tensor) -> Tensor:
    return tokens.float() @ torch.ones(4, 4)


def test_a_plain_function_comes_back_as_itself_and_still_takes_no_self() -> None:
    model: Any = Tiny()
    model.forward = plain
    do(AUTOCAST, Target(model=model))
    unwrap(model, keep_autocast=False)
    assert vars(model)["forward"] is plain
    assert model(TOKENS).shape == (2, 4)


def test_compiled_blocks_are_dropped_only_when_asked() -> None:
    model = Tiny()
    do(
        CompileModules(paths=("layers.0",), backend="eager", mode="default", fullgraph=False, dynamic=None),
        Target(model=model),
    )
    unwrap(model)
    assert model.layers[0]._compiled_call_impl is not None
    unwrap(model, keep_compiled=False)
    assert model.layers[0]._compiled_call_impl is None


def test_a_module_comes_out_of_torch_s_own_wrappers_in_any_order() -> None:
    model = Tiny()
    with gloo_alone():
        assert unwrap(torch.compile(nn.parallel.DistributedDataParallel(model), backend="eager")) is model


def again(rank: int, world: int, engine: str) -> tuple[bool, list[str]]:
    model = Tiny()
    ready = pk.apply(pk.build_plan(pk.Config(engine=getattr(pk, engine)(), optimizer=pk.optim.SGD()), model))
    inner = ready.unwrap(keep_autocast=False, keep_compiled=False)
    found = pk.check(pk.Config(engine=pk.DDP(), optimizer=pk.optim.SGD()), inner)
    return inner is names.unwrap_root(model)[-1], sorted({one.rule for one in found if one.severity == "error"})


def test_what_was_sharded_in_place_stays_refused_and_what_ddp_wrapped_does_not(gang2: Gang) -> None:
    assert gang2.run(again, "DDP") == [(True, [])] * 2
    assert gang2.run(again, "FSDP2") == [(True, ["model.already-wrapped", "model.sharded-parameters"])] * 2
