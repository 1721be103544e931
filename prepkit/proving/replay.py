"""A recorded window once more, on one process and with nothing around the model: its facts beside what was recorded."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from prepkit.facts.proof import GradientProof, LossShare, ProofFacts, StepProof
from prepkit.objects import names
from prepkit.proving import bare, tree
from prepkit.proving.parts_of import Replica, replicas
from prepkit.proving.record_file import Micro, Record

HALF = ("bfloat16", "float16")
OTHER_NAMES = {"FusedAdam": "AdamW", "DeepSpeedCPUAdam": "AdamW"}
"""Optimizers of DeepSpeed's to those of torch that do the same with the options that they are given."""
HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that change how a step is computed, and not what comes of it."""


class CannotReplay(RuntimeError):
    """The window cannot be done again plainly; the text says why."""


@frozen(eq=False)
class _Sum:
    """The shares of one window, in one dtype."""

    shares: tuple[dict[str, Tensor], ...]


def replayed(model: nn.Module, records: tuple[Record, ...]) -> ProofFacts:
    """The facts of a window. ``model``: the root that ran, prepared or not; it is copied, and stays as it is.

    Raises ``CannotReplay`` for what cannot be put together or run again.
    """
    first = records[0].head
    weights = {one.name: replicas(records, "weight", one.name) for one in first.params}
    if lacking := [name for name, found in weights.items() if not found]:
        raise CannotReplay(f"the ranks have not recorded all parts of {lacking[0]}")
    plain = _plain(model, records[0], weights)
    shares, limits = _shares(records), list(dict.fromkeys(limit for one in records for limit in one.head.limits))
    if any(not call.inputs for record in records for call in record.head.calls):
        raise CannotReplay(limits[0])
    exact = torch.float64
    try:
        reference = _gradients(plain, records, exact)
    except RuntimeError as error:
        exact = torch.float32
        limits.append(f"the model does not run in float64 ({str(error).splitlines()[0][:80]}): float32 is compared")
        reference = _gradients(plain, records, exact)
    rounded = _gradients(plain, records, torch.float32, first.dtype if first.dtype in HALF else None)
    limits += _limits(plain, records)
    held = {one.name for record in records for one in record.head.params if one.trained and one.group is not None}
    judged = [one.name for one in first.params if one.name in held] if not _unlike(plain, records) else []
    return ProofFacts(
        world=first.world,
        shares=shares,
        gradients=tuple(_compared(name, records, reference, rounded) for name in judged),
        steps=tuple(_steps(records, weights)) if not (why := _no_step(records)) else (),
        dtype=first.dtype,
        eps=max(torch.finfo(getattr(torch, dtype)).eps for dtype in (first.dtype, first.sent)),
        scale=first.scale,
        accumulation=first.accumulation,
        clip=first.clip,
        first_apart=tuple(_apart(weights)),
        after_apart=tuple(_apart({one.name: replicas(records, "after", one.name) for one in first.params}, weights)),
        options_apart=_options_apart(records),
        same_samples=_same_samples(records),
        limits=(*limits, *((why,) if why else ())),
    )


def _plain(model: nn.Module, record: Record, weights: dict[str, tuple[Replica, ...]]) -> nn.Module:
    whole = {name: found[0].values.float() for name, found in weights.items()}
    buffers = {key.removeprefix("buffer/"): one for key, one in record.tensors.items() if key.startswith("buffer/")}
    plain = bare.bare_copy(model, whole, buffers)
    trained = {one.name for one in record.head.params if one.trained}
    for name, param in names.named_parameters(plain).items():
        param.requires_grad_(name in trained)
    bare.evaluate(plain, record.head.evaluating)
    return plain.cpu()


def _shares(records: tuple[Record, ...]) -> tuple[LossShare, ...]:
    return tuple(
        LossShare(rank=record.head.rank, micro=at, weight=_weight(one, len(record.head.micros), record.head.scale))
        for record in records
        for at, one in enumerate(record.head.micros)
    )


def _weight(micro: Micro, count: int, scale: float) -> float:
    return 1.0 if micro.total else micro.factor * count / scale


def _gradients(
    plain: nn.Module, records: tuple[Record, ...], dtype: torch.dtype, low: str | None = None
) -> tuple[dict[str, Tensor], ...]:
    """The gradient of every share, by name. ``low``: the dtype of autocast."""
    model = bare.to(plain, dtype)
    params = {name: param for name, param in names.named_parameters(model).items() if param.requires_grad}
    found = []
    for record in records:
        for at, micro in enumerate(record.head.micros):
            model.zero_grad(set_to_none=True)
            for number, call in enumerate(record.head.calls):
                if call.micro == at:
                    divisor = record.head.scale / len(record.head.micros) if micro.total else micro.factor
                    _again(model, record, number, divisor or 1.0, dtype, low)
            found.append({name: _taken(param, dtype) for name, param in params.items()})
    return tuple(found)


def _taken(param: nn.Parameter, dtype: torch.dtype) -> Tensor:
    grad = torch.zeros_like(param) if param.grad is None else param.grad
    return grad.detach().to(torch.float64 if dtype is torch.float64 else dtype)


def _again(model: nn.Module, record: Record, number: int, divisor: float, dtype: torch.dtype, low: str | None) -> None:
    """One call and its backward, from the gradients that arrived at its outputs."""
    call = record.head.calls[number]
    begin = f"input/{number}/"
    tensors = {key.removeprefix(begin): one for key, one in record.tensors.items() if key.startswith(begin)}
    torch.set_rng_state(tensors["rng"])
    cast = {key: one.to(dtype) if one.is_floating_point() else one for key, one in tensors.items()}
    args, kwargs = tree.read(call.inputs, cast)
    with torch.autocast("cpu", dtype=getattr(torch, low)) if low else nullcontext():
        outputs = list(tree.tensors_of(model(*args, **kwargs)))
    ends: list[Tensor] = []
    grads: list[Tensor] = []
    for place in call.outputs:
        grad = record.tensors[f"output/{number}/{place}"]
        if place >= len(outputs) or outputs[place].shape != grad.shape:
            raise CannotReplay("plainly the model returns other outputs than it did: parts of a whole, or others")
        ends.append(outputs[place])
        grads.append((grad.to(torch.float64) / divisor).to(outputs[place].dtype))
    if ends:
        torch.autograd.backward(ends, _from_outside(ends, grads))


def _from_outside(ends: list[Tensor], arrived: list[Tensor]) -> list[Tensor]:
    """What arrived at outputs less what came from other outputs: logits get a gradient of the loss beside them too."""
    if len(ends) == 1:
        return arrived
    behind = [
        [at for at, other in enumerate(ends) if other is not end and _reaches(end, other)] for end in ends
    ]  # outputs from which each was computed
    outside: dict[int, Tensor] = {}
    for at in sorted(range(len(ends)), key=lambda at: -len(behind[at])):
        later = [number for number in outside if at in behind[number]]
        grad = arrived[at]
        if later:
            seeds = [outside[number] for number in later]
            (through,) = torch.autograd.grad([ends[number] for number in later], ends[at], seeds, retain_graph=True)
            grad = grad - through
        outside[at] = grad
    return [outside[at] for at in range(len(ends))]


def _reaches(end: Tensor, other: Tensor) -> bool:
    """Whether an output was computed from another."""
    (found,) = torch.autograd.grad(end.sum(), other, retain_graph=True, allow_unused=True)
    return found is not None


def _compared(
    name: str,
    records: tuple[Record, ...],
    reference: tuple[dict[str, Tensor], ...],
    rounded: tuple[dict[str, Tensor], ...],
) -> GradientProof:
    shares = torch.stack([share[name].reshape(-1).double() for share in reference])
    found = replicas(records, "grad", name)
    got = [one.values.reshape(-1).double() for one in found]
    apart = torch.stack([share[name].reshape(-1).double() for share in rounded]).mean(0) - shares.mean(0)
    return GradientProof(
        name=name,
        numel=shares.shape[1],
        gram=tuple(map(tuple, (shares @ shares.T).tolist())),
        dots=tuple(tuple((shares @ one).tolist()) for one in got),
        squares=tuple(float(one @ one) for one in got),
        holders=tuple(one.holder for one in found),
        noise=float(apart.norm()),
    )


# --- the step --------------------------------------------------------------------------------------------------------


def _class_of(name: str) -> Any:
    """Torch's optimizer of that name; None: it has none."""
    return getattr(torch.optim, OTHER_NAMES.get(name, name), None)


