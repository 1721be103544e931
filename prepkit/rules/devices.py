"""On what a config computes."""

from __future__ import annotations

from prepkit.config import XLA, Config
from prepkit.facts import Facts


def computes_on(cfg: Config, facts: Facts) -> str:
    """Device type: that of the environment, unless XLA or the CPU is asked for. Others have their own rule."""
    if isinstance(cfg.engine, XLA):
        return "xla"
    return "cpu" if cfg.device == "cpu" else facts.env.device
