"""The file of one rank's record: tensors as safetensors, and a strict JSON header about them. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from prepkit import codec
from prepkit.facts.proof import ClipProof
from prepkit.findings import PlanRejected
from prepkit.proving import tree
from prepkit.rules import found

FORMAT = 3
"""Raised when a record can no longer be read as before."""
FLOATING: tuple[str, ...] = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
COMPLEX = "complex:"
"""How keys begin under which pairs of numbers lie: safetensors knows not every complex dtype."""
PAIRS = (torch.float16, torch.float32, torch.float64)
KEY = "prepkit.record"
"""Of the header among the file's metadata."""


LARGEST = 4 << 30
"""Bytes that a record may take on a rank."""


class TooLarge(ValueError):
    """A record would take more memory than it may, or cannot be made; the text says which."""


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
    here: int = 0
    """Elements of it on this rank."""
    group: int | None = None
    """Of the optimizer that stepped; None: it does not hold it."""


@frozen(kw_only=True)
class Returned:
    """One floating output of a call: norm and some elements of it lie under ``seen/``."""

    place: int
    shape: tuple[int, ...]
    dtype: str
    inside: str
    """The lowest floating dtype of what it was computed from, before it was cast last."""


COLLECTIVES = frozenset(
    {
        *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier", "gather", "scatter"),
        *("allgather", "allgather_coalesced", "all_gather_single", "_allgather_base"),
        *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
        *("alltoall", "all_to_all_single", "alltoall_base"),
    }
)
"""Methods of a process group that a forward may call, by their names in any version of torch."""


@frozen(kw_only=True)
class Question:
    """A collective in a forward, over tensors without a gradient; what it gave lies under ``asked/``."""

    name: str
    line: str
    """That has called it."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of all its tensors; those come first that take what it gives."""


@frozen(kw_only=True)
class RecordedCall:
    """One call of the root's forward."""

    inputs: str
    """Arguments and keywords as ``tree.written`` leaves them."""
    micro: int
    """The backward that it belongs to, counted from 0."""
    outputs: tuple[int, ...]
    """Places of the outputs at which a gradient arrived."""
    entry: str = "forward"
    """The method of the bare module that was run."""
    digest: str = ""
    """Of all tensors that it was given."""
    returned: tuple[Returned, ...] = ()
    """Its first outputs, as the loop got them."""
    evaluating: tuple[str, ...] = ()
    """Modules that were in evaluation."""
    frozen: tuple[str, ...] = ()
    """Parameters of those that the window trains which were frozen in it."""
    apart: bool = False
    """Whether one node has made all outputs, as DDP hands them on, so that none of them is computed from another."""
    asked: tuple[Question, ...] = ()
    """Collectives of its own, in their order."""


@frozen(kw_only=True)
class Micro:
    """One backward."""

    loss: float
    factor: float
    """By which the loss was multiplied on the way from what a loss function, or the model, returned."""
    total: bool = False
    """Whether that was a sum over samples, so that the factor is a part of the mean."""
    tokens: float | None = None
    """Over how many tokens it is a mean, where the run weighs it by them."""
    count: float | None = None
    """Over how many elements it is a mean or a sum, as its graph says."""
    summed: float | None = None
    """How many elements a plain sum has added up, be some of them masked."""
    divisors: tuple[float, ...] = ()
    """Numbers that the program has divided it by."""
    meant: tuple[float, ...] = ()
    """Parts of the factor that may be the loss's own, and no number of the run."""
    given: bool = False
    """Whether the program gave the backward gradients of its own, as a stage of a pipeline gets them."""
    line: str = ""
    """Where the program went backward; empty: nobody knows."""
    operators: str = ""
    """What the program has made its loss with, as ``loss_graph.operators_of``."""
    added: int = 1
    """Of how many losses of one kind, each of a call of its own, it is the sum; nothing has divided them."""
    like: int = 0
    """Losses that were made in the same line, by the same operators and with the same weights have the same number."""


@frozen(kw_only=True)
class Traced:
    """An output that was noted: its numbers lie under ``trace/`` and its place."""

    micro: int
    kind: str
    """``module``, ``operator``, or ``gradient`` that arrived at a module's output."""
    path: str
    """The module."""
    operator: str = ""
    shape: tuple[int, ...]
    dtype: str
    fed: tuple[int, ...] = ()
    """Places in the trace of the operators whose outputs an operator was given."""


