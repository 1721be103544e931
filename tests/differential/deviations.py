"""What prepkit does otherwise on purpose: for each row of ``docs/deviations.md`` what it makes of accelerate's table.

A row says exactly what it changes, and where. After all rows the two tables have to be equal: what is left is a bug of
prepkit, or a row that nobody has written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from attrs import frozen

from tests.differential.case import BLOCKS, Case
from tests.differential.seen import Seen, Table

NEVER = object()
"""In the place of a value: there is none."""
ROUNDING = 2**-8
"""How far two losses may be from each other, relatively, where gradients of one were rounded to bfloat16."""
FREE = "not compared"
"""In the place of a loss that cannot be told from accelerate's."""


@frozen
class Near:
    """In the place of a loss: prepkit's is so near, up to ``ROUNDING``."""

    value: float


@frozen
class Change:
    """A row at work: where it holds, and what it makes of what accelerate did."""

    row: str
    """A row of ``docs/deviations.md``, as its first column has it."""
    of: Callable[[Case, Table], Table]
    """Accelerate's table as prepkit's has to be."""


@frozen
class Refusal:
    """A row by which one of the two refuses alone."""

    row: str
    holds: Callable[[Case], bool]
    begins: str
    """How the refusal begins."""


def _set(table: Table, pattern: str, theirs: object, ours: object) -> Table:
    """Where a key of the pattern has the one value it gets the other; no other value is touched."""
    said = re.compile(pattern)
    changed = dict(table)
    for key, value in table.items():
        if said.fullmatch(key) and value == theirs:
            if ours is NEVER:
                del changed[key]
            else:
                changed[key] = ours
    return changed


def _uncalled(table: Table, function: str, places: tuple[str, ...]) -> Table:
    """Without the calls of a function for these places."""
    left = [place for place in table.get(f"{function} of", ()) if place not in places]
    gone = tuple(f"{function}[{place}]." for place in places)
    heads = tuple(f"{function}[{place}]" for place in places)
    kept = {key: value for key, value in table.items() if not key.startswith(gone) and not key.startswith(heads)}
    if f"{function} of" in kept:
        kept[f"{function} of"] = left
        if not left:
            del kept[f"{function} of"]
    return kept


# --- DDP, compile ----------------------------------------------------------------------------------------------------


def _bucket_views(case: Case, table: Table) -> Table:
    del case
    return _set(table, r"DistributedDataParallel\[\]\.gradient_as_bucket_view", theirs=False, ours=True)


_BESIDE = ("embed", "norm", "head")
"""What stands beside the blocks."""


def _blocks_alone(case: Case, table: Table) -> Table:
    """Regional compilation compiles the other children too, each by itself."""
    return _uncalled(table, "compile", _BESIDE) if case.compiled == "regional" else table


# --- FSDP ------------------------------------------------------------------------------------------------------------

_FSDP1 = "FullyShardedDataParallel"
_OWN_UNITS = ("embed", "head", "norm+head", "norm+embed+head", "embed+head")


def _no_unit_of_its_own(case: Case, table: Table) -> Table:
    """Input embedding, final norm and head stay with the root."""
    if case.engine != "fsdp2":
        return table
    table = _uncalled(table, "fully_shard", _OWN_UNITS)
    return _set(table, r"wrapped\[(embed|norm|head)\]", ["FSDPModule"], NEVER)


def _float32_out(case: Case, table: Table) -> Table:
    """Outputs are float32 under every engine, and only the root casts."""
    table = _set(table, r"fully_shard\[\]\.mp_policy\.output_dtype", "torch.bfloat16", "torch.float32")
    table = _set(table, r"fully_shard\[layers\.\d\]\.mp_policy\.output_dtype", "torch.bfloat16", None)
    return _set(table, "output dtype", "torch.bfloat16", "torch.float32") if case.precision == "bf16" else table


def _random_state_kept(case: Case, table: Table) -> Table:
    del case
    return _set(table, r"CheckpointWrapper\[.*\]\.checkpoint_fn_kwargs\.preserve_rng_state", theirs=False, ours=True)


def _one_unit(case: Case, table: Table) -> Table:
    """Of a checkpointed block the wrapper is the unit, not the block inside it once more."""
    if case.engine != "fsdp2":
        return table
    table = dict(table)
    for index in range(BLOCKS):
        key = f"wrapped[layers.{index}]"
        if table.get(key, []).count("FSDPModule") == 2:
            table[key] = [kind for kind in table[key] if kind != "FSDPModule"] + ["FSDPModule"]
            table[key].sort(reverse=True)
            places = list(table["fully_shard of"])
            places.remove(f"layers.{index}")
            table["fully_shard of"] = places
    return table


def _blocks_checkpointed(case: Case, table: Table) -> Table:
    """Without a policy FSDP1's checkpointing wraps every module, the root included."""
    if case.engine != "fsdp1" or case.wrap != "none" or not case.checkpointing:
        return table
    blocks = {f"layers.{index}" for index in range(BLOCKS)}
    others = tuple(place for place in table.get("CheckpointWrapper of", ()) if place not in blocks)
    table = _uncalled(table, "CheckpointWrapper", others)
    table = _set(table, r"wrapped\[\]", [_FSDP1, "CheckpointWrapper"], [_FSDP1])
    return _set(table, r"wrapped\[(?!layers\.\d\]).+\]", ["CheckpointWrapper"], NEVER)


