"""What a program asks of its libraries, and what comes of it."""

from __future__ import annotations

from prepkit.rules.rule import Rule

RULES: tuple[Rule, ...] = ()
"""Reporting order."""