@frozen(kw_only=True)
class Disturbed:
    """What a program has done to a model in the window beside forward, backward and step."""

    unproven: str = ""
    """Why nothing can be compared; empty: it can."""
    moved: tuple[str, ...] = ()
    """Parameters that something has changed between the first forward and the step."""
    swung: bool = False
    """Whether something has changed them between two forwards, and put them back before the step."""
    left: tuple[str, ...] = ()
    """Parameters that had a gradient before the first backward."""
    faded: float = 0.0
    """The number by which these are what the window before has stepped, all alike, and which none of them is told for;
    0: they are not."""
    outside: tuple[str, ...] = ()
    """Parameters that the loss uses itself, beside the model's outputs."""
    beside: tuple[str, ...] = ()
    """Lines that went backward over weights of the model, and over no output of it."""
    wrapper: str = ""
    """The class of what wraps the model there, or stands around the model that is called; empty: nothing does."""
    raw: bool = False
    """Whether nothing wraps or shards the model, or a part of it."""
    uses: tuple[str, ...] = ()
    """Tools that the program has made, as ``bare.uses`` names them."""
    kept: tuple[str, ...] = ()
    """Parameters that still had their gradient when the next window went backward."""
    twice: bool = False
    """Whether the optimizer has stepped once more before anything went backward."""
    cleared: int = 0
    """Micro-batches whose gradients were cleared before the step."""
    wasted: int = 0
    """Those of them that are certainly of the same step, as ``hooks.Around.wasted``."""
    unstepped: tuple[str, ...] = ()
    """Why nothing is proven of other models that have had gradients, a sentence each."""
    detached: tuple[str, ...] = ()
    """Classes of other models whose optimizer has stepped over no gradient each time."""
    idle: bool = False
    """Whether nothing else was recorded, because each step comes after gradients were cleared."""
    doubled: tuple[str, ...] = ()
    """Lines in which a loss went backward that had done so before."""
    lends: bool = False
    """Whether a module was called with weights that were computed from others, as from this one's outputs."""
    asked: bool = False
    """Whether the program has asked for gradients, and puts them into their places itself."""
    averages: str = ""
    """The line of the program that averages weights over ranks, behind this step or another; empty: none was seen."""


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
    odd: tuple[str, ...] = ()
    """Entries of its state that are neither numbers nor as large as a parameter, and are not recorded."""
    dtype: str
    """The lowest floating dtype that it has computed in."""
    sent: str = "float32"
    """The lowest in which gradients may have gone to other ranks."""
    scale: float = 1.0
    clip: ClipProof | None = None
    value: float | None = None
    """To which each element of a gradient was clipped; None: none was."""
    accumulation: int | None = None
    divides: int | None = None
    """Micro-batches of a full window, by which each loss is to be divided however many backwards this one has, as plan
    and loop say; None: nobody says, and each backward is taken for a micro-batch."""
    elsewhere: tuple[str, ...] = ()
    """Trained parameters that another optimizer holds, which has not stepped in this window."""
    settings: tuple[str, ...] = ()
    """Numbers that layers of torch's were made with, as ``2.p=0.1``."""
    cut: bool = False
    """Whether it has layers that compute with a part of their weights: ranks that share them read the same samples."""
    device: str = "cpu"
    """Type of the device on which it was computed."""
    disturbed: Disturbed = Disturbed()
    lines: tuple[str, ...] = ()
    """Where the program went backward and stepped, as ``train.py:31``."""
    limits: tuple[str, ...] = ()
    ran_as: int | None = None
    """Its rank in the run, which the program may ask for; None: as ``rank``, which counts those that are proven
    together."""
    variables: tuple[tuple[str, str], ...] = ()
    """What a launcher had told it about itself, as ``RANK``."""
    trace: tuple[Traced, ...] = ()
    """Outputs in the order in which they were computed; empty: nobody asked for them."""

    @property
    def asked(self) -> int:
        """What the program got that asked for its rank."""
        return self.rank if self.ran_as is None else self.ran_as


@frozen(eq=False)
class Record:
    """One rank's record in memory."""

    head: Head
    tensors: Mapping[str, Tensor]


def path_of(folder: Path, rank: int) -> Path:
    """Return where a rank's record lies in the folder of a window."""
    return folder / f"rank-{rank}.record"


def write(record: Record, folder: Path) -> None:
    """Writes one file."""
    from safetensors.torch import save_file

    plain = dict(_plain(key, tensor.detach()) for key, tensor in record.tensors.items())
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(codec.to_data(record.head), sort_keys=True)
    save_file(plain, str(path_of(folder, record.head.rank)), metadata={KEY: text})


