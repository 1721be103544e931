"""What was seen of model, optimizer, scheduler, loaders and environment, as plain data.

``Facts`` holds only what is the same on every rank, so that all ranks plan alike; what may differ from rank to
rank (devices, meta or real, host memory) is in ``LocalFacts``, which the planner never reads.
Names are canonical: without the segments that compile and checkpoint wrappers put into them.
"""

from __future__ import annotations

from attrs import frozen

from prepkit.facts.checkpoint import CheckpointFacts
from prepkit.facts.env import Env, parse_bytes
from prepkit.facts.model import (
    ArchitectureFacts,
    BufferFact,
    ClassFact,
    Mark,
    ModelFacts,
    ModuleFact,
    ParamFact,
    ParamHook,
    UnitFact,
)
from prepkit.facts.training import GroupFact, LoaderFacts, MemberFact, OptimizerFacts, Scalar, SchedulerFacts


@frozen(kw_only=True)
class Facts:
    """Everything that the rules and the planner read. The same value on every rank."""

    model: ModelFacts
    optimizer: OptimizerFacts | None = None
    scheduler: SchedulerFacts | None = None
    loaders: tuple[LoaderFacts, ...] = ()
    checkpoint: CheckpointFacts | None = None
    """The checkpoint that ``config.weights`` names; None: not asked for, or not seen."""
    env: Env = Env()


@frozen(kw_only=True)
class LocalFacts:
    """What may differ from rank to rank. Shown to people, read by no rule and no planner."""

    rank: int = 0
    local_rank: int = 0
    param_devices: tuple[tuple[str, int], ...] = ()
    """Device and number of parameters on it, such as ``(("meta", 291),)``."""
    buffer_devices: tuple[tuple[str, int], ...] = ()
    host_memory: int | None = None
    """Bytes of host memory that are available; None: not known."""


@frozen(kw_only=True)
class Observation:
    """What ``observe`` returns."""

    facts: Facts
    local: LocalFacts
