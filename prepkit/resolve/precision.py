"""In which dtype each parameter is stored, gathered, reduced and returned once prepared."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from prepkit.config import Config, DType, Intent, Mixed, Precision
from prepkit.config.precision import PRECISIONS
from prepkit.facts import Facts, ParamFact
from prepkit.resolve.engines import traits

LOW = frozenset({"bfloat16", "float16"})
"""Floating dtypes of 16 bits."""


@frozen(kw_only=True)
class ComputeDtypes:
    """The dtypes of a forward and a backward."""

    param: DType
    """Of gathered parameters and of the products."""
    reduce: DType
    """Of the gradient reduction, under engines that let one be chosen."""
    output: DType
    """Of the model's floating outputs."""


def compute_dtypes(precision: Precision) -> ComputeDtypes | None:
    """In which dtypes a precision computes; None: in those that parameters and inputs have.

    >>> from prepkit.config import FP16
    >>> compute_dtypes(FP16()).param, compute_dtypes(None)
    ('float16', None)
    """
    if not isinstance(precision, Mixed):
        return None
    dtype = PRECISIONS[type(precision)].compute_dtype
    assert dtype is not None, "tests/test_completeness.py sees that what is in Mixed has one"
    return ComputeDtypes(param=dtype, reduce=precision.reduce_dtype, output=precision.output_dtype)


def low_precision_params(facts: Facts) -> tuple[ParamFact, ...]:
    """Trainable parameters that are stored in a 16-bit floating dtype."""
    return tuple(param for param in facts.model.params if param.requires_grad and param.dtype in LOW)


def makes_master_weights(cfg: Config) -> bool:
    """Return whether what is trained in 16 bits is stored in float32; inference keeps what is stored."""
    return isinstance(cfg.precision, Mixed) and cfg.precision.master_weights and cfg.intent is Intent.TRAINING


def master_weights(
    cfg: Config, facts: Facts, flat_params: Mapping[str, tuple[ParamFact, ...]]
) -> tuple[ParamFact, ...]:
    """Parameters that are stored in float32 before they are prepared, though they came in 16 bits.

    Under FSDP1 a frozen one too where its unit trains something: they share one flat parameter (F1-22, F1-24).
    ``flat_params``: path of an FSDP1 unit to its parameters; not read for the other engines.
    """
    if not makes_master_weights(cfg):
        return ()
    if not traits(cfg).flattens:
        return low_precision_params(facts)
    training_units = (params for params in flat_params.values() if any(param.requires_grad for param in params))
    flattened = {param.name for params in training_units for param in params}
    return tuple(
        param for param in facts.model.params if param.dtype in LOW and (param.requires_grad or param.name in flattened)
    )


def stored_dtypes(facts: Facts, master_weights: tuple[ParamFact, ...]) -> dict[str, str]:
    """Parameter name to the dtype in which it is stored once prepared."""
    masters = {param.name for param in master_weights}
    return {param.name: "float32" if param.name in masters else param.dtype for param in facts.model.params}
