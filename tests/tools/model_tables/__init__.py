"""Probes transformers without data, and solves for what its models are as expressions in their configs' fields."""
