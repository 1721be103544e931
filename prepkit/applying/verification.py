"""After apply: whether what stands there matches the plan.

Looks at every parameter, every step and every optimizer slot. Reads only, a few microseconds per parameter; and, where
asked to, every buffer's bytes once.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from prepkit.applying.checks import buffers, model, owners
from prepkit.applying.step_kinds import KINDS
from prepkit.objects.state import inspect
from prepkit.objects.target import Target
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.ranks.world import world


@torch.no_grad()
def verify(
    plan: Plan, target: Target, *, allow_meta: bool = False, before: Mapping[str, str] | None = None
) -> Attestation:
    """Compares the target with what the plan predicts for this rank.

    Never raises on a difference: it is a failed check. ``allow_meta`` is for rehearsals, where nothing has data.
    ``before`` holds the ``buffers.digests`` from before the first step: then their values are compared as well,
    with those and over the ranks, in one small collective that every rank has to take part in.
    """
    live = inspect(target)
    rank = world().rank
    return Attestation(
        rank=rank,
        checks=(
            *model.checks(plan, live, rank),
            *(() if allow_meta else model.meta(live)),
            *(() if before is None else buffers.checks(plan, live, rank, before)),
            *(() if allow_meta else owners.checks(plan, live)),
            *(check for planned in plan.steps for check in KINDS[type(planned.step)].verify(planned.step, live)),
        ),
    )
