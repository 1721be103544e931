"""torch_xla."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class MoveToXLA:
    """Moves the model to the XLA device of this process. Fails if optimizer and model lie on different devices."""

    forked: bool
    """Through torch_xla's ``MpModelWrapper``."""


@frozen(kw_only=True)
class ReduceXLAGradients:
    """Before every optimizer step, averages the gradients over all processes. Fails without an optimizer."""
