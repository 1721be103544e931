"""What an unsharded model and optimizer have saved is refused by a sharded one, with what to type."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict

import prepkit as pk
from tests.support.deepspeed_cpu import lean
from tests.support.gang import Gang


def refused(act: Any) -> str:
    try:
        act()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def loaded(rank: int, world: int) -> list[str]:
    """What is said of a plain model's weights, of its optimizer's state, and of both by torch's own calls."""
    del rank, world
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    stepped = torch.optim.AdamW(plain.parameters(), lr=0.1)
    plain(torch.ones(2, 4)).sum().backward()
    stepped.step()
    ready: Any = pk.apply(
        pk.build_plan(pk.Config(engine=pk.FSDP2(), optimizer=pk.optim.AdamW(lr=0.1)), nn.Linear(4, 4))
    )
    weights, state = plain.state_dict(), stepped.state_dict()
    named = {"state": dict(zip(weights, state["state"].values(), strict=True)), "param_groups": state["param_groups"]}
    named["param_groups"] = [{**group, "params": list(weights)} for group in state["param_groups"]]
    whole = StateDictOptions(full_state_dict=True)
    said = [
        refused(lambda: ready.model.load_state_dict(weights)),
        refused(lambda: ready.optimizer.load_state_dict(state)),
        refused(lambda: set_model_state_dict(ready.model, weights, options=whole)),
        refused(lambda: set_optimizer_state_dict(ready.model, ready.optimizer, named, options=whole)),  # type: ignore[arg-type]
    ]
    ready.backward(ready.model(torch.ones(2, 4)).sum())
    assert ready.step()
    ready.close()
    return said


def test_whole_state_is_refused_where_a_model_is_sharded_and_taken_by_torch_s_calls(gang2: Gang) -> None:
    for weights, state, by_torch, state_by_torch in gang2.run(loaded, timeout=60):
        assert "2 weights of this state are whole, and the model is sharded: `weight`, `bias`" in weights
        assert "This state of 2 parameters is of an optimizer that was not sharded" in state
        assert (by_torch, state_by_torch) == ("", "")


def second(rank: int, world: int, engine: Any) -> tuple[list[str], str]:
    """What is heard of another optimizer over the model, in a loop of its own and beside ``ready.backward``."""
    del rank, world
    if isinstance(engine, pk.DeepSpeed):
        lean()
    torch.manual_seed(0)
    ready: Any = pk.apply(pk.build_plan(pk.Config(engine=engine, optimizer=pk.optim.AdamW(lr=0.1)), nn.Linear(4, 4)))
    other = torch.optim.SGD(ready.model.parameters(), lr=0.1)
    heard: list[Any] = []
    if not isinstance(engine, pk.DeepSpeed):
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for _ in range(2):
                ready.model(torch.ones(2, 4)).sum().backward()
                other.step()
                other.zero_grad()
    ready.backward(ready.model(torch.ones(2, 4)).sum())
    return [str(one.message) for one in heard if one.filename == __file__], refused(other.step)


@pytest.mark.parametrize(
    "engine", [pk.DDP(), pk.FSDP2(), pk.DeepSpeed(stage=2, micro_batch=2)], ids=["ddp", "fsdp2", "zero2"]
)
def test_a_second_optimizer_that_no_plan_knows_is_told_or_refused(gang2: Gang, engine: Any) -> None:
    zero = isinstance(engine, pk.DeepSpeed)
    for rank, (heard, raised) in enumerate(gang2.run(second, engine, timeout=60)):
        told = ["the plan knows another" in one for one in heard]
        assert told == ([] if zero or rank else [True])
        assert "of a prepared model, and the plan does not know it" in raised
        assert ("in the place of the other" in raised) is zero


def unplanned(rank: int, world: int) -> list[str]:
    """What is raised for an optimizer of the loop's own where the plan has none: in a window of two, and of one."""
    del world
    said = []
    for accumulation in (2, 1):
        torch.manual_seed(0)
        cfg = pk.Config(engine=pk.DDP(), accumulation=accumulation)
        ready: Any = pk.apply(pk.build_plan(cfg, nn.Linear(4, 4)))
        own = torch.optim.SGD(ready.model.parameters(), lr=0.1)
        ready.backward(ready.model(torch.full((2, 4), rank + 1.0)).sum())
        said.append(refused(own.step))
    return said


def test_an_optimizer_that_steps_what_nobody_has_averaged_is_refused_where_the_plan_has_none(gang2: Gang) -> None:
    for window, alone in gang2.run(unplanned, timeout=60):
        assert (
            "was stepped inside a window of 2 micro-batches, and no gradient of this rank has been averaged" in window
        )
        assert alone == ""
