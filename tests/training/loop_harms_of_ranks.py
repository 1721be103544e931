"""What rules of the loop keep two ranks from: slips with the rule switched off, and the same calls without the slip."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

import prepkit as pk
from prepkit.findings import RunRefused
from tests.audit.harms import Seen
from tests.support.deepspeed_cpu import lean
from tests.support.launch import launched
from tests.training.loop_harms import ended, layers, loss_of, size, train, without
from tests.training.test_first_step import prepared_to_choose, window
from tests.training.test_model_changes import prepared as tied
from tests.training.test_model_changes import train as train_tied


@frozen
class LoopHarmOfRanks:
    """A slip on two ranks, and what it does to their weights."""

    rule: str
    what: str
    program: Callable[..., Seen]
    """Takes the rank, and ``slip``: whether it is made."""
    also: tuple[str, ...] = ()


def prepared(engine: Any, **options: Any) -> Any:
    cfg = pk.Config(engine=engine, optimizer=pk.optim.SGD(lr=0.1), **options)
    return pk.apply(pk.build_plan(cfg, layers()))


def past_ddp(rank: int, *, slip: bool) -> float:
    ready = prepared(pk.DDP())
    train(ready, rank)
    ready.backward(loss_of(ready.unwrap() if slip else ready.model, rank))
    ready.step()
    return size(ready.model)


def ended_late(rank: int, *, slip: bool) -> float:
    ready = prepared(pk.DDP(), accumulation=2)
    train(ready, rank, rank)
    with nullcontext() if slip else ready.accumulate(last=True):
        ready.backward(loss_of(ready.model, rank))
        with ready.accumulate(last=True) if slip else nullcontext():
            ready.step()
    return size(ready.model)


def stepped_by_hand(rank: int, *, slip: bool) -> float:
    ready = prepared(pk.DDP(), accumulation=2 if slip else 1)
    loss_of(ready.model, rank).backward()  # type: ignore[no-untyped-call]  # torch
    ready.optimizer.step()
    return size(ready.model)


def after_close(rank: int, *, slip: bool) -> float:
    ready = prepared(pk.DDP())
    train(ready, rank)
    if slip:
        ready.close()
    train(ready, rank)
    return size(ready.model)


LOOP_HARMS_OF_RANKS: tuple[LoopHarmOfRanks, ...] = (
    LoopHarmOfRanks("loop.past-the-wrapper", "the ranks' weights part", past_ddp),
    LoopHarmOfRanks("loop.never-averaged", "the ranks' weights part", ended_late),
    LoopHarmOfRanks("loop.own-loop-unaveraged", "the ranks' weights part", stepped_by_hand),
    LoopHarmOfRanks("loop.closed", "the ranks' weights part", after_close, also=("loop.past-the-wrapper",)),
)


def seen_on_rank(rank: int, world: int, at: int) -> tuple[str, Seen, Seen]:
    """What refuses the slip, what it comes to where nothing does, and what is right."""
    del world
    harm = LOOP_HARMS_OF_RANKS[at]
    with without(harm.rule, *harm.also):
        wrong = ended(lambda: harm.program(rank, slip=True))
    right = harm.program(rank, slip=False)
    try:
        harm.program(rank, slip=True)
    except RunRefused as refused:
        return str(refused), wrong, right
    return "", wrong, right


# --- what DeepSpeed throws away ---


def zero(engine: Any = None, **options: Any) -> tuple[Any, Any, Any]:
    """Prepared for ZeRO, or for plain torch: the model out of its wrappers and the optimizer that was given too."""
    return tied(pk.DeepSpeed(stage=1, micro_batch=4) if engine is None else engine, precision=pk.BF16(), **options)


def far(weight: torch.Tensor, before: torch.Tensor) -> float:
    return float((weight.detach().float() - before.float()).abs().sum())


def stepped_inside(*, slip: bool) -> float:
    """How far a layer moves when the optimizer is stepped that was given to DeepSpeed, or by the loop."""
    ready, model, given = zero()
    train_tied(ready)
    before = model.inside.weight.detach().clone()
    if slip:
        with without("loop.inner-optimizer-stepped"):
            given.step()
    else:
        train_tied(ready)
    return far(model.inside.weight, before)


def counted_twice(*, slip: bool) -> float:
    """The weights after a window of two micro-batches of two losses, in a backward each or in one."""
    ready = prepared(pk.DeepSpeed(stage=1, micro_batch=2), accumulation=2)
    with without("loop.engine-counts-backwards"):
        for at in range(2):
            if slip:
                ready.backward(loss_of(ready.model, at), more=True)
                ready.backward(loss_of(ready.model, at + 2))
            else:
                ready.backward(loss_of(ready.model, at) + loss_of(ready.model, at + 2))
            ready.step()
    return size(ready.unwrap())


def loaded_in_the_loop(*, slip: bool) -> float:
    """How far a layer is from the zeros that were loaded, after a step."""
    ready, model, _ = zero(None if slip else pk.DDP(), overrides=("run.overwritten",))
    train_tied(ready)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    train_tied(ready)
    return far(model.inside.weight, torch.zeros(4, 4))


def frozen_in_the_loop(*, slip: bool) -> float:
    """How far a layer moves that was frozen."""
    ready, model, _ = zero(None if slip else pk.FSDP2(), overrides=("run.frozen",))
    train_tied(ready)
    model.inside.weight.requires_grad = False
    held = getattr(model.inside.weight, "_local_tensor", model.inside.weight)
    before = held.detach().clone()
    train_tied(ready)
    return far(getattr(model.inside.weight, "_local_tensor", model.inside.weight), before)


def left_out_of_a_window(*, slip: bool) -> float:
    """How far a layer moves in a window without it."""
    ready = prepared_to_choose("ZeRO 3" if slip else "ZeRO 2", overrides=("run.gradients-stale",))
    window(ready, 0, 0, 1)
    weight = ready.unwrap().of[1].weight
    held = getattr(weight, "ds_tensor", weight)
    before = held.detach().clone()
    window(ready, 0, 0)
    return far(held, before)


def put_behind_the_masters(*, slip: bool) -> float:
    """What a step makes of weights that were halved behind ``deepspeed.initialize``, or before."""
    from tests.audit.by_libraries import engine_of

    model = layers()
    if not slip:
        halved(model)
    with launched(dist.get_rank(), dist.get_world_size()):
        engine, *_ = engine_of(model, 2, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    if slip:
        halved(engine.module)
    engine.backward(loss_of(engine, 0))
    engine.step()
    return size(engine.module)


def halved(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


DEEPSPEED_HARMS: dict[str, Callable[..., float]] = {
    "loop.inner-optimizer-stepped": stepped_inside,
    "loop.engine-counts-backwards": counted_twice,
    "run.overwritten": loaded_in_the_loop,
    "run.masters-apart": put_behind_the_masters,
    "run.frozen": frozen_in_the_loop,
    "run.gradients-stale": left_out_of_a_window,
}
"""Rule to what shows its harm, with the slip and without it."""


def thrown_away(rank: int, world: int, rule: str) -> tuple[Seen, Seen]:
    del rank, world
    lean()
    return ended(lambda: DEEPSPEED_HARMS[rule](slip=True)), DEEPSPEED_HARMS[rule](slip=False)
