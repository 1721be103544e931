"""The effect layer: the only place that touches torch or the environment.

Observing needs torch alone: what applies a plan, with torch's distributed packages, arrives when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prepkit.live.apply import ApplyHalted as ApplyHalted
    from prepkit.live.apply import NotAsPlanned as NotAsPlanned
    from prepkit.live.apply import run as run


def __getattr__(name: str) -> Any:
    if name in {"ApplyHalted", "NotAsPlanned", "run"}:
        return getattr(importlib.import_module("prepkit.live.apply"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
