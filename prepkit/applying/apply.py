"""Applying a plan: ``look`` observes again and compares, ``apply`` asks every step, does them all, and verifies.

With several ranks both happen under a ``RankGuard`` (``guarded``), so that all ranks end alike. What is raised before
the first step has acted leaves everything as it was. Between the two, the caller asks the rules again with today's
facts: nothing here reaches up to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from attrs import evolve, frozen
from returns.io import IOFailure, IOResult, IOSuccess
from returns.unsafe import unsafe_perform_io
from torch.utils.weak import WeakIdKeyDictionary

from prepkit.applying import claims, verification
from prepkit.applying.step_kinds import handlers
from prepkit.applying.verification import verify
from prepkit.codec import plan_digests
from prepkit.config import Intent
from prepkit.court import Court, found
from prepkit.facts import Env, Facts, LocalFacts
from prepkit.findings import Finding, PlanRejected, RunRefused, errors
from prepkit.interpreter import Done, HalfDone, Halted, interpret
from prepkit.objects import names
from prepkit.objects.state import inspect
from prepkit.objects.target import Target
from prepkit.objects.unwrap import PREPARED
from prepkit.observe import observe, observe_env
from prepkit.observe.given import one_optimizer, one_scheduler
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.plan.drift import Drift, DriftKind, drift
from prepkit.ranks import end_groups
from prepkit.ranks.agree import plan_differences
from prepkit.ranks.all_or_none import RankGuard
from prepkit.ranks.peers import Peers
from prepkit.ranks.together import together
from prepkit.ranks.world import world
from prepkit.steps import AllocateTensors, PartitionParameters, WrapFSDP1

ENDED = "the process group was ended, so that no rank waits in it for another that has failed; start it again"
"""Told where a process group was ended after a failure inside a collective, although the plan had not started it."""


@frozen(kw_only=True, eq=False, repr=False)
class Applied:
    """What a plan has become: the objects, and what was verified of them."""

    plan: Plan
    target: Target
    """Model, optimizer, scheduler, loaders and what handlers have set up beside them."""
    attestation: Attestation
    peers: Peers | None
    """The other ranks; None: alone."""
    started: bool
    """True if the process group was started here."""
    params: WeakIdKeyDictionary
    """Name to each parameter that the model had when it was given (``claims.parameters_before``)."""
    court: Court
    """Refuses and warns from now on: it knows what was reported and accepted already."""


class ApplyHalted(RunRefused):
    """A step could not be done. ``halted`` says which steps stand, which were undone, and which cannot be.

    ``findings`` holds what the steps have refused before any of them acted, or what the step that failed has raised.
    """

    def __init__(self, halted: Halted) -> None:
        self.halted = halted
        super().__init__(_reasons(halted))
        self.args = (str(halted),)


def _reasons(halted: Halted) -> tuple[Finding, ...]:
    """A failure that is no refusal, as of a disk or another rank, is the finding that its step has failed."""
    if halted.problems:
        return tuple(problem.finding for problem in halted.problems)
    error = halted.error.__cause__ if isinstance(halted.error, HalfDone) else halted.error
    if isinstance(error, RunRefused):
        return error.findings
    step = type(halted.step).__name__ if halted.step is not None else "apply"
    return (found("apply.step-failed", step, f"{type(halted.error).__name__}: {halted.error}"),)


class NotAsPlanned(RunRefused):
    """Every step was done, and what is there is not what the plan says: a defect of prepkit or of torch.

    ``findings`` holds each difference, ``attestation`` all that was asked. What has a way back was taken back.
    """

    def __init__(self, attestation: Attestation) -> None:
        self.attestation = attestation
        super().__init__(attestation.failed)
        self.args = (f"{attestation}\nbuild model and optimizer again before the next apply",)


@frozen(kw_only=True, eq=False, repr=False)
class Arrived:
    """The objects that a plan is to be applied to, and how they compare with the plan."""

    target: Target
    facts: Facts
    """The objects and the environment as they are now."""
    drifts: tuple[Drift, ...]
    """Facts that differ from the plan's."""
    refusals: tuple[Finding, ...]
    """Why the plan cannot be applied to these objects; empty where it can."""


