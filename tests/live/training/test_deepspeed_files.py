"""Checkpoints and exports of DeepSpeed runs, and several engines in one program, for real on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

from prepkit.config import BF16, DDP, AsStored, Config, DeepSpeed, Intent, NoClip, Precision
from prepkit.live.model import names
from prepkit.live.training import deepspeed_files as files
from prepkit.live.training.prepared import Prepared
from tests.live.handlers.test_deepspeed import BASE, batches, engine, loss_of, mean, prepare
from tests.support.fragile_model import Tiny
from tests.support.gang import Gang, GangError

pytest.importorskip("deepspeed", reason="the extra prepkit[deepspeed] is not installed")


def trained(ready: Prepared, windows: Any, rank: int, world: int) -> list[float]:
    losses = []
    for window in windows:
        for tokens in window:
            loss = loss_of(ready.model, tokens.chunk(world)[rank])
            ready.backward(loss)
            ready.step()
            losses.append(mean(loss))
    return losses


def rates(ready: Prepared) -> list[float]:
    assert ready.optimizer is not None
    return [group["lr"] for group in ready.optimizer.param_groups]


def interrupted(rank: int, world: int, cfg: Config, folder: str) -> tuple[Any, Any]:
    """Losses and rates of the second half of a run: of one that went on, and of one that was built anew for it."""
    ready = prepare(cfg)
    trained(ready, batches()[:2], rank, world)
    files.save(ready, folder)
    files.export(ready, f"{folder}/model.safetensors")
    on = trained(ready, batches()[2:], rank, world), rates(ready)
    again = prepare(cfg)
    files.resume(again, folder)
    return on, (trained(again, batches()[2:], rank, world), rates(again))


def whole(rank: int, world: int, cfg: Config) -> dict[str, torch.Tensor]:
    """Parameters after half of the run."""
    ready = prepare(cfg)
    trained(ready, batches()[:2], rank, world)
    return {name: param.detach().clone() for name, param in names.named_parameters(ready.model).items()}


@pytest.mark.parametrize(
    ("stage", "precision"), [(0, AsStored()), (1, BF16()), (2, AsStored()), (3, AsStored()), (3, BF16())]
)
def test_a_resumed_run_goes_on_as_if_nothing_had_been(
    gang2: Gang, tmp_path: Path, stage: int, precision: Precision
) -> None:
    from safetensors.torch import load_file

    cfg = evolve(engine(BASE, stage=stage), precision=precision)
    for on, again in gang2.run(interrupted, cfg, str(tmp_path), timeout=150):
        assert again == on
    held = load_file(tmp_path / "model.safetensors")
    assert set(held) == {name for name in Tiny().state_dict() if name != "head.weight"}
    if precision == AsStored():
        wanted = gang2.run(whole, evolve(BASE, engine=DDP()))[0]
        assert all(torch.allclose(held[name], value, atol=1e-6) for name, value in wanted.items())
    assert held["layers.0.inner.weight"].dtype == torch.float32, "the master weights, not their bfloat16 copies"
    loaded = Tiny()
    assert loaded.load_state_dict(held, strict=False).missing_keys == ["head.weight"]


def too_early(rank: int, world: int, folder: str) -> None:
    ready = prepare(engine(BASE, stage=2))
    ready.backward(loss_of(ready.model, batches()[0, 0].chunk(world)[rank]))
    ready.step()
    files.save(ready, folder)


def nowhere(rank: int, world: int, folder: str) -> None:
    files.export(prepare(engine(BASE, stage=1)), f"{folder}/missing/model.safetensors")


def nothing(rank: int, world: int, folder: str) -> None:
    files.resume(prepare(engine(BASE, stage=1)), folder)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (too_early, "1 of 2 micro-batches of this window have run"),
        (nowhere, "missing/model.safetensors cannot be written"),
        (nothing, "holds no checkpoint"),
    ],
)
def test_what_cannot_be_saved_or_resumed_is_said_on_every_rank(
    gang2: Gang, tmp_path: Path, function: Any, said: str
) -> None:
    with pytest.raises(GangError) as caught:
        gang2.run(function, str(tmp_path), timeout=60)
    assert str(caught.value).count(said) >= 2


def beside(rank: int, world: int) -> tuple[list[float], bool, list[str]]:
    """A policy that is trained against a reference, each under an engine of its own."""
    policy = prepare(engine(BASE, stage=2))
    frozen = evolve(BASE, engine=DeepSpeed(stage=3, micro_batch=2), intent=Intent.INFERENCE, clip=NoClip())
    reference = prepare(frozen)
    before = [value.detach().clone() for value in (files._gathered(p) for p in reference.model.parameters())]
    losses = []
    for window in batches():
        for tokens in window:
            part = tokens.chunk(world)[rank]
            with torch.no_grad():
                anchor = reference.model(part)
            loss = loss_of(policy.model, part) + nn.functional.mse_loss(policy.model(part), anchor)
            policy.backward(loss)
            policy.step()
            losses.append(mean(loss))
    after = [files._gathered(p) for p in reference.model.parameters()]
    kinds = [type(one.model).__name__ for one in (policy, reference)]
    return losses, all(map(torch.equal, before, after)), kinds


def alone(rank: int, world: int) -> list[float]:
    """The same with DDP and a plain copy."""
    policy = prepare(evolve(BASE, engine=DDP()))
    torch.manual_seed(7)
    reference = Tiny()
    losses = []
    for window in batches():
        for tokens in window:
            part = tokens.chunk(world)[rank]
            with torch.no_grad():
                anchor = reference(part)
            loss = loss_of(policy.model, part) + nn.functional.mse_loss(policy.model(part), anchor)
            policy.backward(loss)
            policy.step()
            losses.append(mean(loss))
    return losses


def test_two_engines_in_one_program_are_driven_each_by_its_own(gang2: Gang) -> None:
    wanted = gang2.run(alone)[0]
    for losses, untouched, kinds in gang2.run(beside, timeout=120):
        assert kinds == ["DeepSpeedEngine"] * 2
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert untouched
