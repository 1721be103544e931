"""How a program's loop stands to its schedules, wrappers and collectives."""

from __future__ import annotations

from prepkit.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
"""Reporting order."""
