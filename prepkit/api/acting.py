"""What is done with, or looked up in, objects that live: ``live`` is imported when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prepkit.api.given import Given, a_plan, loaders_of
from prepkit.diagnosis import Audit
from prepkit.facts import Env
from prepkit.plan import Plan

if TYPE_CHECKING:
    from prepkit.live.rehearse import Rehearsal
    from prepkit.live.training.prepared import Prepared


def apply(
    plan: Plan,
    *,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] | None = None,
) -> Prepared:
    """Does what the plan says to the objects that it was built from, or to those given here, and verifies the outcome.

    Raises ``PlanRejected`` before anything is touched when the objects are not those of the plan, and
    ``live.ApplyHalted`` when a step fails: its ``halted`` says what stands and what was undone.
    """
    a_plan(plan)
    from prepkit.live.apply import apply as act

    given = plan.target or Given(model=None)
    return act(
        plan,
        model=given.model if model is None else model,
        optimizer=given.optimizer if optimizer is None else optimizer,
        scheduler=given.scheduler if scheduler is None else scheduler,
        loaders=given.loaders if loaders is None else loaders_of(loaders),
    )


def audit(
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    loaders: Sequence[Any] = (),
    *,
    env: Env | None = None,
) -> Audit:
    """What is wrong with objects that are ready to be trained, whoever has prepared them. Changes nothing.

    ``model`` is what the loop calls, wrappers included: DDP, FSDP, a DeepSpeed engine, what accelerate or a Trainer has
    made. ``optimizer`` may be a list. Call it on every rank, before the first step: ranks tell each other a few
    digests. ``env`` None: the process group that is here; with one the rules see that many ranks.

    Raises ``TypeError`` for objects of the wrong kind.
    """
    from prepkit.live.audit import audit as look

    return look(model, optimizer, scheduler, loaders_of(loaders), env=env)


def rehearse(plan: Plan, model: Any, *, rank: int = 0) -> Rehearsal:
    """What real torch makes of the plan on one rank, on a meta copy in a process of its own."""
    a_plan(plan)
    from prepkit.live.rehearse import rehearse as run

    return run(plan, model, rank=rank)
