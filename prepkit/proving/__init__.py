"""Proof by replay: one window of training as it really ran, done again plainly on one process, and compared."""
