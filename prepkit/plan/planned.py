"""A step of a plan, and why it stands there."""

from __future__ import annotations

from attrs import frozen

from prepkit.steps import Step


@frozen(kw_only=True)
class Planned:
    """One step of a plan, with the reason for it."""

    step: Step
    reason: str
    """One clause, read after the step; never read by the interpreter."""
    behaviour_ids: tuple[str, ...] = ()
    """Ids of the behaviour reference that the step answers, such as ``DDP-5``."""


def because(step: Step, reason: str, *behaviour_ids: str) -> tuple[Planned, ...]:
    """A piece of a plan: one step with its reason and its behaviour ids. Pieces add as tuples do."""
    return (Planned(step=step, reason=reason, behaviour_ids=behaviour_ids),)
