"""What rules of the loop keep two ranks from: slips with the rule switched off, and the same calls without the slip."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from attrs import frozen

import prepkit as pk
from prepkit.findings import RunRefused
from tests.audit.harms import Seen
from tests.training.loop_harms import batch, ended, layers, loss_of, size, train, without


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


def forward_between(rank: int, *, slip: bool) -> float:
    ready = prepared(pk.FSDP1())
    train(ready, rank)
    ready.backward(loss_of(ready.model, rank))
    if slip:
        with torch.no_grad():
            ready.model(batch(9))
    ready.step()
    return size(ready.model)


def evaluated_between(rank: int, *, slip: bool) -> float:
    ready = prepared(pk.FSDP1())
    train(ready, rank)
    ready.backward(loss_of(ready.model, rank))
    if slip:
        with ready.evaluating():
            ready.model(batch(9))
    ready.step()
    return size(ready.model)


LOOP_HARMS_OF_RANKS: tuple[LoopHarmOfRanks, ...] = (
    LoopHarmOfRanks("loop.past-the-wrapper", "the ranks' weights part", past_ddp),
    LoopHarmOfRanks("loop.never-averaged", "the ranks' weights part", ended_late),
    LoopHarmOfRanks("loop.own-loop-unaveraged", "the ranks' weights part", stepped_by_hand),
    LoopHarmOfRanks("loop.closed", "the ranks' weights part", after_close),
    LoopHarmOfRanks("loop.forward-loses-gradients", "the step is lost", forward_between, also=("loop.gradients-gone",)),
    LoopHarmOfRanks(
        "loop.evaluated-before-step",
        "the step is lost",
        evaluated_between,
        also=("loop.forward-loses-gradients", "loop.gradients-gone"),
    ),
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
