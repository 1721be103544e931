"""Who steps the parameters."""

from __future__ import annotations

from attrs import frozen

from prepkit.facts import Scalar


@frozen(kw_only=True)
class OptimizerOf:
    """Which optimizer, and the options of each of its groups."""

    name: str
    module: str
    groups: tuple[tuple[tuple[str, Scalar], ...], ...]
