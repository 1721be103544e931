"""Layers that are parallelized over tensor-parallel ranks."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class ParallelStyle:
    """Modules that are parallelized alike."""

    paths: tuple[str, ...]
    style: Literal["colwise", "rowwise", "sequence", "replicate"]
    input_layout: Literal["replicate", "features", "heads", "sequence"]
    """How the input arrives on the ranks of the axis."""
    output_layout: Literal["replicate", "features", "heads", "sequence"]
    """How the output leaves."""


@frozen(kw_only=True)
class ParallelizeModules:
    """Divides modules over one axis of the mesh, with hooks that lay out their inputs and outputs; ties stay ties.

    Has no way back: the model has to be built again if a later step fails.
    Fails if a module is of another kind, parallelized already or holds a gradient, or if the ranks hold different
    weights.
    """

    styles: tuple[ParallelStyle, ...]
    axis: str