def _no_step(records: tuple[Record, ...]) -> str:
    """Why the step is not taken again; empty where it is."""
    head = records[0].head
    if not head.fresh:
        return f"{head.optimizer} had state from earlier steps, which a record does not hold: its step was not replayed"
    if any(_class_of(json.loads(group)["class"]) is None for group in head.groups):
        return f"{head.optimizer} is no optimizer of torch's: its step was not replayed"
    return ""


def _steps(records: tuple[Record, ...], weights: dict[str, tuple[Replica, ...]]) -> Iterator[StepProof]:
    """Every trained parameter: the step that was taken, and the same class taken plainly over the recorded gradient."""
    head = records[0].head
    groups = {one.name: one.group for record in records for one in record.head.params if one.group is not None}
    for one in head.params:
        if not one.trained:
            continue
        grads, after = replicas(records, "grad", one.name), replicas(records, "after", one.name)
        if one.name not in groups:
            yield StepProof(name=one.name, held=False)
        elif grads and after:
            before = weights[one.name][0].values
            options = json.loads(head.groups[groups[one.name]])
            exact, coarse = (
                _update(options, before, grads[0].values, dtype) for dtype in (torch.float64, before.dtype)
            )
            moved = after[0].values.double().reshape(-1) - before.double().reshape(-1)
            yield StepProof(
                name=one.name,
                along=float(moved @ exact),
                expected=float(exact @ exact),
                moved=float(moved @ moved),
                noise=float((exact - coarse).norm()),
            )


