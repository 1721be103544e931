"""Whether the methods that were planned as entry points run as the forward does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.distributed.fsdp import FSDPModule

from prepkit.objects.entry_point import ThroughWrapper, like_forward
from prepkit.objects.state import LiveModel
from prepkit.plan.attestation import Check, each
from prepkit.steps import RegisterEntryPoints


def checks(step: RegisterEntryPoints, live: LiveModel) -> Iterator[Check]:
    """Each method stands in the instance of the outermost module, and goes the planned way."""
    outer, inner = live.target.model, live.modules[""][-1]
    ways = {
        "units": lambda call: isinstance(outer, FSDPModule) and getattr(call, "__self__", None) is outer,
        "wrapper": lambda call: isinstance(call, ThroughWrapper) and (call.outer, call.inner) == (outer, inner),
        "forward": lambda call: type(call) is type(like_forward(inner, len)),
    }
    bad = [
        f"{name} runs as the class has it"
        for name in step.names
        if not _goes(vars(outer).get(name), ways[step.through])
    ]
    yield each("RegisterEntryPoints", "methods run as forward does", bad)


def _goes(call: Any, way: Any) -> bool:
    return call is not None and way(call)
