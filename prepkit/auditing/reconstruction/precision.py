"""In which dtypes a prepared model stores, computes, reduces and returns, as the precision of a config."""

from __future__ import annotations

from typing import cast

from attrs import evolve

from prepkit.auditing.reconstruction.reasons import Reasons
from prepkit.config import BF16, FP16, DType, Precision
from prepkit.facts import ModelFacts, UnitFact
from prepkit.facts.preparation import AutocastOptions, FlatUnitOptions, HowPrepared
from prepkit.resolve.precision import LOW

KINDS: dict[str, type[BF16 | FP16]] = {"bfloat16": BF16, "float16": FP16}


def _mixed(dtype: str, reduce: str | None, output: str | None, model: ModelFacts) -> Precision:
    low = any(param.requires_grad and param.dtype in LOW for param in model.params)
    return KINDS[dtype](
        reduce_dtype=cast("DType", reduce or dtype),
        output_dtype=cast("DType", output or dtype),
        master_weights=not low,
    )


def of_autocast(how: AutocastOptions | None, model: ModelFacts) -> Precision:
    """Of a model whose forward runs under autocast, or as it is. Gradients are reduced as parameters are stored."""
    if how is None or how.dtype not in KINDS:
        return None
    return _mixed(how.dtype, "float32", how.output_dtype, model)


def of_units(root: UnitFact, others: tuple[UnitFact, ...], model: ModelFacts, reasons: Reasons) -> Precision:
    """Of units of FSDP2; ``others`` without those that stay in float32."""
    reasons.same("model", "the dtype that units compute in", {unit.param_dtype for unit in (root, *others)})
    reasons.same("model", "the dtype that units reduce in", {unit.reduce_dtype for unit in (root, *others)})
    for unit in others:
        if unit.output_dtype not in (None, root.param_dtype):
            reasons.add(f"model.{unit.path}", f"the unit casts its output to {unit.output_dtype}", _OUTPUT)
            break
    return _of_dtypes(root.param_dtype, root.reduce_dtype, root.output_dtype, model, reasons)


def of_flat_units(
    root: FlatUnitOptions, others: tuple[FlatUnitOptions, ...], how: HowPrepared, reasons: Reasons
) -> Precision:
    """Of units of FSDP1; what the model returns is said by the autocast around it."""
    reasons.same("model", "the dtype that units compute in", {unit.param_dtype for unit in (root, *others)})
    reasons.same("model", "the dtype that units reduce in", {unit.reduce_dtype for unit in (root, *others)})
    output = how.autocast.output_dtype if how.autocast else None
    if root.param_dtype is None and how.autocast is not None:
        reasons.add("model", f"autocast computes in {how.autocast.dtype}, and units gather what is stored", _BOTH)
    return _of_dtypes(root.param_dtype, root.reduce_dtype, output, how.model, reasons)


def _of_dtypes(
    dtype: str | None, reduce: str | None, output: str | None, model: ModelFacts, reasons: Reasons
) -> Precision:
    if dtype in KINDS:
        return _mixed(str(dtype), reduce, output, model)
    if dtype not in (None, "float32"):
        reasons.add(
            "model", f"units compute in {dtype}", "Compute in bfloat16 or float16, or as parameters are stored."
        )
    stored = {param.dtype for param in model.params if param.requires_grad}
    for word, value in (("reduce in", reduce), ("return", output), ("compute in", dtype)):
        if value is not None and stored - {value}:
            what = f"units {word} {value} what is stored in {', '.join(sorted(stored - {value}))}"
            reasons.add("model", what, "Compute in 16 bits with precision=BF16(...), or cast nothing.")
    return None


def of_engine(precision: Precision, how: HowPrepared) -> Precision:
    """Return what a DeepSpeed JSON says, with the dtype in which the model returns."""
    if not isinstance(precision, BF16 | FP16):
        return precision
    own = "bfloat16" if isinstance(precision, BF16) else "float16"
    output = how.autocast.output_dtype if how.autocast else None
    return evolve(precision, output_dtype=cast("DType", output or own))


_OUTPUT = "Cast the output of the root alone: MixedPrecisionPolicy(output_dtype=...) there."
_BOTH = "Give the units MixedPrecision(param_dtype=...) too."
