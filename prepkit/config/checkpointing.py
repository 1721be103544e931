"""Activation checkpointing."""

from __future__ import annotations

from attrs import frozen

from prepkit.config.wrapping import Wrap, WrapBlocks


@frozen(kw_only=True)
class NoCheckpointing:
    """Keep all activations."""


@frozen(kw_only=True)
class CheckpointBlocks:
    """Recompute each block's activations in backward (torch ``checkpoint_wrapper``, non-reentrant)."""

    blocks: Wrap = WrapBlocks()
    """Which modules."""
    preserve_rng_state: bool = True
    """Replay dropout exactly. False is faster and right only for blocks without randomness."""


ActivationCheckpointing = NoCheckpointing | CheckpointBlocks
