"""Every error of saving and resuming does harm: what plain torch comes to where a run is gone on with all the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import fully_shard

from tests.audit.harms import Seen
from tests.audit.test_harms import alike
from tests.support.gang import Gang

BEFORE, AFTER = 3, 2


@frozen
class Run:
    """A run of plain torch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any


def layers(between: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), between(), nn.Linear(4, 4))


def run(model: nn.Module | None = None, **options: Any) -> Run:
    """One with AdamW and a rate that falls with each step."""
    model = layers() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    return Run(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8))


def of_groups(*, swapped: bool = False) -> Run:
    """One whose two layers, of equal sizes, decay unlike."""
    model = layers()
    groups = [{"params": model[0].parameters(), "weight_decay": 1.0}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups[::-1] if swapped else groups, lr=0.1, weight_decay=0.0)
    return Run(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8))


def train(one: Run, begin: int, end: int) -> None:
    for at in range(begin, end):
        one.optimizer.zero_grad()
        x = torch.linspace(-1.0, 1.0, 8).view(2, 4) * (1 + at)
        dtype = next(one.model.parameters()).dtype
        (one.model(x.to(dtype)) - at).square().mean().backward()
        one.optimizer.step()
        one.scheduler.step()


def answer(one: Run) -> float:
    """What the model says of a batch, as one number."""
    with torch.no_grad():
        dtype = next(one.model.parameters()).dtype
        return float(one.model(torch.linspace(-1.0, 1.0, 8).view(2, 4).to(dtype)).float().square().sum())


def saved(make: Callable[[], Run] = run) -> dict[str, Any]:
    """What a run leaves after its first steps."""
    one = make()
    train(one, 0, BEFORE)
    return {
        "model": one.model.state_dict(),
        "optimizer": one.optimizer.state_dict(),
        "rate": one.scheduler.state_dict(),
    }


def undisturbed(make: Callable[[], Run] = run) -> float:
    one = make()
    train(one, 0, BEFORE + AFTER)
    return answer(one)


def gone_on(one: Run, held: dict[str, Any], *, strict: bool = True) -> float:
    one.model.load_state_dict(held["model"], strict=strict)
    if "optimizer" in held:
        one.optimizer.load_state_dict(held["optimizer"])
    one.scheduler.load_state_dict(held["rate"])
    train(one, BEFORE, BEFORE + AFTER)
    return answer(one)


def with_a_layer_more() -> float:
    model = layers().append(nn.Linear(4, 4))
    return gone_on(run(model), {key: value for key, value in saved().items() if key != "optimizer"}, strict=False)


def in_half_the_bits() -> float:
    return gone_on(run(layers().bfloat16()), saved())


def with_another_activation() -> float:
    return gone_on(run(layers(nn.ReLU)), saved())


def without_the_optimizer() -> float:
    return gone_on(run(), {key: value for key, value in saved().items() if key != "optimizer"})


def with_another_optimizer() -> float:
    model = layers()
    optimizer = torch.optim.RAdam(model.parameters(), lr=0.1)
    return gone_on(Run(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)), saved())


def with_another_state() -> Seen:
    held = saved()
    for group in held["optimizer"]["param_groups"]:
        group["amsgrad"] = True  # as of an optimizer that keeps more
    try:
        return gone_on(run(amsgrad=True), held)
    except KeyError as error:
        return type(error).__name__


def with_groups_in_another_order() -> float:
    return gone_on(of_groups(swapped=True), saved(of_groups))


def with_another_scheduler() -> float:
    one = run()
    return gone_on(Run(one.model, one.optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(one.optimizer, 5)), saved())


def to_no_folder() -> Seen:
    try:
        torch.save(saved(), "")
    except (RuntimeError, OSError) as error:
        return type(error).__name__
    return 0.0


@frozen
class ResumeHarm:
    """One error of a resume, what it does, and the answer of the model that shows it."""

    rule: str
    what: str
    wrong: Callable[[], Seen]
    right: Callable[[], float] = undisturbed


RESUME_HARMS: tuple[ResumeHarm, ...] = (
    ResumeHarm("checkpoint.no-folder", "torch raises when all is trained", to_no_folder),
    ResumeHarm("checkpoint.other-model", "a layer begins at random", with_a_layer_more),
    ResumeHarm("checkpoint.other-dtype", "weights are rounded", in_half_the_bits),
    ResumeHarm("checkpoint.other-config", "the model computes otherwise", with_another_activation),
    ResumeHarm("checkpoint.no-optimizer", "moments begin from zero", without_the_optimizer),
    ResumeHarm("checkpoint.other-optimizer", "the moments are used otherwise", with_another_optimizer),
    ResumeHarm("checkpoint.other-state", "the next step raises", with_another_state),
    ResumeHarm(
        "checkpoint.other-groups",
        "another layer decays",
        with_groups_in_another_order,
        lambda: undisturbed(of_groups),
    ),
    ResumeHarm("checkpoint.other-scheduler", "the rate is another", with_another_scheduler),
)
"""In the order of ``prepkit.rules.run.saving``."""


@pytest.mark.parametrize("harm", RESUME_HARMS, ids=[harm.rule for harm in RESUME_HARMS])
def test_a_run_that_goes_on_from_what_does_not_fit_trains_otherwise(harm: ResumeHarm) -> None:
    right, wrong = harm.right(), harm.wrong()
    assert math.isfinite(right)
    assert alike(right, harm.right()), "what is right is not the same twice"
    assert not alike(wrong, right), f"{harm.rule} does no harm here: {wrong} both ways"


@pytest.mark.parametrize("make", [run, of_groups], ids=["one group", "two groups"])
def test_a_run_that_goes_on_from_what_fits_trains_as_it_would_have(make: Callable[[], Run]) -> None:
    assert alike(gone_on(make(), saved(make)), undisturbed(make))


def in_folders_of_their_own(rank: int, world: int, folder: str, apart: bool) -> str:
    """What reading what rank 0 has written says, where each rank has written to its own folder or all to one."""
    model = fully_shard(layers())
    state: dict[str, Tensor] = dict(model.state_dict())
    dcp.save(state, checkpoint_id=str(Path(folder, str(rank * apart))))
    dist.barrier()
    try:
        dcp.load(state, checkpoint_id=str(Path(folder, "0")))
    except CheckpointException as error:
        return str(error)
    return ""


@pytest.mark.parametrize("apart", [True, False])
def test_what_ranks_write_to_folders_of_their_own_cannot_be_read(gang2: Gang, tmp_path: Path, apart: bool) -> None:
    """The rule ``checkpoint.folders-differ``."""
    for said in gang2.run(in_folders_of_their_own, str(tmp_path), apart, timeout=60):
        assert bool(said) is apart
