"""What ``fits`` proposes for DeepSpeed plans: stages, offloads, the reduce bucket."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

import prepkit as pk
from prepkit.config import BF16, AdamW, Config, DeepSpeed
from prepkit.planner.budget import Fit, bounds, moves
from prepkit.predict import predict
from prepkit.resolve.deepspeed.data import look, offloaded, offloads, restaged, said, stage, with_key
from tests.support.llama_facts import fsdp2


def zero(number: int | None, *, away: Literal["cpu"] | None = None, **settings: Any) -> Config:
    own: dict[str, Any] = {"zero_optimization": settings} if settings else {}
    engine = DeepSpeed(stage=number, micro_batch=1, offload_optimizer=away, config=own)
    return Config(engine=engine, precision=BF16(), optimizer=AdamW())


def fit(cfg: Config, memory: str | int, name: str = "8B") -> Fit:
    return pk.fits(fsdp2(name, 64, cfg), memory)


def engines(found: Fit) -> list[DeepSpeed]:
    assert all(isinstance(option.config.engine, DeepSpeed) for option in found.options)
    return [option.config.engine for option in found.options if isinstance(option.config.engine, DeepSpeed)]


def test_higher_stages_are_proposed_where_they_fit_and_only_there() -> None:
    most = {number: bounds(predict(fsdp2("8B", 64, zero(number))))[1] for number in (1, 2, 3)}
    assert most[1] > most[2] > most[3]
    both, last = fit(zero(1), most[2]), fit(zero(1), most[2] - 1)
    assert {stage(one) for one in engines(both)} == {2, 3}
    assert 2 not in {stage(one) for one in engines(last)}
    assert 3 in {stage(one) for one in engines(last)}


def test_offload_is_proposed_at_the_stage_where_it_can_be_and_ranked_by_what_it_copies() -> None:
    found = fit(zero(3), "16GiB", "405B")
    assert found.verdict == "does not fit"
    assert found.options
    assert all(offloads(one, "optimizer") for one in engines(found))
    assert all(option.copied > 0 and option.host > 0 for option in found.options)
    alone = fit(zero(2), "24GiB", "70B")
    assert all(not offloads(one, "param") or stage(one) == 3 for one in engines(alone))


def test_a_bucket_that_is_too_big_is_halved_until_it_fits_and_no_further() -> None:
    plan = fsdp2("8B", 64, zero(3, reduce_bucket_size=4_000_000_000))
    usual = bounds(predict(fsdp2("8B", 64, zero(3, reduce_bucket_size=1_000_000_000))))[1]
    found = [one for one in engines(pk.fits(plan, usual)) if look(said(one), "zero_optimization.reduce_bucket_size")]
    sizes = [look(said(one), "zero_optimization.reduce_bucket_size") for one in found]
    assert [size for size in sizes if size != 4_000_000_000] == [1_000_000_000]


@pytest.mark.parametrize(("size", "halves"), [(10_000_000, 1), (9_999_998, 0), (20_000_000, 2)])
def test_a_bucket_is_halved_down_to_a_hundredth_of_the_usual_one(size: int, halves: int) -> None:
    found = [move for move in moves(fsdp2("8B", 64, zero(2, reduce_bucket_size=size))) if move.about == "bucket"]
    assert len(found) == halves


def test_two_changes_together_are_proposed_where_none_alone_fits() -> None:
    found = fit(zero(1), "24GiB", "70B")
    assert found.options
    for one in engines(found):
        assert (stage(one), offloads(one, "optimizer")) == (3, True)


def test_a_plan_of_the_json_alone_is_changed_in_the_json() -> None:
    cfg = zero(None, stage=1, reduce_bucket_size=1000)
    most = bounds(predict(fsdp2("8B", 64, zero(3, reduce_bucket_size=1000))))[1]
    (option, *_) = fit(cfg, most).options
    engine = option.config.engine
    assert isinstance(engine, DeepSpeed)
    assert engine.stage == 3
    assert json.loads(engine.config) == {"zero_optimization": {"reduce_bucket_size": 1000}}
    assert option.diff == ("zero_optimization.stage=3 instead of 1",)


@pytest.mark.parametrize("old", ["{}", '{"zero_optimization": true}', '{"zero_optimization": {"stage": 1}}'])
def test_a_setting_is_changed_wherever_it_stands(old: str) -> None:
    both = offloaded(offloaded(restaged(DeepSpeed(config=old), 3), "param"), "optimizer")
    made = with_key(both, "zero_optimization.x", 7)
    assert (stage(made), offloads(made, "param"), offloads(made, "optimizer")) == (3, True, True)
    assert look(said(made), "zero_optimization.x") == 7
    back = offloaded(restaged(made, 2), "optimizer", away=False)
    assert (stage(back), offloads(back, "param"), offloads(back, "optimizer")) == (2, False, False)


def test_a_section_of_offload_keeps_its_other_keys() -> None:
    own = {"zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True}}}
    made = offloaded(DeepSpeed(stage=2, config=own), "optimizer")
    assert offloads(made, "optimizer")
    assert json.loads(made.config) == {"zero_optimization": {"offload_optimizer": {"pin_memory": True}}}
    assert offloads(DeepSpeed(config={"zero_optimization": {"offload_param": {"device": "cpu"}}}), "param")
