"""The part of ``Resolved`` that says where parameters and buffers get their values."""

from __future__ import annotations

from functools import cached_property

from attrs import frozen

from prepkit.config import Config
from prepkit.facts import Facts
from prepkit.facts.checkpoint import CheckpointFacts
from prepkit.resolve import checkpoint
from prepkit.resolve.checkpoint import CheckpointMatch


@frozen(kw_only=True)
class WeightSources:
    """Each property is worked out when it is first asked for, and kept."""

    cfg: Config
    facts: Facts

    @cached_property
    def checkpoint(self) -> CheckpointFacts | None:
        """The checkpoint that is loaded, with its keys renamed; None where none is, or it was not seen."""
        return checkpoint.requested_checkpoint(self.cfg, self.facts)

    @cached_property
    def match(self) -> CheckpointMatch | None:
        """That checkpoint held against the model."""
        return checkpoint.match(self.facts.model, self.checkpoint) if self.checkpoint else None

    @cached_property
    def initialized_params(self) -> tuple[str, ...]:
        """Names of the parameters that get their values from initializers."""
        return checkpoint.initialized_params(self.cfg, self.facts.model, self.match)

    @cached_property
    def computed_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that the model has to compute where they are on meta."""
        return checkpoint.computed_buffers(self.cfg, self.facts.model, self.match)
