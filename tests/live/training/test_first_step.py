"""Before the optimizer acts for the first time: what would train wrongly raises on every rank, with nothing stepped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import prepkit as pk
from prepkit.live.training.first_step import SUBJECT, FirstStepRefused
from tests.support.gang import Gang


class Partly(nn.Module):
    """One layer has no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).tanh()


class Whole(Partly):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unused(self.used(x))


ENGINES = {
    "Single": pk.Single(),
    "DDP": pk.DDP(),
    "DDP, unused": pk.DDP(find_unused_parameters=True),
    "FSDP1": pk.FSDP1(wrap=pk.WrapClasses(("Linear",))),
    "FSDP2": pk.FSDP2(wrap=pk.WrapClasses(("Linear",))),
    "ZeRO 0": pk.DeepSpeed(stage=0, micro_batch=2),
    "ZeRO 2": pk.DeepSpeed(stage=2, micro_batch=2),
    "ZeRO 3": pk.DeepSpeed(stage=3, micro_batch=2),
}


def prepared(engine: str, kind: type[nn.Module] = Partly, **options: Any) -> Any:
    torch.manual_seed(0)
    model = kind()
    if engine.startswith("ZeRO"):
        from tests.support.deepspeed_cpu import lean

        lean()
    cfg = pk.Config(engine=ENGINES[engine], optimizer=pk.SGD(lr=0.1), **options)
    return pk.apply(pk.build_plan(cfg, model))


def values(ready: Any) -> list[float]:
    return [
        float(getattr(param, "ds_tensor", getattr(param, "_local_tensor", param)).detach().sum())
        for param in ready.model.parameters()
    ]


def first(rank: int, world: int, engine: str, kind: type[nn.Module] = Partly, **options: Any) -> tuple[str, bool, int]:
    """What the first step raises, whether anything was changed, and how many checks the attestation has of it."""
    del world
    ready = prepared(engine, kind, **options)
    before = values(ready)
    text = ""
    try:
        ready.backward(ready.model(torch.full((2, 4), rank + 1.0)).sum())
        ready.step()
    except FirstStepRefused as error:
        text = str(error)
    checks = [check for check in ready.attestation.checks if check.subject == SUBJECT]
    return text, values(ready) == before, len(checks)


NO_GRADIENT = "first-step.no-gradient: 2 trained parameters without a gradient: `unused.weight`, `unused.bias`."


@pytest.mark.parametrize("engine", ["DDP", "FSDP1", "FSDP2", "ZeRO 0", "ZeRO 2", "ZeRO 3"])
def test_a_trained_parameter_without_a_gradient_is_named_on_every_rank_and_nothing_is_stepped(
    gang2: Gang, engine: str
) -> None:
    for text, same, checks in gang2.run(first, engine, timeout=90):
        assert NO_GRADIENT in text
        assert ("find_unused_parameters=True" in text) is (engine == "DDP")
        assert "replicas-differ" not in text  # which would only follow from it
        assert same
        assert checks == 0


def test_in_one_process_too() -> None:
    text, same, checks = first(0, 1, "Single")
    assert "2 trained parameters" in text
    assert "write overrides=('first-step.no-gradient',)" in text
    assert (same, checks) == (True, 0)


def accepted(rank: int, world: int, engine: str) -> tuple[str, bool, int]:
    return first(rank, world, engine, Partly, overrides=("first-step.no-gradient",))


def test_it_can_be_accepted_but_for_ddp_which_would_average_nothing(gang2: Gang) -> None:
    for text, same, checks in gang2.run(accepted, "FSDP2", timeout=60):
        assert (text, same, checks) == ("", False, 4)
    for text, same, _ in gang2.run(accepted, "DDP", timeout=60):
        assert "find_unused_parameters=True" in text
        assert same
    for text, same, checks in gang2.run(first, "DDP, unused", timeout=60):
        assert (text, same, checks) == ("", False, 4)


@pytest.mark.parametrize("engine", ["DDP", "FSDP1", "FSDP2", "ZeRO 0", "ZeRO 2", "ZeRO 3"])
def test_where_all_is_well_the_attestation_says_so(gang2: Gang, engine: str) -> None:
    for text, same, checks in gang2.run(first, engine, Whole, timeout=90):
        assert (text, same, checks) == ("", False, 4)


def apart(rank: int, world: int) -> str:
    del world
    ready = prepared("DDP", Whole)
    ready.backward(ready.model(torch.full((2, 4), rank + 1.0)).sum())
    for param in ready.model.parameters():  # as a hook of the user's might
        param.grad *= rank + 1.0
    try:
        ready.step()
    except FirstStepRefused as error:
        return str(error)
    return ""


def test_gradients_that_differ_over_the_replicas_are_seen(gang2: Gang) -> None:
    for text in gang2.run(apart, timeout=60):
        assert "first-step.replicas-differ" in text
        assert "Call ready.model itself in training" in text


def infinite(rank: int, world: int, engine: str) -> str:
    del world
    ready = prepared(engine, Whole)
    batch = torch.full((2, 4), float("nan") if rank == 1 else 1.0)
    ready.backward(ready.model(batch).sum())
    try:
        ready.step()
    except FirstStepRefused as error:
        return str(error)
    return ""


@pytest.mark.parametrize("engine", ["DDP", "FSDP2", "ZeRO 2"])
def test_what_is_not_finite_on_one_rank_raises_on_all(gang2: Gang, engine: str) -> None:
    for text in gang2.run(infinite, engine, timeout=90):
        assert "first-step.not-finite: 2 trained parameters" in text


def after_the_first(rank: int, world: int) -> list[int]:
    del world
    ready = prepared("DDP", Whole)
    counts = []
    for _ in range(3):
        ready.backward(ready.model(torch.full((2, 4), rank + 1.0)).sum())
        ready.step()
        counts.append(sum(check.subject == SUBJECT for check in ready.attestation.checks))
    return counts


def test_it_is_looked_at_once(gang2: Gang) -> None:
    assert gang2.run(after_the_first, timeout=60) == [[4, 4, 4]] * 2


def test_an_optimizer_that_is_stepped_by_hand_after_ready_backward_is_refused() -> None:
    ready = prepared("Single", Whole)
    before = values(ready)
    ready.backward(ready.model(torch.ones(2, 4)).sum())
    with pytest.raises(RuntimeError, match=r"write ready\.step\(\) in its place"):
        ready.optimizer.step()
    assert values(ready) == before
    assert ready.step()
    assert values(ready) != before


def test_who_has_a_loop_of_their_own_steps_as_they_like() -> None:
    ready = prepared("Single", Whole)
    before = values(ready)
    ready.model(torch.ones(2, 4)).sum().backward()
    ready.optimizer.step()
    assert values(ready) != before


def refused_twice(rank: int, world: int) -> list[str]:
    del world
    ready = prepared("ZeRO 2")
    ready.backward(ready.model(torch.full((2, 4), rank + 1.0)).sum())
    texts = []
    for _ in range(2):
        try:
            ready.step()
        except FirstStepRefused as error:
            texts.append(str(error))
    return texts


def test_a_step_that_is_tried_again_is_refused_for_the_same_reason(gang2: Gang) -> None:
    for first_text, again in gang2.run(refused_twice, timeout=90):
        assert NO_GRADIENT in first_text
        assert again == first_text