def _sizes_before_sharding(case: Case, table: Table) -> Table:
    """By size, what a rank holds after sharding is counted: here the whole model is checkpointed, and no block."""
    if case.engine != "fsdp1" or case.wrap != "size" or not case.checkpointing:
        return table
    root = {key: value for key, value in table.items() if key.startswith("CheckpointWrapper[].")}
    table = _uncalled(table, "CheckpointWrapper", ("",))
    table = _set(table, r"wrapped\[\]", [_FSDP1, "CheckpointWrapper"], [_FSDP1])
    blocks = [f"layers.{index}" for index in range(BLOCKS)]
    for block in blocks:
        table = _set(table, rf"wrapped\[{re.escape(block)}\]", [_FSDP1], [_FSDP1, "CheckpointWrapper"])
        table |= {key.replace("[]", f"[{block}]"): value for key, value in root.items()}
    return table | {"CheckpointWrapper of": blocks}


# --- DeepSpeed -------------------------------------------------------------------------------------------------------

_DS = r"deepspeed\.initialize\.config\."


def _prints(case: Case, table: Table) -> Table:
    del case
    return _set(table, _DS + "steps_per_print", float("inf"), NEVER)


def _unclipped(case: Case, table: Table) -> Table:
    """Clipping that nobody asks for is 1.0, and the losses after a step are those of another run."""
    if not case.unclipped:
        return table
    table = _set(table, _DS + "gradient_clipping", 1.0, 0.0)
    return table | {f"loss[{number}]": FREE for number in (1, 2)}


def _untested(case: Case, table: Table) -> Table:
    """The switch is written where ZeRO needs it: for an optimizer that it does not know, from stage 1 on."""
    if case.optimizer == "SGD" and case.engine != "zero0":
        return table
    return _set(table, _DS + "zero_allow_untested_optimizer", theirs=True, ours=NEVER)


def _float32_sums(case: Case, table: Table) -> Table:
    """Gradients are added up and sent in float32, which under ZeRO-1 is another of DeepSpeed's optimizers."""
    if not case.engine.startswith("zero") or case.precision != "bf16":
        return table
    table = table | {"deepspeed.initialize.config.communication_data_type": "fp32"}
    if case.engine != "zero0":
        table |= {"deepspeed.initialize.config.data_types.grad_accum_dtype": "fp32"}
    if case.engine == "zero1":
        table = _set(table, "optimizer", "DeepSpeedZeroOptimizer", "BF16_Optimizer")
    near = {key: Near(table[key]) for key in ("loss[1]", "loss[2]") if isinstance(table[key], float)}
    return table | near


CHANGES = (
    Change("K-H1", _bucket_views),
    Change("CM-4, H-22, H-24", _blocks_alone),
    Change("M2-11", _no_unit_of_its_own),
    Change("G-52", _one_unit),
    Change("H-16", _random_state_kept),
    Change("G-29", _float32_out),
    Change("F1-9, G-7", _blocks_checkpointed),
    Change("F1-8", _sizes_before_sharding),
    Change("DP-9", _prints),
    Change("DS-12", _unclipped),
    Change("DS-16", _untested),
    Change("H-10c", _float32_sums),
)
THEIRS = (
    Refusal(
        "H-12b, G-8",
        lambda case: case.engine == "fsdp2" and case.wrap == "size",
        "ValueError: fully_shard does not support containers that do not implement forward: ModuleList(",
    ),
    Refusal(
        "P2-5, G-6",
        lambda case: case.engine == "fsdp2" and case.wrap == "none" and case.checkpointing,
        "TypeError: 'NoneType' object is not callable",
    ),
    Refusal(
        "CM-4, H-22, H-24",
        lambda case: case.engine == "fsdp1" and case.compiled == "regional",
        "RecursionError: maximum recursion depth exceeded",
    ),
)
"""Where accelerate fails."""
OURS = (
    Refusal("ST-24, G-44", lambda case: case.precision == "fp16", "precision.fp16-unsupported"),
    Refusal("ST-21, ST-33", lambda case: case.precision == "fp8", "fp8.unsupported-device"),
)
"""Where prepkit refuses; the ids of its rules."""


@frozen
class Verdict:
    """What is left between the two, and the rows that explain the rest."""

    rows: tuple[str, ...]
    unexplained: tuple[str, ...]
    """A line for each aspect: name, accelerate's value as the rows make it, prepkit's."""
    both_refuse: bool = False


def judged(case: Case, theirs: Seen, ours: Seen) -> Verdict:
    """Compares what was seen on one rank."""
    if theirs.refused or ours.refused:
        return _judged_refusals(case, theirs.refused, ours.refused)
    rows: list[str] = []
    table = theirs.table
    for change in CHANGES:
        changed = change.of(case, table)
        if changed != table:
            rows.append(change.row)
        table = changed
    aspects = sorted(set(table) | set(ours.table))
    left = tuple(
        f"{key}: {table.get(key, 'none')} | {ours.table.get(key, 'none')}"
        for key in aspects
        if not _same(key, table.get(key, NEVER), ours.table.get(key, NEVER))
    )
    return Verdict(tuple(rows), left)


def _judged_refusals(case: Case, theirs: str, ours: str) -> Verdict:
    """Where both refuse they agree, whatever accelerate says first; a refusal of prepkit is one of its rules."""
    known, text = (OURS, ours) if ours else (THEIRS, theirs)
    row = next((one.row for one in known if one.holds(case) and text.startswith(one.begins)), None)
    if row is None:
        return Verdict((), (f"{'prepkit' if ours else 'accelerate'} refuses: {text}",))
    return Verdict((), (), both_refuse=True) if theirs and ours else Verdict((row,), ())


def _same(key: str, theirs: Any, ours: Any) -> bool:
    if key.startswith("loss[") and theirs is not NEVER and ours is not NEVER:
        if isinstance(theirs, Near):
            return bool(abs(theirs.value - ours) <= ROUNDING * abs(theirs.value))
        return theirs is FREE or bool(abs(theirs - ours) <= 1e-6 * abs(theirs))
    return bool(theirs == ours)
