"""Checkpoints and exports of DeepSpeed runs, and several engines in one program, for real on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import nn

from prepkit.config import BF16, DDP, FSDP2, Config, DeepSpeed, Intent, Precision, WrapRoot
from prepkit.objects import names
from prepkit.training import export
from prepkit.training.prepared import Prepared
from tests.applying.handlers.test_deepspeed import BASE, batches, engine, loss_of, mean, prepare
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
    ready.save(folder)
    ready.export(f"{folder}/exported")
    on = trained(ready, batches()[2:], rank, world), rates(ready)
    again = prepare(cfg)
    again.resume(folder)
    return on, (trained(again, batches()[2:], rank, world), rates(again))


def second_half(rank: int, world: int, cfg: Config, folder: str) -> list[float]:
    """Losses of the second half of a run that another engine has begun."""
    ready = prepare(cfg)
    ready.resume(folder)
    assert ready.steps == 2
    return trained(ready, batches()[2:], rank, world)


def first_half(rank: int, world: int, cfg: Config, folder: str) -> list[float]:
    ready = prepare(cfg)
    trained(ready, batches()[:2], rank, world)
    ready.save(folder, wait=False)
    on = trained(ready, batches()[2:], rank, world)
    ready.checkpoints.finish()
    return on


def test_a_run_goes_on_from_zero_under_torch_s_engines_and_back(gang2: Gang, tmp_path: Path) -> None:
    ddp, zero2, zero3 = evolve(BASE, engine=DDP()), engine(BASE, stage=2), engine(BASE, stage=3)
    wanted = gang2.run(first_half, zero2, str(tmp_path / "zero2"), timeout=120)[0]
    assert gang2.run(second_half, ddp, str(tmp_path / "zero2"), timeout=60)[0] == pytest.approx(wanted, rel=1e-5)
    assert gang2.run(second_half, zero3, str(tmp_path / "zero2"), timeout=60)[0] == pytest.approx(wanted, rel=1e-5)
    gang2.run(first_half, evolve(BASE, engine=FSDP2(wrap=WrapRoot())), str(tmp_path / "fsdp2"), timeout=60)
    assert gang2.run(second_half, zero3, str(tmp_path / "fsdp2"), timeout=60)[0] == pytest.approx(wanted, rel=1e-5)
    assert gang2.run(second_half, zero2, str(tmp_path / "fsdp2"), timeout=60)[0] == pytest.approx(wanted, rel=1e-5)


def whole(rank: int, world: int, cfg: Config) -> dict[str, torch.Tensor]:
    """Parameters after half of the run."""
    ready = prepare(cfg)
    trained(ready, batches()[:2], rank, world)
    return {name: param.detach().clone() for name, param in names.named_parameters(ready.model).items()}


@pytest.mark.parametrize(("stage", "precision"), [(0, None), (1, BF16()), (2, None), (3, None), (3, BF16())])
def test_a_resumed_run_goes_on_as_if_nothing_had_been(
    gang2: Gang, tmp_path: Path, stage: int, precision: Precision
) -> None:
    from safetensors.torch import load_file

    cfg = evolve(engine(BASE, stage=stage), precision=precision)
    for on, again in gang2.run(interrupted, cfg, str(tmp_path), timeout=150):
        assert again == on
    held = load_file(tmp_path / "exported" / "model.safetensors")
    assert set(held) == {name for name in Tiny().state_dict() if name != "head.weight"}
    if precision is None:
        wanted = gang2.run(whole, evolve(BASE, engine=DDP()))[0]
        assert all(torch.allclose(held[name], value, atol=1e-6) for name, value in wanted.items())
    assert held["layers.0.inner.weight"].dtype == torch.float32, "the master weights, not their bfloat16 copies"
    loaded = Tiny()
    assert loaded.load_state_dict(held, strict=False).missing_keys == ["head.weight"]


def exported(rank: int, world: int, gather: bool, folder: str) -> bool:
    """Writes the model after half of the run; whether DeepSpeed itself would have gathered it."""
    import json

    key = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": gather}}
    cfg = engine(BASE, stage=3)
    said = json.loads(cfg.engine.config)  # type: ignore[union-attr]
    said["zero_optimization"] = said.get("zero_optimization", {}) | key["zero_optimization"]
    ready = prepare(evolve(cfg, engine=evolve(cfg.engine, config=said)))
    trained(ready, batches()[:2], rank, world)
    ready.export(folder)
    return bool(ready.model.zero_gather_16bit_weights_on_model_save())


def test_a_zero_3_run_is_exported_whole_whatever_the_json_says_of_saving_16_bit_weights(
    gang2: Gang, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    held = []
    for gather in (False, True):
        folder = tmp_path / str(gather)
        assert gang2.run(exported, gather, str(folder), timeout=120) == [gather] * 2
        held.append(load_file(folder / "model.safetensors"))
    torch.testing.assert_close(held[0], held[1], rtol=0, atol=0)
    assert {name: tensor.shape for name, tensor in held[0].items()} == {
        name: tensor.shape for name, tensor in Tiny().state_dict().items() if name != "head.weight"
    }


def too_early(rank: int, world: int, folder: str) -> None:
    ready = prepare(engine(BASE, stage=2))
    ready.backward(loss_of(ready.model, batches()[0, 0].chunk(world)[rank]))
    ready.step()
    ready.save(folder)


def nowhere(rank: int, world: int, folder: str) -> None:
    Path(folder, "file").touch()
    prepare(engine(BASE, stage=1)).export(f"{folder}/file/missing")


def nothing(rank: int, world: int, folder: str) -> None:
    prepare(engine(BASE, stage=1)).resume(folder)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (too_early, "1 of 2 micro-batches of this window have run"),
        (nowhere, "Not a directory"),
        (nothing, "holds no whole checkpoint"),
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
    frozen = evolve(BASE, engine=DeepSpeed(stage=3, micro_batch=2), intent=Intent.INFERENCE, clip=None)
    reference = prepare(frozen)
    before = [value.detach().clone() for value in (export._of_deepspeed(p) for p in reference.model.parameters())]
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
    after = [export._of_deepspeed(p) for p in reference.model.parameters()]
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


def in_turn(rank: int, world: int) -> tuple[list[float], list[float]]:
    """Two engines that both train, window by window, the second at three times the loss."""
    readies = prepare(engine(BASE, stage=1)), prepare(engine(BASE, stage=2))
    losses: tuple[list[float], list[float]] = ([], [])
    for window in batches():
        for ready, found, scale in zip(readies, losses, (1, 3), strict=True):
            for tokens in window:
                loss = loss_of(ready.model, tokens.chunk(world)[rank]) * scale
                ready.backward(loss)
                ready.step()
                found.append(mean(loss))
    return losses


def by_itself(rank: int, world: int, scale: int) -> list[float]:
    """One of them, under DDP."""
    ready = prepare(evolve(BASE, engine=DDP()))
    losses = []
    for window in batches():
        for tokens in window:
            loss = loss_of(ready.model, tokens.chunk(world)[rank]) * scale
            ready.backward(loss)
            ready.step()
            losses.append(mean(loss))
    return losses


def test_two_engines_that_both_train_learn_what_each_learns_alone(gang2: Gang) -> None:
    wanted = [gang2.run(by_itself, scale)[0] for scale in (1, 3)]
    for found in gang2.run(in_turn, timeout=120):
        assert found[0] == pytest.approx(wanted[0], rel=1e-5)
        assert found[1] == pytest.approx(wanted[1], rel=1e-5)


def test_two_engines_in_one_program_are_driven_each_by_its_own(gang2: Gang) -> None:
    wanted = gang2.run(alone)[0]
    for losses, untouched, kinds in gang2.run(beside, timeout=120):
        assert kinds == ["DeepSpeedEngine"] * 2
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert untouched
