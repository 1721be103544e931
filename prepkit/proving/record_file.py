"""The file of one rank's record: tensors as safetensors, and a strict JSON header about them. Nothing is pickled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attrs import frozen
from torch import Tensor

from prepkit import codec
from prepkit.facts.proof import ClipProof
from prepkit.findings import PlanRejected
from prepkit.rules import found

FORMAT = 1
"""Raised when a record can no longer be read as before."""
KEY = "prepkit.record"
"""Of the header among the file's metadata."""


@frozen(kw_only=True)
class HeldPart:
    """One parameter: which part of it this rank holds, and who steps it."""

    name: str
    shape: tuple[int, ...]
    start: int
    """Place of the part's first element in the whole."""
    dims: tuple[tuple[int, int, int], ...] | None = None
    """How places become indices of the whole, as in ``observe.fingerprints.parts``; None: they are the indices."""
    trained: bool = True
    group: int | None = None
    """Of the optimizer that stepped; None: it does not hold it."""


@frozen(kw_only=True)
class RecordedCall:
    """One call of the root's forward."""

    inputs: str
    """Arguments and keywords as ``tree.written`` leaves them."""
    micro: int
    """The backward that it belongs to, counted from 0."""
    outputs: tuple[int, ...]
    """Places of the outputs at which a gradient arrived."""


@frozen(kw_only=True)
class Micro:
    """One backward."""

    loss: float
    factor: float
    """By which the loss was multiplied on the way from what a loss function, or the model, returned."""
    total: bool = False
    """Whether that was a sum over samples, so that the factor is a part of the mean."""


@frozen(kw_only=True)
class Head:
    """Everything of a record but its tensors."""

    format: int = FORMAT
    rank: int
    world: int
    calls: tuple[RecordedCall, ...]
    micros: tuple[Micro, ...]
    params: tuple[HeldPart, ...]
    evaluating: tuple[str, ...] = ()
    """Paths of modules that are not in training mode."""
    optimizer: str
    """Its class."""
    groups: tuple[str, ...]
    """Options of each of its groups as JSON, those alone that are numbers, switches or pairs of numbers."""
    fresh: bool
    """Whether it had no state yet."""
    dtype: str
    """The lowest floating dtype that it has computed in."""
    sent: str = "float32"
    """The lowest in which gradients may have gone to other ranks."""
    scale: float = 1.0
    clip: ClipProof | None = None
    accumulation: int | None = None
    limits: tuple[str, ...] = ()


@frozen(eq=False)
class Record:
    """One rank's record in memory."""

    head: Head
    tensors: dict[str, Tensor]


def path_of(folder: Path, rank: int) -> Path:
    """Where a rank's record lies in the folder of a window."""
    return folder / f"rank-{rank}.record"


def write(record: Record, folder: Path) -> None:
    """Writes one file."""
    from safetensors.torch import save_file

    plain = {key: tensor.detach().contiguous() for key, tensor in record.tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(codec.to_data(record.head), sort_keys=True)
    save_file(plain, str(path_of(folder, record.head.rank)), metadata={KEY: text})


def read(folder: Path) -> tuple[Record, ...]:
    """The records of every rank. Raises ``PlanRejected`` where one is torn, foreign, from another format or missing."""
    first = _read(path_of(folder, 0))
    records = (first, *(_read(path_of(folder, rank)) for rank in range(1, first.head.world)))
    for rank, record in enumerate(records):
        if (record.head.rank, record.head.world) != (rank, first.head.world):
            said = f"it says rank {record.head.rank} of {record.head.world}"
            raise _refused(path_of(folder, rank), f"{said}, beside a record of {first.head.world} ranks")
    return records


def _read(path: Path) -> Record:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(KEY)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no mapping
    except (OSError, SafetensorError) as error:
        raise _refused(path, f"it cannot be read: {error}") from error
    if text is None:
        raise _refused(path, "it is a safetensors file, and no record")
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"its header is no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _refused(path, f"its format is {data.get('format') if isinstance(data, dict) else None}, not {FORMAT}")
    head = codec.from_data(data, Head, path.name)
    wanted = [f"{kind}/{one.name}" for one in head.params for kind in ("weight",)]
    if missing := [key for key in wanted if key not in tensors]:
        raise _refused(path, f"its header names {missing[0]}, which it does not hold")
    return Record(head, tensors)


def _refused(path: Path, what: str) -> PlanRejected:
    return PlanRejected((found("prove.record", path.name, what),))