def _plain(key: str, tensor: Tensor) -> tuple[str, Tensor]:
    """As safetensors takes it."""
    if tensor.is_complex():
        key, tensor = f"{COMPLEX}{key}", torch.view_as_real(tensor)
    return key, tensor.contiguous()


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
            held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no mapping
    except (OSError, SafetensorError) as error:
        raise _refused(path, f"it cannot be read: {error}") from error
    tensors = {key: one for key, one in held.items() if not key.startswith(COMPLEX)}
    pairs = {key.removeprefix(COMPLEX): one for key, one in held.items() if key.startswith(COMPLEX)}
    if odd := [key for key, one in pairs.items() if one.shape[-1:] != (2,) or one.dtype not in PAIRS]:
        raise _refused(path, f"{odd[0]:.60} is said to be complex, and has no pairs of numbers")
    tensors |= {key: torch.view_as_complex(one) for key, one in pairs.items()}
    if text is None:
        raise _refused(path, "it is a safetensors file, and no record")
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"its header is no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _refused(path, f"its format is {data.get('format') if isinstance(data, dict) else None}, not {FORMAT}")
    head = codec.from_data(data, Head, path.name)
    for what in _wrong(head, tensors):
        raise _refused(path, what)
    return Record(head, tensors)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _wrong(head: Head, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield what the header says of tensors that is not so."""
    if head.dtype not in FLOATING or head.sent not in FLOATING:
        yield f"it has computed in {head.dtype:.40}, which is no floating dtype"
    for text in head.groups:
        if not isinstance(group := _json(text), dict) or not isinstance(group.get("class"), str):
            yield f"{text:.60} is no group of an optimizer"
    if odd := [key for key, one in tensors.items() if key.startswith("number.") and one.numel() != 1]:
        yield f"{odd[0]:.60} is no number"
    for one in head.params:
        yield from _wrong_part(one, head, tensors)
    if any(f"trace/{at}" not in tensors for at in range(len(head.trace))):
        yield f"it lacks numbers of its {len(head.trace)} traced outputs"
    for at in range(len(head.calls)):
        yield from _wrong_call(at, head, tensors)


def _wrong_part(one: HeldPart, head: Head, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    states = {key.partition("/")[0] for key in tensors if key.startswith("state.")}
    for kind in ("weight", "grad", "after", *sorted(states)):
        held = tensors.get(f"{kind}/{one.name}")
        if held is None and kind == "weight":
            yield f"its header names {kind}/{one.name}, which it does not hold"
        if held is not None and held.numel() != one.here:
            yield f"{kind}/{one.name} has {held.numel()} elements, and its header says {one.here}"
    whole, dims = prod(one.shape), one.dims or ()
    spread = prod(size for size, _, _ in dims) if dims else whole
    furthest = sum((size - 1 + first) * by for size, first, by in dims)
    below = min((0, one.start, *one.shape, *(number for dim in dims for number in dim)))
    if below < 0 or one.start + one.here > min(spread, whole) or furthest >= max(whole, 1):
        yield f"the part of {one.name} lies outside of {one.shape}"
    if one.group is not None and not 0 <= one.group < len(head.groups):
        yield f"{one.name} is in group {one.group}, and there are {len(head.groups)}"


def _wrong_call(at: int, head: Head, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    call, begin = head.calls[at], f"input/{at}/"
    given = {key.removeprefix(begin): one for key, one in tensors.items() if key.startswith(begin)}
    if not -1 <= call.micro < len(head.micros):
        yield f"call {at} is of micro-batch {call.micro}, and there are {len(head.micros)}"
    if not call.inputs and not head.limits:
        yield f"call {at} has no inputs, and nothing says why"
    if call.inputs and not tree.readable(call.inputs, given):
        yield f"the inputs of call {at} cannot be read"
    lacking = [] if "rng" in given else ["its generator"]
    lacking += [f"the gradient of output {place}" for place in call.outputs if f"output/{at}/{place}" not in tensors]
    if odd := [one for one in call.returned if one.dtype not in FLOATING or one.inside not in FLOATING]:
        yield f"output {odd[0].place} of call {at} is in {odd[0].dtype:.40}, which is no floating dtype"
    if not call.entry.isidentifier() or call.entry.startswith("_"):
        yield f"call {at} is of {call.entry!r:.40}, which is no method of a model"
    if lacking:
        yield f"call {at} lacks {lacking[0]}"
    yield from _wrong_answers(at, call.asked, tensors)


def _wrong_answers(at: int, asked: tuple[Question, ...], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield what is wrong with the collectives of a call."""
    if odd := [one.name for one in asked if one.name not in COLLECTIVES]:
        yield f"call {at} has called {odd[0]:.40}, which is no collective"
    begin, known = (
        f"asked/{at}/",
        {f"{n}/{k}": shape for n, one in enumerate(asked) for k, shape in enumerate(one.shapes)},
    )
    for key, one in tensors.items():
        if key.startswith(begin) and known.get(key.removeprefix(begin)) != tuple(one.shape):
            yield f"{key:.60} is of shape {tuple(one.shape)}, and no collective of call {at} gave that"


def _refused(path: Path, what: str) -> PlanRejected:
    return PlanRejected((found("prove.record", path.name, what),))