def look(
    plan: Plan, *, model: Any, optimizer: Any = None, scheduler: Any = None, loaders: tuple[Any, ...] = ()
) -> Arrived:
    """Observes the objects and compares them with those that the plan was made for. Changes nothing."""
    optimizer, scheduler = one_optimizer(optimizer), one_scheduler(scheduler)
    now = observe(model, optimizer=optimizer, scheduler=scheduler, loaders=loaders)
    drifts = drift(plan.facts, now.facts)
    return Arrived(
        target=Target(model=model, optimizer=optimizer, scheduler=scheduler, loaders=list(loaders)),
        facts=now.facts,
        drifts=drifts,
        refusals=(
            *drifted(drifts),
            *(() if _fills(plan) else _weightless(now.local)),
            *claims.claimed_elsewhere(optimizer, model),
            *_inferring(plan, model),
        ),
    )


def apply(
    plan: Plan, given: Arrived, guard: RankGuard | None, found: tuple[Finding, ...] = (), *, fingerprint: bool = False
) -> Applied:
    """Does the steps of the plan to the given objects, and verifies the outcome, on all ranks or on none.

    ``guard`` is that of ``guarded(plan)``; ``found`` is what the rules say of today's facts and did not say of the
    plan's. Raises ``PlanRejected`` before anything is touched where there are refusals or errors among them (new
    warnings are reported); ``ApplyHalted`` when a step fails (its ``__cause__`` is what it raised) or another rank has
    failed (``RankFailed``), and ``NotAsPlanned`` when the outcome differs from the plan. ``fingerprint`` reads
    every weight twice: before and after (``verification.compared``).

    >>> from prepkit import planner
    >>> from prepkit.config import AdamW, Config
    >>> model = torch.nn.Linear(2, 2)
    >>> plan = planner.plan(Config(optimizer=AdamW()), observe(model).facts).unwrap()
    >>> ready = apply(plan, look(plan, model=model), guard=None)
    >>> type(ready.target.optimizer).__name__, ready.attestation.failed
    ('AdamW', ())
    >>> look(plan, model=torch.nn.Linear(3, 2)).refusals[0].rule
    'plan.other-model'
    """
    if given.refusals or errors(found):
        raise PlanRejected((*given.refusals, *found))
    court = Court(accepted=plan.run.accepted)
    court.hear((*plan.warnings, *found))
    ran = _run(plan, given.target, given.drifts, given.facts.env, guard, court, fingerprint=fingerprint)
    return unsafe_perform_io(ran.lash(_raise).unwrap())


def run(plan: Plan, target: Target, drifts: tuple[Drift, ...] = ()) -> IOResult[Applied, Halted | Attestation]:
    """The plan's steps and their verification, without a comparison of facts; for people who compose.

    Fails with ``Halted`` when a step could not be done, and with ``Attestation`` when a check does not hold afterwards.
    """
    with guarded(plan) as guard:
        return _run(plan, target, drifts, observe_env(), guard, Court(accepted=plan.run.accepted))


def guarded(plan: Plan) -> AbstractContextManager[RankGuard | None]:
    """Return what one rank raises inside ends the others' apply within seconds; None where this rank is alone."""
    return nullcontext() if plan.world_size == 1 else together(plan.run.timeout_s)


def _run(
    plan: Plan,
    target: Target,
    drifts: tuple[Drift, ...],
    env: Env,
    guard: RankGuard | None,
    court: Court,
    *,
    fingerprint: bool = False,
) -> IOResult[Applied, Halted | Attestation]:
    provenance, (of_plan, of_model) = plan.provenance, plan_digests(plan)
    of_copies = () if guard is None else verification.to_agree_on(plan, target.model)
    target.digests = (("prepkit", provenance.prepkit), ("plan", of_plan), ("model", of_model), *of_copies)
    target.explain, target.judge = partial(plan_differences, plan), court.judged
    running = world().running
    if guard is not None:
        target.together, target.watch, target.store = guard.barrier, guard.watch, guard.rendezvous
    before = verification.before(plan, target.model, inspect(target).buffers, fingerprint=fingerprint)
    params = claims.parameters_before(target.model, exchanged=_fills(plan))
    results: list[Attestation] = []  # one, once ``finish`` has looked

    def finish() -> None:
        target.together()
        seen = verify(plan, target, before=before)
        refused = court.judged(seen.found)
        overridden = (*(finding.rule for finding in plan.overridden), *court.overridden)
        seen = evolve(seen, overridden=overridden, warned=tuple(court.warned.values()))
        result = evolve(seen, plan=of_plan, made=provenance, env=env, drift=drifts)
        results.append(result)
        if guard is not None:
            guard.with_others = False  # the last collective is over
        if refused:
            raise NotAsPlanned(result)
        target.together()
        if guard is not None:
            guard.report_success()

    outcome = _interpreted(plan, target, finish, guard, court)
    if isinstance(outcome, Halted):
        return IOFailure(results[-1] if isinstance(outcome.error, NotAsPlanned) else outcome)
    vars(names.unwrap_root(target.model)[-1])[PREPARED] = _carried(plan)
    started = not running and world().running
    if started:
        end_groups.end_with_the_process()
    elif "gloo" in world().backend:
        end_groups.rest_with_the_process()
    applied = Applied(
        plan=plan,
        target=target,
        attestation=results[-1],
        peers=None if guard is None else guard.peers,
        started=started,
        params=params,
        court=court,
    )
    return IOSuccess(applied)


