"""After apply: one look at every parameter, every step and every optimizer slot, and the rules of that moment."""

from __future__ import annotations

import torch
from attrs import evolve

from prepkit.applying import values
from prepkit.applying.step_kinds import KINDS
from prepkit.facts.run import AppliedFacts
from prepkit.objects.state import inspect
from prepkit.objects.target import Target
from prepkit.observe.fingerprints.tensor import as_hex
from prepkit.observe.prepared.applied import after_apply
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.ranks.world import world
from prepkit.rules import due
from prepkit.rules.rule import Moment, answers


@torch.no_grad()
def verify(plan: Plan, target: Target, *, rehearsed: bool = False, before: values.Before | None = None) -> Attestation:
    """Asks the rules of ``Moment.APPLY`` about what the plan has led to on this rank. Reads only.

    Never raises on a difference: it is a finding. ``rehearsed``: nothing has data. ``before``: values are compared as
    well, with those and over the ranks, which every rank has to take part in (``values.compared``).
    """
    live = inspect(target)
    facts = after_apply(plan, live, world().rank, rehearsed=rehearsed)
    steps = (one for planned in plan.steps for one in KINDS[type(planned.step)].verify(planned.step, live))
    applied = evolve(facts.applied or AppliedFacts(), steps=tuple(steps))
    facts, prints = evolve(facts, applied=applied), dict[str, int]()
    if before is not None:
        facts, prints = values.compared(facts, applied, plan, live, before)
    return Attestation(
        rank=facts.rank,
        asked=answers(due(Moment.APPLY), Moment.APPLY, facts),
        fingerprints=tuple((name, as_hex(prints[name])) for name in sorted(prints)),
    )
