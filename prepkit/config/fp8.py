"""The libraries that train in float8, and what can be asked of each. ``config.FP8`` holds one of them."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class TorchAO:
    """torchao's ``Float8Linear`` in the place of ``torch.nn.Linear`` (behaviour K-H6, X-4; torchao >= 0.6.1)."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Name of torchao's recipe: one scale per tensor; one per row; or per row with weight gradients in bfloat16."""
    pad_inner_dim: bool = True
    """Pad the inner dimension of each product with zeros, for batches whose number of tokens is no multiple of 16."""
    float8_all_gather: bool | None = None
    """FSDP2 gathers the weights in float8. None: it does where it can, with the tensorwise recipe under FSDP2."""
    precompute_scales: bool = True
    """With float8_all_gather: one reduction after each optimizer step for all scales, instead of one per weight."""
    keep_first_and_last: bool = True
    """Leave the model's first and last Linear, in module order, as they are (behaviour H-32)."""
    skip: tuple[str, ...] = ()
    """Shell patterns over dotted paths of Linears to leave as they are, such as ``("layers.*.router",)``."""
    emulate: bool = False
    """Round to float8 and multiply in the wider dtype. Slow; what runs on a CPU and on older GPUs."""


@frozen(kw_only=True)
class DelayedScaling:
    """TransformerEngine's recipe with one scale per tensor, from the largest values of earlier steps (K-H5)."""

    margin: int = 0
    """Powers of two that the scale stays below its maximum."""
    fp8_format: Literal["HYBRID", "E4M3"] = "HYBRID"
    """HYBRID: E4M3 forward and E5M2 backward."""
    interval: int = 1
    """Steps between new scales. Only 1 is known to TransformerEngine 2 and newer."""
    amax_history_len: int = 1024
    """Number of earlier steps whose largest values are kept."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Which of them gives the scale."""
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    """Run forward, input gradient, weight gradient in the wider dtype. TransformerEngine 2 knows all-False only."""


@frozen(kw_only=True)
class MXFP8BlockScaling:
    """TransformerEngine's recipe with one scale per 32 values; needs compute capability 10.0, keeps no history."""

    margin: int = 0
    """Powers of two that the scale stays below its maximum."""
    fp8_format: Literal["E4M3", "HYBRID"] = "E4M3"
    """As in ``DelayedScaling``."""


@frozen(kw_only=True)
class TransformerEngine:
    """TransformerEngine's Linear and LayerNorm in the place of torch's, and its autocast (K-H5, TE-1, TE-2, X-3)."""

    recipe: DelayedScaling | MXFP8BlockScaling = DelayedScaling()
    """How values are scaled."""
    autocast_during_eval: bool = False
    """Compute in float8 after ``model.eval()`` too."""
    convert_norms: bool = True
    """Replace LayerNorms that have a weight and a bias; others stay torch's."""
    skip: tuple[str, ...] = ()
    """Shell patterns over dotted paths of modules to leave as they are."""


@frozen(kw_only=True)
class MSAMP:
    """MS-AMP: float8 weight gradients, scaled float16 weights, an optimizer of its own (K-H7, X-5). Deprecated."""

    opt_level: Literal["O1", "O2"] = "O2"
    """O2 keeps the first moment in float8 and the second in float16; O1 keeps both in float32."""


FP8Backend = TorchAO | TransformerEngine | MSAMP
