"""Activation checkpointing."""

from __future__ import annotations

from attrs import frozen

from prepkit.config.wrapping import Wrap, WrapBlocks


@frozen(kw_only=True)
class CheckpointBlocks:
    """Recompute each block's activations in backward (torch ``checkpoint_wrapper``, non-reentrant)."""

    blocks: Wrap = WrapBlocks()
    """Which modules."""
    preserve_rng_state: bool = True
    """Replay dropout exactly. False is faster and right only for blocks without randomness."""
    every: int = 1
    """1: all of these modules; 2: the second, the fourth and so on, while the others keep their activations, and alike
    for larger numbers (torchtitan's ``selective_ac_option``)."""
    keep_ops: tuple[str, ...] = ()
    """Operators whose outputs are kept instead of recomputed, such as ``aten.mm`` for all of its overloads or
    ``aten.mm.default`` for one (torch ``create_selective_checkpoint_contexts``)."""
    offload: bool = False
    """Keep what the blocks are recomputed from, their inputs, in host memory until backward (torch ``save_on_cpu``,
    behaviour K-F18). Outputs of ``keep_ops`` stay on the device."""


ActivationCheckpointing = CheckpointBlocks | None
"""None: all activations are kept."""
