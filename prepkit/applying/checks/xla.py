"""What the XLA steps leave behind."""

from __future__ import annotations

from collections.abc import Iterator

from prepkit.objects.state import LiveModel
from prepkit.objects.xla_gradients import XLAGradients
from prepkit.plan.attestation import Check, each
from prepkit.steps import MoveToXLA, ReduceXLAGradients


def moved(step: MoveToXLA, live: LiveModel) -> Iterator[Check]:
    """Every tensor is on an XLA device."""
    del step
    tensors = {**live.params, **live.buffers}
    elsewhere = [f"{name} is on {tensor.device}" for name, tensor in tensors.items() if tensor.device.type != "xla"]
    yield each("MoveToXLA", "everything is on xla", elsewhere)


def reduced(step: ReduceXLAGradients, live: LiveModel) -> Iterator[Check]:
    """A hook of the optimizer averages the gradients before each step."""
    del step
    hooks = getattr(live.target.optimizer, "_optimizer_step_pre_hooks", None)
    whole = live.target.whole_gradients
    bad = [] if hooks else ["the optimizer has no pre-step hook"]
    if not isinstance(whole, XLAGradients) or whole.optimizer is not live.target.optimizer:
        bad.append("nobody averages what is clipped")
    yield each("ReduceXLAGradients", "gradients are averaged before each step", bad)
