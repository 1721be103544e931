"""A recorded window once more, on one process and with nothing around the model: its facts beside what was recorded."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor, nn

from prepkit.facts.proof import GradientProof, LossShare, ProofFacts, StepProof
from prepkit.objects import names
from prepkit.proving import bare, tree
from prepkit.proving.parts_of import Replica, replicas
from prepkit.proving.record_file import Micro, Record
from prepkit.proving.streamed import Streamed, stub

HALF = ("bfloat16", "float16")
OTHER_NAMES = {"FusedAdam": "AdamW", "DeepSpeedCPUAdam": "AdamW"}
"""Optimizers of DeepSpeed's to those of torch that do the same with the options that they are given."""
HOW = ("foreach", "fused", "capturable", "differentiable")
"""Options that change how a step is computed, and not what comes of it."""


class CannotReplay(RuntimeError):
    """The window cannot be done again plainly; the text says why."""


Shares = tuple[dict[str, Tensor], ...]
"""Gradients by name, or some elements of each, of every share of a window."""
MEMORY = 8 << 30
"""The usual limit, in bytes."""
LEAST = 1024
"""Elements of a gradient that are compared where memory holds no more."""


@define(kw_only=True, eq=False)
class Replay:
    """What is replayed, and how much may be held meanwhile."""

    model: nn.Module
    """The root that ran, which is copied."""
    records: tuple[Record, ...]
    limit: int
    """Bytes of weights and of what backward keeps that are held at once, and again of gradients. What is larger is
    fetched when it is needed, lies in a file, or is compared in some elements."""
    held: int = 0
    """The most of the former that was held."""

    @property
    def most(self) -> int:
        """Elements of each gradient that are compared."""
        shares = sum(len(one.head.micros) for one in self.records)
        return max(LEAST, self.limit // (32 * max(1, shares * len(self.records[0].head.params))))

    def sampled(self, values: Tensor) -> Tensor:
        """As many elements of a tensor, the same ones of every tensor of its size, as a row in float64."""
        row = values.detach().reshape(-1).cpu()
        if row.numel() <= self.most:
            return row.double()
        return row[torch.randint(row.numel(), (self.most,), generator=torch.Generator().manual_seed(0))].double()

    def weight(self, name: str) -> Tensor:
        """One weight as the first replica has it."""
        return replicas(self.records, "weight", name)[0].values

    def streamed(self, dtype: torch.dtype) -> tuple[nn.Module, Streamed]:
        """A plain model whose weights are fetched when they are needed."""
        head = self.records[0].head
        stubs = {one.name: stub(one.shape, dtype) for one in head.params}
        buffers = {
            key.removeprefix("buffer/"): self.records[0].tensors[key]
            for key in self.records[0].tensors
            if key.startswith("buffer/")
        }
        plain = bare.bare_copy(self.model, stubs, buffers).cpu()
        trained = {one.name for one in head.params if one.trained}
        params = names.named_parameters(plain)
        for name, param in params.items():
            param.requires_grad_(name in trained)
            if name not in stubs and param.is_floating_point():
                param.data = param.data.to(dtype)
        for buffer in plain.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
        bare.evaluate(plain, head.evaluating)
        there = {name: param for name, param in params.items() if name in stubs}
        return plain, Streamed(there, lambda name: self.weight(name).to(dtype), self.limit)


def replayed(window: Replay) -> ProofFacts:
    """The facts of a window. The model, prepared or not, is copied, and stays as it is.

    Raises ``CannotReplay`` for what cannot be put together or run again.
    """
    records = window.records
    first = records[0].head
    limits = list(dict.fromkeys(limit for one in records for limit in one.head.limits))
    if any(not call.inputs for record in records for call in record.head.calls):
        raise CannotReplay(limits[0])
    apart = tuple(_apart(window))
    reference, rounded, more = _twice(window)
    unlike = _unlike(window.streamed(torch.float32)[0], records)
    held = {one.name for record in records for one in record.head.params if one.trained and one.group is not None}
    judged = [one.name for one in first.params if one.name in held] if not unlike else []
    if judged and any(_size(one.shape) > window.most for one in first.params):
        more += (f"of each gradient {window.most:,} elements were compared, as many as memory holds",)
    why = _no_step(records)
    return ProofFacts(
        world=first.world,
        shares=_shares(records),
        gradients=tuple(_compared(name, window, reference, rounded) for name in judged),
        steps=tuple(_steps(window)) if not why else (),
        dtype=first.dtype,
        eps=max(torch.finfo(getattr(torch, dtype)).eps for dtype in (first.dtype, first.sent)),
        scale=first.scale,
        accumulation=first.accumulation,
        clip=first.clip,
        first_apart=tuple((name, ranks) for name, ranks, _ in apart if ranks),
        after_apart=tuple((name, ranks) for name, _, ranks in apart if ranks),
        options_apart=_options_apart(records),
        same_samples=_same_samples(records),
        lines=first.lines,
        limits=(*limits, *more, *unlike, *_meant(records), *((why,) if why else ())),
    )


def _twice(window: Replay) -> tuple[Shares, Shares, tuple[str, ...]]:
    """The shares in float64, and again in the run's dtype; and what has to be told of that."""
    dtype = window.records[0].head.dtype
    told: tuple[str, ...] = ()
    try:
        try:
            exact = _gradients(window, torch.float64)
        except RuntimeError as error:
            said = f"the model does not run in float64 ({str(error).splitlines()[0][:80]}): float32 is compared"
            exact, told = _gradients(window, torch.float32), (said,)
        return exact, _gradients(window, torch.float32, dtype if dtype in HALF else None), told
    except CannotReplay:
        raise
    except Exception as error:
        raise CannotReplay(f"the model does not run plainly: {type(error).__name__}: {error!s:.200}") from error


def _shares(records: tuple[Record, ...]) -> tuple[LossShare, ...]:
    every = [micro for record in records for micro in record.head.micros]
    tokens = sum(micro.tokens or 0.0 for micro in every)
    each = len(every) / tokens if tokens else 0.0
    return tuple(
        LossShare(rank=head.rank, micro=at, weight=_weight(one, len(head.micros), head.scale, each))
        for head in (record.head for record in records)
        for at, one in enumerate(head.micros)
    )


def _weight(micro: Micro, count: int, scale: float, each: float) -> float:
    if micro.tokens is not None:
        return micro.tokens * each
    return 1.0 if micro.total else micro.factor * count / scale


def _gradients(window: Replay, dtype: torch.dtype, low: str | None = None) -> Shares:
    """The gradient of every share, by name. ``low``: the dtype of autocast."""
    model, streamed = window.streamed(dtype)
    buffers = dict(bare.named_buffers(model))
    found = []
    for record in window.records:
        for name, buffer in buffers.items():
            if (key := f"buffer/{name}") in record.tensors:
                buffer.data.copy_(record.tensors[key])
        for at, micro in enumerate(record.head.micros):
            share: dict[str, Tensor] = {}
            for number, call in enumerate(record.head.calls):
                if call.micro == at and call.outputs:
                    divisor = record.head.scale / len(record.head.micros) if micro.total else micro.factor
                    _again(model, streamed, share, window, _Call(record, number, divisor or 1.0, low))
            zero = [name for name, param in streamed.params.items() if param.requires_grad and name not in share]
            window.held = max(window.held, streamed.most)
            found.append(share | {name: window.sampled(torch.zeros(streamed.params[name].shape)) for name in zero})
    return tuple(found)


@frozen(eq=False)
class _Call:
    """One call that is done again."""

    record: Record
    number: int
    divisor: float
    low: str | None


def _again(model: nn.Module, streamed: Streamed, share: dict[str, Tensor], window: Replay, made: _Call) -> None:
    """One call and its backward, from the gradients that arrived at its outputs; adds to the share."""
    record, number = made.record, made.number
    call = record.head.calls[number]
    begin = f"input/{number}/"
    tensors = {key.removeprefix(begin): record.tensors[key] for key in record.tensors if key.startswith(begin)}
    torch.set_rng_state(tensors["rng"])
    dtype = next((one.dtype for one in streamed.params.values()), torch.float32)
    cast = {key: one.to(dtype) if one.is_floating_point() else one for key, one in tensors.items()}
    args, kwargs = tree.read(call.inputs, cast)

    def arrived(name: str, grad: Tensor) -> None:
        mine = window.sampled(grad.to_dense() if grad.is_sparse else grad)
        share[name] = share[name] + mine if name in share else mine

    with ExitStack() as stack:
        for context in streamed.on(arrived):
            stack.enter_context(context)
        with torch.autocast("cpu", dtype=getattr(torch, made.low)) if made.low else nullcontext():
            outputs = list(tree.tensors_of(model(*args, **kwargs)))
        ends: list[Tensor] = []
        grads: list[Tensor] = []
        for place in call.outputs:
            grad = record.tensors[f"output/{number}/{place}"]
            if place >= len(outputs) or outputs[place].shape != grad.shape:
                raise CannotReplay("plainly the model returns other outputs than it did: parts of a whole, or others")
            ends.append(outputs[place])
            grads.append((grad.to(torch.float64) / made.divisor).to(outputs[place].dtype))
        if ends:
            torch.autograd.backward(ends, _from_outside(ends, grads))
    for name, param in streamed.params.items():  # what an operator of the model's own has given to the stub itself
        if param.grad is not None:
            arrived(name, param.grad)
            param.grad = None


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


def _compared(name: str, window: Replay, reference: Shares, rounded: Shares) -> GradientProof:
    """Inner products, of all elements, or as those of a part of them tell."""
    shares = torch.stack([share[name] for share in reference])
    found = replicas(window.records, "grad", name)
    numel = _size(next(one.shape for one in window.records[0].head.params if one.name == name))
    more = numel / shares.shape[1] if shares.shape[1] else 1.0
    got = [window.sampled(one.values) for one in found]
    apart = torch.stack([share[name] for share in rounded]).mean(0) - shares.mean(0)
    return GradientProof(
        name=name,
        numel=numel,
        gram=tuple(map(tuple, (more * (shares @ shares.T)).tolist())),
        dots=tuple(tuple((more * (shares @ one)).tolist()) for one in got),
        squares=tuple(more * float(one @ one) for one in got),
        holders=tuple(one.holder for one in found),
        noise=more**0.5 * float(apart.norm()),
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
    if "LBFGS" in head.optimizer:
        return f"{head.optimizer} asks for several gradients in a step: the first was compared, and no step"
    if any(_class_of(json.loads(group)["class"]) is None for group in head.groups):
        return f"{head.optimizer} is no optimizer of torch's: its step was not replayed"
    return ""


def _steps(window: Replay) -> Iterator[StepProof]:
    """Every trained parameter: the step that was taken, and the same class taken plainly over the recorded gradient."""
    records, head = window.records, window.records[0].head
    groups = {one.name: one.group for record in records for one in record.head.params if one.group is not None}
    for one in head.params:
        if not one.trained:
            continue
        grads, after = replicas(records, "grad", one.name), replicas(records, "after", one.name)
        if one.name not in groups:
            yield StepProof(name=one.name, held=False)
        elif grads and after:
            before = window.weight(one.name)
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


def _apart(window: Replay) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Every parameter with the holders of replicas that differ before the step, and that differ after it.

    Those after it by more than a trace of what was moved. Raises ``CannotReplay`` where the ranks have not recorded a
    whole one.
    """
    for name in (one.name for one in window.records[0].head.params):
        before = replicas(window.records, "weight", name)
        if not before:
            raise CannotReplay(f"the ranks have not recorded all parts of {name}")
        after = replicas(window.records, "after", name)
        moved = float((after[0].values.double() - before[0].values.double()).norm()) if after else 0.0
        yield name, _others(before, 0.0), _others(after, 1e-3 * moved)


def _others(found: tuple[Replica, ...], allowed: float) -> tuple[int, ...]:
    """Holders of replicas that are further from the first one."""
    return tuple(
        one.holder for one in found[1:] if float((one.values.double() - found[0].values.double()).norm()) > allowed
    )


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
    whole = all(held.here == _size(held.shape) for one in records for held in one.head.params)
    return len(records) > 1 and whole and all(_read(one) == _read(records[0]) for one in records[1:])


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def _read(record: Record) -> list[str]:
    return [call.digest for call in record.head.calls]


def _meant(records: tuple[Record, ...]) -> Iterator[str]:
    if any(micro.total and micro.tokens is None for record in records for micro in record.head.micros):
        yield "the loss is a sum that the program divides: by what, is taken as meant"


def _unlike(model: nn.Module, records: tuple[Record, ...]) -> tuple[str, ...]:
    """Why gradients cannot be compared."""
    read = [_read(record) for record in records]
    cut = any(one in read[:at] for at, one in enumerate(read)) and not _same_samples(records)
    found = {
        "SyncBatchNorm normalises over the samples of all ranks, and each micro-batch is replayed by itself: "
        "gradients were not compared": bare.normalises_over_ranks(model),
        "dropout inside of cut layers draws other numbers than a whole layer does: gradients were not compared": cut
        and bare.drops(model),
        "dropout on an accelerator draws other numbers than in float64 on the host: gradients were not compared": any(
            record.head.device != "cpu" for record in records
        )
        and bare.drops(model),
        "no gradient arrived at an output of the model: gradients were not compared": not any(
            call.outputs for record in records for call in record.head.calls
        ),
    }
    return tuple(text for text, here in found.items() if here)
