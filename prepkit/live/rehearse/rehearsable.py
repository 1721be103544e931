"""The plan as far as it can be rehearsed, and which of its steps are not, or not as written."""

from __future__ import annotations

from attrs import evolve, frozen

from prepkit.live.step_kinds import KINDS
from prepkit.plan import Plan, Planned
from prepkit.plan.layout import ParamLayout
from prepkit.steps import InitializeMSAMP, UpcastParameters


@frozen(kw_only=True)
class Skipped:
    """A step of the plan that a rehearsal cannot run, or does not run as written."""

    index: int
    """Position among the plan's steps, from 0; -1: the optimizer, which is no step."""
    step: str
    """Step kind."""
    why: str

    def __str__(self) -> str:
        return f"not rehearsed: {self.step}: {self.why}"


def rehearsable(plan: Plan) -> tuple[Plan, tuple[Skipped, ...]]:
    """The plan with every step that a rehearsal can run, as it runs it, and what was left out or changed.

    Its layout is what that plan leads to: without the classes of packed weights, and without MS-AMP's dtypes.
    """
    kept: list[Planned] = []
    skipped: list[Skipped] = []
    for index, planned in enumerate(plan.steps):
        step, why = KINDS[type(planned.step)].rehearse(planned.step)
        if why:
            skipped.append(Skipped(index=index, step=type(planned.step).__name__, why=why))
        if step is not None:
            kept.append(evolve(planned, step=step))
    scaled = any(skip.step == InitializeMSAMP.__name__ for skip in skipped)
    # Packed weights lose their class on meta, where there are no bytes to unpack.
    layout = (
        param if param.cls == "DTensor" else evolve(param, cls="Parameter")
        for param in (_unscaled(plan) if scaled else plan.layout)
    )
    return evolve(plan, steps=tuple(kept), layout=tuple(layout)), tuple(skipped)


def _unscaled(plan: Plan) -> tuple[ParamLayout, ...]:
    """The layout as it is before MS-AMP, whose step is not rehearsed."""
    steps = (planned.step for planned in plan.steps)
    upcast = {name for step in steps if isinstance(step, UpcastParameters) for name in step.names}
    stored = {fact.name: "float32" if fact.name in upcast else fact.dtype for fact in plan.facts.model.params}
    return tuple(
        evolve(param, cls="Parameter", dtype=stored[param.name]) if param.cls == "ScalingParameter" else param
        for param in plan.layout
    )
