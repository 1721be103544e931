"""Which types of language models do not train equal under DDP and FSDP2 here, and why: what the table rests on."""

EXCEPTIONS: tuple[tuple[str, str, str, str], ...] = ()
"""Outcome, type ("" for all), part of the detail, and the reason."""
