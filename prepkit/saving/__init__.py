"""Checkpoints: what is in one, how it is written whole or not at all, found again, checked, and read by any engine."""
