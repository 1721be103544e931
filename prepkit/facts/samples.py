"""What was read before the first step: samples, and checkpoints."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class SampleFacts:
    """What was read before the first step: samples, and checkpoints."""
