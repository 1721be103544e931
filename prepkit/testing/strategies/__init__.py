"""Hypothesis strategies, by what they draw. ``prepkit.testing`` hands on what users need."""
