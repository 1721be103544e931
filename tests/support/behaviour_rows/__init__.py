"""Which rule, step or test answers each row of the behaviour reference; or why prepkit does otherwise.

One file per section of the reference; what an answer is says ``answers``.
"""

from __future__ import annotations

from tests.support.behaviour_rows import (
    deepspeed,
    fp8_and_xla,
    fsdp1,
    fsdp2,
    gaps,
    helpers,
    knobs,
    loaders,
    model,
    parallelism,
    prepare,
    since,
    start,
    wrappers,
)
from tests.support.behaviour_rows.answers import Answers

TABLES: tuple[dict[str, Answers], ...] = (
    start.START,
    prepare.PREPARE,
    prepare.BOOKKEEPING,
    model.DEVICE_MAP,
    model.AUTOCAST,
    model.QUANTISED,
    model.PLACEMENT,
    model.DATA_PARALLEL,
    model.COMPILE,
    model.TENSOR_PARALLEL,
    helpers.HELPERS,
    fp8_and_xla.FP8_AND_XLA,
    fsdp1.FSDP1,
    fsdp2.FSDP2,
    deepspeed.DEEPSPEED,
    wrappers.WRAPPERS,
    loaders.LOADERS,
    parallelism.PARALLELISM,
    knobs.KNOBS,
    since.SINCE,
    gaps.GAPS,
)
"""No row stands in two of them."""

ROWS: dict[str, Answers] = {row: answers for table in TABLES for row, answers in table.items()}