def _update(options: dict[str, Any], weight: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    """What one step adds to a weight, in float64."""
    make: Callable[..., Any] = _class_of(options["class"])
    known = inspect.signature(make).parameters
    given = {key: value for key, value in options.items() if key in known and key not in HOW}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    param = nn.Parameter(weight.to(dtype, copy=True))
    param.grad = grad.to(dtype, copy=True)
    make([param], **given).step()
    return (param.detach().double() - weight.double()).reshape(-1)


# --- ranks -----------------------------------------------------------------------------------------------------------


def _apart(
    held: dict[str, tuple[Replica, ...]], before: dict[str, tuple[Replica, ...]] | None = None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters of which replicas differ, with their holders; ``before``: by more than a trace of what was moved."""
    for name, found in held.items():
        first = found[0].values.double() if found else torch.zeros(())
        moved = (first - before[name][0].values.double()).norm() if before and found else torch.zeros(())
        other = tuple(one.holder for one in found[1:] if (one.values.double() - first).norm() > 1e-3 * moved)
        if other:
            yield name, other


def _options_apart(records: tuple[Record, ...]) -> tuple[str, ...]:
    said = []
    for number, text in enumerate(records[0].head.groups):
        mine = json.loads(text)
        for record in records[1:]:
            other = json.loads(record.head.groups[number]) if number < len(record.head.groups) else {}
            said += [
                f"{key} of group {number}: {value} on rank 0, {other.get(key)} on rank {record.head.rank}"
                for key, value in mine.items()
                if other.get(key) != value
            ]
    return tuple(said)


def _same_samples(records: tuple[Record, ...]) -> bool:
    """Whether each rank holds all of the model, and has read what the first one has."""
    if len(records) < 2 or any(
        len(one.tensors[f"weight/{held.name}"]) < _size(held.shape) for one in records for held in one.head.params
    ):
        return False
    return all(_inputs(one) == _inputs(records[0]) for one in records[1:])


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _inputs(record: Record) -> list[tuple[str, bytes]]:
    """Keys and bytes of everything that the calls were given."""
    return [
        (key, one.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for key, one in sorted(record.tensors.items())
        if key.startswith("input/") and not key.endswith("/rng")
    ]


def _limits(plain: nn.Module, records: tuple[Record, ...]) -> Iterator[str]:
    yield from _unlike(plain, records)
    if any(micro.total for record in records for micro in record.head.micros):
        yield "the loss is a sum that the program divides: by what, is taken as meant"


def _unlike(plain: nn.Module, records: tuple[Record, ...]) -> tuple[str, ...]:
    """Why gradients cannot be compared."""
    read = [_inputs(record) for record in records]
    cut = any(one in read[:at] for at, one in enumerate(read)) and not _same_samples(records)
    found = {
        "SyncBatchNorm normalises over the samples of all ranks, and each micro-batch is replayed by itself: "
        "gradients were not compared": bare.normalises_over_ranks(plain),
        "dropout inside of cut layers draws other numbers than a whole layer does: gradients were not compared": cut
        and bare.drops(plain),
        "no gradient arrived at an output of the model: gradients were not compared": not any(
            call.outputs for record in records for call in record.head.calls
        ),
    }
    return tuple(text for text, here in found.items() if here)
