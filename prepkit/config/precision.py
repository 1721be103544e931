"""The dtypes of parameters, of arithmetic and of reductions."""

from __future__ import annotations

from types import NoneType
from typing import Literal

from attrs import frozen

from prepkit.config.fp8 import FP8Backend, TorchAO

DType = Literal["float32", "bfloat16", "float16"]
"""The dtypes that can be asked for."""


@frozen(kw_only=True)
class BF16:
    """Compute in bfloat16; outputs come back in float32."""

    reduce_dtype: DType = "float32"
    """Dtype of the gradient reduction under FSDP2. DDP reduces in the dtype of the parameters."""
    output_dtype: DType = "float32"
    """Dtype of the model's floating outputs, cast behind the forward. What the forward computes with them, as a loss of
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
