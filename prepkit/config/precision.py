"""The dtypes of parameters, of arithmetic and of reductions, and the libraries that train in float8."""

from __future__ import annotations

from types import NoneType
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


DType = Literal["float32", "bfloat16", "float16"]
"""The dtypes that can be asked for."""


@frozen(kw_only=True)
class BF16:
    """Compute in bfloat16; outputs come back in float32."""

    reduce_dtype: DType = "float32"
    """Dtype of the gradient reduction under FSDP2. DDP reduces in the dtype of the parameters."""
    output_dtype: DType = "float32"
    """Dtype of the model's floating outputs, cast after the forward. What the forward computes with them, as a loss of
    its own, is in bfloat16 under FSDP2 and DeepSpeed, and as autocast has it (losses in float32) under all others."""
    master_weights: bool = True
    """Store trainable parameters in float32, so that small updates are not rounded away. Frozen ones are untouched."""


@frozen(kw_only=True)
class FP8:
    """Linear layers multiply in float8; everything else is as in ``BF16`` (behaviour ST-21, H-20)."""

    backend: FP8Backend = TorchAO()
    """Which library. Never chosen by what happens to be installed or set in the environment."""
    reduce_dtype: DType = "float32"
    """As in ``BF16``."""
    output_dtype: DType = "float32"
    """As in ``BF16``."""
    master_weights: bool = True
    """As in ``BF16``."""


@frozen(kw_only=True)
class FP16:
    """Compute in float16 with a scaled loss; outputs come back in float32. Needs an accelerator.

    prepkit scales the loss, unscales before it clips, and skips a step whose gradients overflowed
    (torch ``GradScaler``; ``ready.skipped`` tells).
    """

    reduce_dtype: DType = "float32"
    """As in ``BF16``."""
    output_dtype: DType = "float32"
    """As in ``BF16``."""
    master_weights: bool = True
    """As in ``BF16``. Without it float16 weights cannot be trained: their gradients cannot be unscaled."""
    init_scale: float = 65536.0
    """What the loss is multiplied with at first; above 0."""
    growth_factor: float = 2.0
    """What the scale is multiplied with after ``growth_interval`` steps without overflow; above 1."""
    backoff_factor: float = 0.5
    """What the scale is multiplied with after an overflow; between 0 and 1."""
    growth_interval: int = 2000
    """Number of steps without overflow before the scale grows; at least 1."""


Precision = BF16 | FP16 | FP8 | None
"""None: compute in the dtype that each parameter is stored in; nothing is cast (accelerate's ``no``)."""


Mixed = BF16 | FP16 | FP8
"""Precisions that compute in another dtype than they store, for ``isinstance``."""


@frozen(kw_only=True)
class PrecisionTraits:
    """What the rest of prepkit asks of a precision, so that it need not know which ones there are."""

    compute_dtype: DType | None
    """What products are computed in, for those in ``Mixed``; None: in the dtypes that parameters and inputs have."""
    scales_loss: bool = False
    """Gradients need a scaled loss, or small ones would be 0."""
    deepspeed_section: Literal["bf16", "fp16"] | None = None
    """The section of a DeepSpeed config that it switches on."""


PRECISIONS: dict[type, PrecisionTraits] = {
    NoneType: PrecisionTraits(compute_dtype=None),
    BF16: PrecisionTraits(compute_dtype="bfloat16", deepspeed_section="bf16"),
    FP16: PrecisionTraits(compute_dtype="float16", scales_loss=True, deepspeed_section="fp16"),
    FP8: PrecisionTraits(compute_dtype="bfloat16", deepspeed_section="bf16"),
}
"""One row for each member of ``Precision``; ``tests/test_completeness.py`` sees that none is missing."""


def as_typed(precision: Precision) -> str:
    """A precision as one begins to type it: ``BF16()``, or ``None``."""
    return "None" if precision is None else f"{type(precision).__name__}()"
