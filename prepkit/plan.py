"""The plan: ordered steps with their reasons, what they lead to, and what they were made from."""

from __future__ import annotations

from math import prod
from typing import Any

from attrs import field, frozen

from prepkit.config import Clip, Config
from prepkit.facts import Facts
from prepkit.findings import Finding
from prepkit.layout import ParamLayout
from prepkit.steps import Axis, Step


@frozen(kw_only=True)
class Planned:
    """A step and why it stands there."""

    step: Step
    reason: str
    """One clause, read after the step; never read by the interpreter."""
    rows: tuple[str, ...] = ()
    """Rows of the behaviour reference that the step answers, such as ``DDP-5``."""


def because(step: Step, reason: str, *rows: str) -> tuple[Planned, ...]:
    """A piece of a plan: one step with its reason and its behaviour rows. Pieces add as tuples do."""
    return (Planned(step=step, reason=reason, rows=rows),)


@frozen(kw_only=True)
class Owners:
    """Who counts, clips, ticks and keeps: the same fields for every engine, so that plans can be compared."""

    accumulation: str
    """Who counts micro-batches."""
    accumulation_steps: int
    """Micro-batches per optimizer step."""
    clipping: str
    """Who clips gradients."""
    clip: Clip
    scheduler: str
    """Who steps the scheduler."""
    scheduler_ticks: int
    """Scheduler steps per optimizer step."""
    master_weights: str
    """Where the float32 copy of low-precision trainable parameters lives, or why there is none."""
    loss_scaling: str = "nobody"
    """Who scales the loss, unscales the gradients and skips steps that overflowed."""


@frozen(kw_only=True)
class Provenance:
    """What the plan was made from."""

    prepkit: str
    """Version of prepkit."""
    config: str
    """Digest of the config."""
    facts: str
    """Digest of the facts."""
    assumed: tuple[str, ...]
    """Environment facts that were declared, not seen."""


@frozen(kw_only=True)
class Plan:
    """An immutable plan. The same value on every rank: nothing in it mentions a rank."""

    config: Config
    facts: Facts
    mesh: tuple[Axis, ...]
    """Axes of the device mesh, slowest first; empty for one process."""
    steps: tuple[Planned, ...]
    layout: tuple[ParamLayout, ...]
    """What each parameter becomes, in the order of the facts."""
    owners: Owners
    provenance: Provenance
    warnings: tuple[Finding, ...] = ()
    overridden: tuple[Finding, ...] = ()
    """Errors that ``config.overrides`` accepted."""
    target: Any = field(default=None, eq=False, repr=False)
    """The live objects that the plan was built from; in no digest, no file and no comparison."""

    @property
    def world_size(self) -> int:
        """Number of ranks that the plan is for."""
        return self.facts.env.world_size

    @property
    def data_parallel_size(self) -> int:
        """Number of parts that the data is divided into: ranks that differ only on the tensor axis read the same."""
        return prod(axis.size for axis in self.mesh if axis.name != "tensor")

    def save(self, path: str) -> None:
        """Writes the plan file (format in ``codec``)."""
        from prepkit.codec import save_plan  # the public face asks for a method; nothing else here needs it

        save_plan(self, path)

    def __str__(self) -> str:
        from prepkit.render.plan import plan_text  # printing a plan is the public face; nothing else here needs it

        return plan_text(self)