def _fills(plan: Plan) -> bool:
    """True if a step gives storage and others values to what has none; that they do is checked afterwards."""
    steps = [planned.step for planned in plan.steps]
    storage = (AllocateTensors, PartitionParameters)
    return any(isinstance(s, storage) or (isinstance(s, WrapFSDP1) and s.allocates) for s in steps)


def _interpreted(
    plan: Plan, target: Target, finish: Callable[[], None], guard: RankGuard | None, court: Court
) -> Done | Halted:
    """Interprets the steps, and reports a failure to the other ranks.

    Of a failing step the guard hears before anything is undone; of refused checks only here, as nothing was begun.
    """
    steps = tuple(planned.step for planned in plan.steps)
    ask = partial(interpret, steps, handlers(map(type, steps)), target, judge=court.judged, finish=finish)
    if guard is None:
        return ask()
    outcome = ask(guard.on_event, on_failure=guard.report_failure)
    if isinstance(outcome, Halted):
        if outcome.problems:
            guard.report_failure(ApplyHalted(outcome))
        if guard.group_ended and guard.rendezvous is None:
            outcome = evolve(outcome, remains=(*outcome.remains, ENDED))
    return outcome


def _carried(plan: Plan) -> str:
    """Return what the model carries from now on, for whoever wants to prepare it again."""
    config = plan.provenance.config.rpartition(":")[2][:12]
    return f"{plan.run.engine}, precision {plan.run.precision}, config {config}"


_DRIFTED: dict[DriftKind, str] = {
    "identity": "plan.other-model",
    "state": "plan.model-changed",
    "environment": "plan.other-environment",
}


def drifted(drifts: tuple[Drift, ...], limit: int = 20) -> Iterator[Finding]:
    """One finding per fact that forbids applying the plan; at most ``limit`` of each kind are spelled out."""
    for kind, rule in _DRIFTED.items():
        differing = [d for d in drifts if d.nature == kind]
        for one in differing[:limit]:
            yield found(rule, one.where, f"planned {one.planned}, now {one.now}")
        if len(differing) > limit:
            yield found(rule, "facts.model", f"{len(differing) - limit} more facts differ")


def _weightless(local: LocalFacts) -> Iterator[Finding]:
    """A model without weights can be planned and rehearsed, but there is nothing in it to train."""
    for device, count in local.param_devices:
        if device == "meta":
            what = f"{count} parameters are on the meta device: they have shapes and no values"
            fix = (
                "plan with weights=LoadWeights(path) or InitWeights(), or BroadcastWeights() where rank 0 has values, "
                "or build the model without torch.device('meta')"
            )
            yield found("plan.no-weights", "model", what, fix)


def _inferring(plan: Plan, model: Any) -> Iterator[Finding]:
    """Yield what is made under ``torch.inference_mode()`` takes no part in any backward, afterwards either."""
    if plan.run.intent is not Intent.TRAINING:
        return
    made = next((name for name, param in model.named_parameters() if param.is_inference()), None)
    if torch.is_inference_mode_enabled():
        where, what = "torch.inference_mode", "apply is called inside it, and what it makes could never be trained"
        fix = "call apply outside torch.inference_mode(), or plan with intent=Intent.INFERENCE"
    elif made is not None:
        where, what = f"model.{made}", "was made under torch.inference_mode(), and can never be trained"
        fix = "build the model outside torch.inference_mode(), or plan with intent=Intent.INFERENCE"
    else:
        return
    yield found("plan.inference-mode", where, what, fix)


def _raise(failure: Halted | Attestation) -> Any:
    if isinstance(failure, Halted):
        raise ApplyHalted(failure) from failure.error
    raise NotAsPlanned(failure)
