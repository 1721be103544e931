"""Config files of prepkit and of others, as ``Config``."""

from __future__ import annotations

from collections.abc import Callable

from prepkit.config import Config
from prepkit.importers.native import read_config

IMPORTERS: dict[str, Callable[[str], Config]] = {"prepkit": read_config}
"""Whose file it is to the function that reads it; each raises ``PlanRejected`` with every finding."""
