"""All ranks or none: what one rank fails at, every rank hears within seconds, wherever it is by then."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import nn

import prepkit as pk
from prepkit import config as c
from prepkit.applying.step_kinds import KINDS
from prepkit.facts import Env
from prepkit.interpreter import Handler
from prepkit.steps import AutocastForward, BuildMesh, ShardLoader, ShardUnits, StartProcessGroup, WrapDDP, WrapFSDP1
from tests.support.fragile_model import Tiny
from tests.support.gang import Gang
from tests.support.handled import handled_by

SOON_S = 10.0
"""A disagreement or failure is heard in less; time-outs are 60 s and more."""

Heard = tuple[str, str, float]
"""Class and text of what a rank raised, and after how many seconds."""


def heard(act: Callable[[], Any]) -> Heard:
    began = time.monotonic()
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def prepared(cfg: c.Config, model: nn.Module, world: int) -> pk.Prepared:
    return pk.apply(pk.build_plan(cfg, model, env=Env(world_size=world)))


# --- agree ---------------------------------------------------------------------------------------------------------


def odd_one(rank: int, world: int, odd: int, how: str) -> Heard:
    """Every rank applies a plan of its own; that of one rank is made of something else."""
    cfg = c.Config(engine=c.FSDP2(), optimizer=c.AdamW())
    model: nn.Module = Tiny()
    if rank == odd:
        match how:
            case "config":
                cfg = evolve(cfg, optimizer=c.AdamW(lr=0.5), accumulation=4)
            case "model":
                model = nn.Sequential(model)
            case "dtype":
                model = Tiny(torch.bfloat16)
            case "frozen":
                model.get_parameter("layers.2.outer.weight").requires_grad = False
    return heard(lambda: prepared(cfg, model, world))


TOLD = {
    "config": ("config.optimizer.lr: 0.001 there, 0.5 here", "config.accumulation: none there, 4 here"),
    "model": ("parameter embed.weight: float32[11, 6] there, absent here",),
    "dtype": ("parameter layers.1.inner.weight: float32[5, 6] there, bfloat16[5, 6] here",),
    "frozen": ("layers.2.outer.weight.requires_grad: True there, False here",),
}


@pytest.mark.parametrize("how", list(TOLD))
def test_the_odd_one_of_four_ranks_and_its_first_differences_are_told_on_every_rank(gang4: Gang, how: str) -> None:
    found = gang4.run(odd_one, 2, how)
    assert {kind for kind, _, _ in found} == {"ApplyHalted"}
    assert len({text for _, text, _ in found}) == 1, "every rank hears the same"
    text = found[0][1]
    assert "rank 2 of 4 differs from the others" in text
    assert "here on rank 2, there on rank 0:" in text
    assert all(line in text for line in TOLD[how]), text
    assert "everything is as it was" in text
    assert max(seconds for _, _, seconds in found) < SOON_S


@pytest.mark.parametrize("how", list(TOLD))
def test_of_two_ranks_rank_0_is_the_measure(gang2: Gang, how: str) -> None:
    found = gang2.run(odd_one, 1, how)
    assert all("here on rank 1, there on rank 0:" in text and TOLD[how][0] in text for _, text, _ in found)
    assert max(seconds for _, _, seconds in found) < SOON_S


def disagree_then_sum(rank: int, world: int) -> float:
    odd_one(rank, world, 1, "config")
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def test_ranks_that_disagreed_still_have_their_group(gang2: Gang) -> None:
    assert gang2.run(disagree_then_sum) == [2.0, 2.0]


# --- a rank that fails before its first step -----------------------------------------------------------------------


def fails_early(rank: int, world: int, odd: int, where: str) -> Heard:
    """One rank does not get to its first step: its plan is refused, its model has changed, or its code raises."""

    def act() -> None:
        with nullcontext() if where == "apply" else pk.processes.together():
            model = Tiny()
            if where == "code" and rank == odd:
                raise OSError("no space left")
            wrap = c.WrapClasses(("Blok",)) if where == "planning" and rank == odd else c.WrapBlocks()
            plan = pk.build_plan(c.Config(engine=c.FSDP2(wrap=wrap)), model, env=Env(world_size=world))
            if where == "apply" and rank == odd:
                model.layers[0].outer.weight.requires_grad = False
            pk.apply(plan)

    return heard(act)


SAYS = {"apply": "planned True, now False", "planning": "Blok", "code": "no space left"}


@pytest.mark.parametrize("where", list(SAYS))
@pytest.mark.parametrize("fresh", [False, True], ids=["running", "fresh"])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_fails_before_its_first_step_does_not_leave_the_other_waiting(
    gang2: Gang, odd: int, fresh: bool, where: str
) -> None:
    found = (gang2.run_fresh if fresh else gang2.run)(fails_early, odd, where)
    kind, text, _ = found[1 - odd]
    assert kind == "ApplyHalted"
    assert f"RankFailed: rank {odd} of 2 failed: " in text
    assert SAYS[where] in text
    assert SAYS[where] in found[odd][1]
    assert found[odd][0] == {"apply": "PlanRejected", "planning": "PlanRejected", "code": "OSError"}[where]
    assert max(seconds for _, _, seconds in found) < SOON_S


def fails_after(rank: int, world: int) -> tuple[Heard, float]:
    """One rank fails on its way to a second apply; a third one, of all ranks, goes well."""

    def twice() -> None:
        with pk.processes.together():
            prepared(c.Config(engine=c.DDP()), Tiny(), world)
            if rank == 1:
                raise OSError("no reference weights")
            prepared(c.Config(engine=c.DDP()), Tiny(), world)

    first = heard(twice)
    ready = prepared(c.Config(engine=c.DDP()), Tiny(), world)
    assert ready.attestation.failed == ()
    total = torch.ones(())
    dist.all_reduce(total)
    return first, total.item()


def test_a_failure_between_two_applies_is_heard_in_the_second_and_forgotten_in_the_third(gang2: Gang) -> None:
    (other, sum0), (own, sum1) = gang2.run(fails_after)
    assert "rank 1 of 2 failed: OSError: no reference weights" in other[1]
    assert own[0] == "OSError"
    assert (sum0, sum1) == (2.0, 2.0)


def test_a_process_on_its_own_has_nobody_to_tell() -> None:
    with pk.processes.together() as others:
        assert others is None
    with pytest.raises(OSError, match="mine"), pk.processes.together():
        raise OSError("mine")


# --- a rank that fails inside a step -------------------------------------------------------------------------------


def failing(kind: type, moment: str) -> Handler[Any, Any, Any]:
    """The handler of a step kind that fails before its deed, after meeting the others, or after its deed."""
    real = KINDS[kind].handler

    def do(step: Any, target: Any) -> Any:
        if moment == "before":
            raise OSError(f"{kind.__name__} broke")
        if moment == "inside":
            target.together()
            raise OSError(f"{kind.__name__} broke")
        real.do(step, target)
        raise OSError(f"{kind.__name__} broke")

    return evolve(real, do=do)


def fails_inside(rank: int, world: int, engine: c.Engine, kind: type, moment: str) -> tuple[Heard, bool]:
    model = Tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(8.0)), batch_size=2)
    cfg = c.Config(engine=engine, precision=c.BF16(), optimizer=c.AdamW())
    plan = pk.build_plan(cfg, model, env=Env(world_size=world), loaders=[loader])
    with handled_by(kind, failing(kind, moment)) if rank == 1 else nullcontext():
        found = heard(lambda: pk.apply(plan))
    if not isinstance(engine, c.DDP):  # what shards has no way back, and to read it whole takes all ranks
        return found, False
    same = type(model) is Tiny and all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    return found, same


INSIDE = [
    *((c.DDP(), kind, moment) for kind in (AutocastForward, ShardLoader) for moment in ("before", "after")),
    *((c.DDP(), kind, moment) for kind in (StartProcessGroup, WrapDDP) for moment in ("before", "inside", "after")),
    *((c.FSDP2(), kind, "before") for kind in (BuildMesh, ShardUnits, ShardLoader)),
    (c.FSDP2(), ShardUnits, "after"),
    *((c.FSDP1(), WrapFSDP1, moment) for moment in ("before", "inside", "after")),
]


CASES = [
    pytest.param(
        *case, fresh, id=f"{type(case[0]).__name__}-{case[1].__name__}-{case[2]}-{'fresh' if fresh else 'running'}"
    )
    for case in INSIDE
    for fresh in (False, True)
]


@pytest.mark.parametrize(("engine", "kind", "moment", "fresh"), CASES)
def test_a_rank_that_fails_inside_a_step_ends_the_other_with_its_own_error(
    gang2: Gang, engine: c.Engine, kind: type, moment: str, fresh: bool
) -> None:
    (other, same0), (own, same1) = (gang2.run_fresh if fresh else gang2.run)(fails_inside, engine, kind, moment)
    assert own[0] == other[0] == "ApplyHalted"
    assert f"OSError: {kind.__name__} broke" in own[1]
    assert f"RankFailed: rank 1 of 2 failed: OSError: {kind.__name__} broke" in other[1]
    assert max(own[2], other[2]) < SOON_S
    if isinstance(engine, c.DDP):
        assert same0
        assert same1


def starts_again(rank: int, world: int) -> tuple[str, float]:
    """One rank gives up the forming of the group, the other never came to it; then both start one."""
    found, _ = fails_inside(rank, world, c.DDP(), StartProcessGroup, "inside")
    prepared(c.Config(engine=c.DDP()), Tiny(), world)
    total = torch.ones(())
    dist.all_reduce(total)
    return found[0], total.item()


def test_a_group_that_was_given_up_does_not_stand_in_the_way_of_the_next(gang2: Gang) -> None:
    assert gang2.run_fresh(starts_again) == [("ApplyHalted", 2.0), ("ApplyHalted", 2.0)]


def dies(rank: int, world: int) -> Heard:
    """Rank 1 never comes; the other waits no longer than the config says."""
    cfg = c.Config(engine=c.DDP(), timeout_s=2.0)
    plan = pk.build_plan(cfg, Tiny(), env=Env(world_size=world))
    return heard(lambda: pk.apply(plan)) if rank == 0 else ("", "", 0.0)


def test_a_rank_that_never_comes_is_named_after_the_time_out(gang2: Gang) -> None:
    kind, text, seconds = gang2.run(dies)[0]
    assert kind == "ApplyHalted"
    assert "not all 2 ranks came within 2 s; missing: 1; their logs say why" in text
    assert seconds < SOON_S
