"""In which dtype each parameter is stored, gathered, reduced and returned once prepared."""

from __future__ import annotations

from typing import assert_never

from prepkit.config import (
    BF16,
    FP8,
    FP16,
    FSDP1,
    AsStored,
    Config,
    Intent,
    Mixed,
)
from prepkit.facts import Facts, ParamFact
from prepkit.resolve.fsdp1 import members

LOW = frozenset({"bfloat16", "float16"})


def low_precision(facts: Facts) -> tuple[ParamFact, ...]:
    """Trainable parameters that are stored in a 16-bit floating dtype."""
    return tuple(p for p in facts.model.params if p.requires_grad and p.dtype in LOW)


def masters(cfg: Config, facts: Facts) -> tuple[ParamFact, ...]:
    """Parameters that are stored in float32 before they are prepared, though they came in 16 bits.

    Under FSDP1 a frozen one too where its unit trains something: they share one flat parameter (F1-22, F1-24).
    """
    trains = cfg.intent is Intent.TRAINING  # inference keeps what is stored
    if not (isinstance(cfg.precision, Mixed) and cfg.precision.master_weights and trains):
        return ()
    if not isinstance(cfg.engine, FSDP1):
        return low_precision(facts)
    held = members(cfg, facts.model).values()
    along = {p.name for unit in held if any(p.requires_grad for p in unit) for p in unit}
    return tuple(p for p in facts.model.params if p.dtype in LOW and (p.requires_grad or p.name in along))


def stored_dtypes(cfg: Config, facts: Facts) -> dict[str, str]:
    """Parameter name to the dtype in which it is stored once prepared."""
    cast = {param.name for param in masters(cfg, facts)}
    return {p.name: "float32" if p.name in cast else p.dtype for p in facts.model.params}


def dtypes(cfg: Config) -> tuple[str | None, str | None, str | None]:
    """Dtype of gathered parameters, of the gradient reduction and of the root's output; None: as stored."""
    match cfg.precision:
        case AsStored():
            return None, None, None
        case BF16(reduce_dtype=reduce, output_dtype=output) | FP8(reduce_dtype=reduce, output_dtype=output):
            return "bfloat16", reduce, output
        case FP16(reduce_dtype=reduce, output_dtype=output):
            return "float16", reduce, output
        case _:
            assert_never(cfg.precision)
