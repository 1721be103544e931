"""Gradient clipping."""

from __future__ import annotations

from attrs import frozen


@frozen
class ClipNorm:
    """Scale all gradients so that their joint norm, over every rank's shards, is at most ``max_norm``."""

    max_norm: float
    """Above 0."""
    norm_type: float = 2.0
    """Which p-norm."""


@frozen
class ClipValue:
    """Clamp every gradient element to ``[-max_value, max_value]``."""

    max_value: float
    """Above 0."""


Clip = ClipNorm | ClipValue | None
"""None: gradients are not clipped."""
