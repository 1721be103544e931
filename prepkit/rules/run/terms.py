"""What the terms of a loss are, and what they train."""

from __future__ import annotations

from prepkit.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
"""Reporting order."""
