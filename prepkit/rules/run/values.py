"""Values that a program has changed on the way, and how its weights began."""

from __future__ import annotations

from prepkit.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
"""Reporting order."""
