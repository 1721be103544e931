"""What was read before the first step: samples, and checkpoints."""

from __future__ import annotations

from prepkit.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
"""Reporting order."""
