"""What a run that goes on does otherwise than the run that has saved: windows, clipping, and steps in all.

They are the plan's and no state, so that this run's count: what is changed in them on purpose needs nothing, and what
has changed by oversight would be seen in the loss alone.
"""

from __future__ import annotations

import logging
from pathlib import Path

from prepkit.codec import load_plan
from prepkit.findings import PlanRejected
from prepkit.findings.text import count
from prepkit.plan import Plan

LOG = logging.getLogger("prepkit")
FILE = "plan.json"
"""The plan of the run that has saved, in its checkpoint."""


def tell(checkpoint: Path, plan: Plan) -> None:
    """Logs a warning where the checkpoint's plan differs; nothing where it holds none that can be read."""
    if not (checkpoint / FILE).is_file():
        return  # torch has written it without prepkit
    try:
        before = load_plan(checkpoint / FILE)
    except PlanRejected:  # of another format: it is a text beside the state, and nothing is read from it
        return
    if told := differing(before, plan):
        LOG.warning("resume: %s", told)


def differing(before: Plan, now: Plan) -> str:
    """What to say; empty where a step takes as many micro-batches on all ranks, and clips alike.

    Other ranks with another accumulation may well be the same batch; the same ``Config(global_batch=...)`` always is.
    """
    found, fixes = [], []
    same_batch = before.config.global_batch is not None and before.config.global_batch == now.config.global_batch
    if _micro_batches(before) != _micro_batches(now) and not same_batch:
        found.append(f"a step takes {_window(now)}, and took {_window(before)}")
        whole, rest = divmod(_micro_batches(before), now.data_parallel_size)
        fixes += [] if rest else [f"accumulation={whole}"]
    if before.owners.clip != now.owners.clip:
        found.append(f"clipping is {now.owners.clip}, and was {before.owners.clip}")
        fixes.append(f"clip=pk.{before.owners.clip}")
    asked = before.config.total_steps, now.config.total_steps
    if None not in asked and asked[0] != asked[1]:
        found.append(
            f"it takes {asked[1]} steps in all, and took {asked[0]}: a schedule that ends with them is another"
        )
        fixes.append(f"total_steps={asked[0]}")
    if not found:
        return ""
    back = f". To train on as before, write Config({', '.join(fixes)})" if fixes else ""
    return f"this run's plan counts, and is not the checkpoint's: {'; '.join(found)}{back}"


def _micro_batches(plan: Plan) -> int:
    """Of one optimizer step, on all data ranks."""
    return plan.owners.accumulation_steps * plan.data_parallel_size


def _window(plan: Plan) -> str:
    ranks = count(plan.data_parallel_size, "data rank")
    return f"{count(plan.owners.accumulation_steps, 'micro-batch')} on each of {ranks}"
