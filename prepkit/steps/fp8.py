"""Training in float8."""

from __future__ import annotations

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class ConvertFP8Linears:
    """Puts a torchao ``Float8Linear`` in the place of each Linear; without ``all_gather`` parameters stay the same.

    Fails if torchao cannot be imported, a module is no plain Linear any more, or one carries hooks that would be lost.
    """

    paths: tuple[str, ...]
    recipe: str
    """Name that torchao's ``Float8LinearConfig.from_recipe_name`` knows."""
    pad_inner_dim: bool
    all_gather: bool
    """Wrap the weights so that FSDP2 gathers them in float8: new parameters, of the same names."""
    emulate: bool


@frozen(kw_only=True)
class ConvertTransformerEngine:
    """Puts TransformerEngine's layers in the place of torch's and copies their values: new parameters, same names.

    Fails as ``ConvertFP8Linears`` does, and if a parameter is partitioned by ZeRO-3.
    """

    linears: tuple[str, ...]
    norms: tuple[str, ...]
    """Paths of LayerNorms with weight and bias."""


@frozen(kw_only=True)
class AutocastFP8Forward:
    """Runs the forward of whatever is outermost under TransformerEngine's autocast. Fails if it already does."""

    recipe: Literal["DelayedScaling", "MXFP8BlockScaling"]
    fp8_format: Literal["HYBRID", "E4M3"]
    margin: int
    during_eval: bool
    """Also while the model is in evaluation mode."""
    amax_history_len: int | None = None
    """None, here and below: not passed, because the recipe or newer libraries do not know it."""
    amax_compute_algo: str | None = None
    interval: int | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None


@frozen(kw_only=True)
class InitializeMSAMP:
    """MS-AMP replaces every Linear and the optimizer. Fails without Adam or AdamW, or if DDP would not reduce them."""

    opt_level: Literal["O1", "O2"]
    linears: tuple[str, ...]
    """Paths of the Linears that it will find."""
    kept: tuple[str, ...]
    """Paths of Linears that it is told to leave, because their weights are tied, or packed in fewer bits."""
    reduced: bool
    """DDP comes after it, which has to be MS-AMP's own to reduce float8 gradients."""


@frozen(kw_only=True)
class PrecomputeFloat8Scales:
    """After every optimizer step, one reduction gives the scales of all weights that FSDP2 gathers in float8.

    Fails without an optimizer, or if torchao cannot be imported.
    """
