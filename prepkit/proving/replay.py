"""A recorded window once more, on one process and with nothing around the model: its facts beside what was recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext, suppress
from math import prod
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn

from prepkit.facts.proof import GradientProof, ProofFacts
from prepkit.findings.text import some
from prepkit.objects import names
from prepkit.proving import again, bare
from prepkit.proving.apart import (
    averaged_later,
    buffers_apart,
    changed_later,
    disturbed_of,
    had_gradient,
    loss_shares,
    lowest,
    meant,
    miscounted,
    number_of,
    odd_calls,
    options_apart,
    read,
    same_draws,
    same_samples,
    sent_as,
    shrunk,
    state_apart,
    undone_later,
    weight_of,
    weights_apart,
)
from prepkit.proving.collectives import answered
from prepkit.proving.other_rank import not_plainly, refused, standing_for
from prepkit.proving.outputs import Outputs, OutputsTold, astray, compared, from_outside
from prepkit.proving.parts_of import CannotReplay, Replica, as_wide, numbers, replicas
from prepkit.proving.record_file import Record
from prepkit.proving.stepped import steps_of
from prepkit.proving.streamed import Streamed, stub
from prepkit.ranks.no_collectives import NoCollectives

HALF = ("bfloat16", "float16")
DISTURBED = (
    *("moved", "left", "outside", "beside", "wrapper", "kept", "twice", "cleared", "wasted"),
    *("asked", "doubled", "averages", "unstepped", "detached", "raw", "uses"),
)
"""What the facts have of ``Disturbed``, by the same names."""
MEASURED = 64
"""This part of what rounding does, as two replays tell, is allowed beside it: by what 33 right runs were off."""
CLAMPED = 2.0**-8
"""By which part an element that was clipped by value may be off it: rounding in bfloat16."""

BY_RANK = "the forward asks for its rank, and computes by it: each call was replayed as on the rank that made it"

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
    hooked: tuple[str, ...] = ()
    """Parameters that came with hooks of the program's own on their gradients, as a plan knows them."""
    late: tuple[int, ...] = ()
    """Hooks around the root's forward, by their numbers, whose work is none of the model's own, or is recorded."""
    held: int = 0
    """The most of the former that was held."""
    outputs: list[Outputs] = field(factory=list)
    """Those of each replay."""
    reached: set[str] = field(factory=set)
    """Parameters to which a gradient has come."""
    used: set[str] = field(factory=set)
    """Parameters that the forward computes with."""
    reached_by: list[frozenset[str]] = field(factory=list)
    """The same of each share, in their order."""
    draw: set[int] = field(factory=set)
    """Ranks of which a forward has drawn from torch's generator."""
    cuts: dict[str, str] | None = None
    """As of ``Streamed``."""
    told: bool = False
    """Whether a forward that asks for its rank gets the answer of the rank that made the call; else of this process."""

    @property
    def most(self) -> int:
        """Elements of each gradient that are compared."""
        shares = sum(len(one.head.micros) for one in self.records)
        return max(LEAST, self.limit // (32 * max(1, shares * len(self.records[0].head.params))))

    def sampled(self, values: Tensor) -> Tensor:
        """As many elements of a tensor, the same ones of every tensor of its size, as a row in float64."""
        row = numbers(values).cpu()
        if row.numel() <= self.most:
            return row.double()
        return row[torch.randint(row.numel(), (self.most,), generator=torch.Generator().manual_seed(0))].double()

    def weight(self, name: str) -> Tensor:
        """One weight as the first replica has it."""
        return replicas(self.records, "weight", name)[0].values

    def streamed(self, dtype: torch.dtype) -> tuple[nn.Module, Streamed]:
        """A plain model whose weights are fetched when they are needed."""
        head = self.records[0].head
        kinds = {one.name: as_wide(dtype, self.records[0].tensors[f"weight/{one.name}"]) for one in head.params}
        stubs = {one.name: stub(one.shape, kinds[one.name]) for one in head.params}
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
            if name not in stubs:
                param.data = again.cast(param.data, dtype)
        for buffer in plain.buffers():
            buffer.data = again.cast(buffer.data, dtype)
        for number in self.late:
            plain._forward_hooks.pop(number, None) or plain._forward_pre_hooks.pop(number, None)
        bare.evaluate(plain, head.evaluating)
        there = {name: param for name, param in params.items() if name in stubs}
        return plain, Streamed(there, lambda name: self.weight(name).to(kinds[name]), self.limit, self.cuts)


def replayed(window: Replay) -> ProofFacts:
    """The facts of a window. The model, prepared or not, is copied, and stays as it is.

    Raises ``CannotReplay`` for what cannot be put together or run again.
    """
    records = window.records
    first, disturbed = records[0].head, disturbed_of(records)
    limits = list(dict.fromkeys(limit for one in records for limit in one.head.limits))
    if disturbed.idle:
        return ProofFacts(world=first.world, shares=(), idle=True, lines=first.lines)
    given = all(call.inputs for record in records for call in record.head.calls)
    if why := disturbed.unproven or ("" if given else limits[0]):
        raise CannotReplay(why)
    apart = tuple(weights_apart(records))
    spoiled = disturbed.moved or disturbed.left or disturbed.swung  # what is recorded does not explain it
    unlike = _unlike(window.streamed(torch.float32)[0], records)
    held = {one.name for record in records for one in record.head.params if one.trained and one.group is not None}
    eps = torch.finfo(getattr(torch, lowest(records, "dtype"))).eps
    buffers = tuple(buffers_apart(records)) if first.fresh else ()
    begun_apart = buffers or any(ranks for _, ranks, _ in apart)  # which explains other outputs
    window, done = _done(window, eps, compares=not (unlike or spoiled or begun_apart))
    outputs = done.outputs
    hooked = tuple(name for name in window.hooked if name in held)
    compares = not (unlike or spoiled or outputs.unrepeated)
    judged = [one.name for one in first.params if one.name in held and one.name not in hooked] if compares else []
    idle = [name for name in judged if name in window.used - window.reached and not had_gradient(records, name)]
    sent, rounds = sent_as(records)
    more = (*done.more, *rounds, *_left_out(window, outputs.aside, hooked, some_elements=bool(judged)))
    steps, no_step = steps_of(records, window.weight)
    after, later = tuple((name, ranks) for name, _, ranks in apart if ranks), changed_later(records)
    return ProofFacts(
        world=first.world,
        shares=loss_shares(records, window.reached_by),
        gradients=tuple(_compared(name, window, done.reference, done.rounded) for name in judged),
        steps=steps,
        dtype=lowest(records, "dtype"),
        eps=max(eps / MEASURED, torch.finfo(getattr(torch, sent)).eps),
        scale=first.scale,
        accumulation=first.accumulation,
        divides=first.divides,
        clip=evolve(first.clip, beyond=True) if first.clip is not None and hooked else first.clip,
        shrunk=shrunk(records),
        buffers_apart=buffers,
        **{name: getattr(disturbed, name) for name in DISTURBED},
        unreached=tuple(name for name in sorted(held - window.reached) if had_gradient(records, name)),
        cut_off=tuple(idle),
        cut=tuple(_cut(window, idle)) if idle else (),
        over=tuple(name for name in judged if _is_over(window, name)),
        value=first.value,
        first_apart=tuple((name, ranks) for name, ranks, _ in apart if ranks),
        after_apart=after,
        later=later,
        undone=tuple(undone_later(records, later)),
        averaged_later=averaged_later(records, tuple(name for name, _ in after), later),
        scales_apart=any(one.head.scale != first.scale for one in records),
        options_apart=options_apart(records),
        state_apart=tuple(state_apart(records)),
        same_draws=tuple(same_draws(one for one in records if one.head.rank in window.draw)),
        same_samples=same_samples(records),
        miscounted=miscounted(records),
        lines=first.lines,
        **_told(outputs, records),
        limits=(*limits, *more, *unlike, *meant(records), *odd_calls(records), *((no_step,) if no_step else ())),
    )


def _told(outputs: OutputsTold, records: tuple[Record, ...]) -> dict[str, Any]:
    """What the facts have of outputs."""
    in_parts = all(one.head.cut and read(one) == read(records[0]) for one in records)
    on = {"unrepeated": outputs.unrepeated, "unrepeated_on": outputs.unrepeated_on}
    return {"outputs": outputs.changed, "in_parts": in_parts, **on}


def _cut(window: Replay, idle: list[str]) -> Iterator[tuple[str, str]]:
    """Yield to which of these parameters a gradient comes once nothing is cut, and what cuts it."""
    whole = evolve(window, outputs=[], reached=set(), used=set(), reached_by=[], cuts={})
    with suppress(Exception):  # of a model that needs what it cuts: nobody knows
        _gradients(whole, torch.float32)
        yield from ((name, (whole.cuts or {}).get(name, "no_grad()")) for name in idle if name in whole.reached)


def _left_out(window: Replay, aside: str, hooked: tuple[str, ...], *, some_elements: bool) -> Iterator[str]:
    """Yield what was not compared."""
    if aside:
        yield f"{aside}, and no gradient comes back to it: the others were compared"
    if hooked:
        yield f"hooks of the program's own change the gradients of {some(hooked)}, which were not compared"
    if some_elements and any(prod(one.shape) > window.most for one in window.records[0].head.params):
        yield f"of each gradient {window.most:,} elements were compared, as many as memory holds"


@frozen(eq=False, kw_only=True)
class _Done:
    """What two replays have come to."""

    reference: Shares
    rounded: Shares
    more: tuple[str, ...]
    """What has to be told of them."""
    outputs: OutputsTold

    @property
    def repeats(self) -> bool:
        """Whether the model gives again what it gave."""
        return not (self.outputs.unrepeated or self.outputs.changed)


def _done(window: Replay, eps: float, *, compares: bool) -> tuple[Replay, _Done]:
    """The replays, and the window as they leave it; where they do not repeat, each call on its own rank, if that does.

    ``compares``: whether outputs say anything.
    """

    def made(one: Replay) -> _Done:
        reference, rounded, more = _twice(one)
        found = compared(one.records, (one.outputs[-2], one.outputs[-1]), eps) if compares else OutputsTold()
        return _Done(reference=reference, rounded=rounded, more=more, outputs=found)

    fresh: dict[str, Any] = {"outputs": [], "reached": set(), "used": set(), "reached_by": [], "draw": set()}
    told, first, failed = evolve(window, **fresh, told=True), None, None
    try:
        first = made(window)
    except CannotReplay as error:
        failed = error
    if len(window.records) > 1 and not (first is not None and first.repeats):
        with suppress(CannotReplay):
            if (second := made(told)).repeats:
                window.held = told.held
                return told, evolve(second, more=(*second.more, BY_RANK))
    if first is None:
        assert failed is not None, "it was done, or it was not"
        raise failed
    return window, first


def _twice(window: Replay) -> tuple[Shares, Shares, tuple[str, ...]]:
    """The shares in float64, and again in the run's dtype; and what has to be told of that."""
    dtype = lowest(window.records, "dtype")
    told: tuple[str, ...] = ()
    try:
        try:
            exact = _gradients(window, torch.float64)
        except RuntimeError as error:
            said = f"the model does not run in float64 ({str(error).splitlines()[0][:80]}): float32 is compared"
            exact, told = _gradients(window, torch.float32), (said,)
        rounded = _gradients(window, torch.float32, dtype if dtype in HALF else None)
    except CannotReplay:
        raise
    except Exception as error:
        raise not_plainly(error) from error
    if far := astray(window.records, window.outputs[-2:], torch.finfo(getattr(torch, dtype)).eps):
        window.outputs[-2], exact = window.outputs[-1], rounded
        told = (f"{far} in float64, and in {dtype} as it was: {dtype} is compared",)
    return exact, rounded, told


def _gradients(window: Replay, dtype: torch.dtype, low: str | None = None) -> Shares:
    """The gradient of every share, by name. ``low``: the dtype of autocast."""
    model, streamed = window.streamed(dtype)
    found = []
    trained = {one.name for one in window.records[0].head.params if one.trained}
    window.reached_by.clear()
    window.outputs.append(Outputs(str(dtype).removeprefix("torch.")))
    for record in window.records:
        for at, micro in enumerate(record.head.micros):
            share: dict[str, Tensor] = {}
            for number, call in enumerate(record.head.calls):
                if call.micro == at and call.outputs:
                    weight = weight_of(window.records, record, at)
                    again.begin(model, streamed.params, record, number)
                    divisor = record.head.scale / number_of(record) * weight if micro.total else micro.factor
                    _again(model, streamed, share, window, _Call(record, number, divisor or 1.0, low))
            zero = [(name, one) for name, one in streamed.params.items() if name in trained and name not in share]
            window.held = max(window.held, streamed.most)
            window.reached |= share.keys()
            window.used |= streamed.used
            window.reached_by.append(frozenset(share))
            found.append(share | {name: window.sampled(torch.zeros(one.shape, dtype=one.dtype)) for name, one in zero})
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

    def arrived(name: str, grad: Tensor) -> None:
        mine = window.sampled(grad)
        share[name] = share[name] + mine if name in share else mine

    entered = answered(record, number, model if call.entry == "forward" else getattr(model, call.entry))
    with ExitStack() as stack:
        for context in (*streamed.on(arrived), NoCollectives(refused)):
            stack.enter_context(context)
        if window.told:
            stack.enter_context(standing_for(record.head))
        with torch.autocast("cpu", dtype=getattr(torch, made.low)) if made.low else nullcontext():
            outputs, drawn = again.called(entered, streamed.params, record, number)
        if drawn:
            window.draw.add(record.head.rank)
        window.outputs[-1].take(record.head.rank, number, outputs)
        ends: list[Tensor] = []
        grads: list[Tensor] = []
        for end, grad in again.arrived(record, number, outputs):
            if end.requires_grad:  # and is no input, whose gradient is that of another call
                ends.append(end)
                grads.append((again.cast(grad, torch.float64) / made.divisor).to(end.dtype))
        if ends:
            torch.autograd.backward(ends, grads if call.apart else from_outside(ends, grads))
    for name, param in streamed.params.items():  # what an operator of the model's own has given to the stub itself
        if param.grad is not None:
            arrived(name, param.grad)
            param.grad = None


def _compared(name: str, window: Replay, reference: Shares, rounded: Shares) -> GradientProof:
    """Inner products, of all elements, or as those of a part of them tell."""
    shares = torch.stack([share[name] for share in reference])
    apart = torch.stack([share[name] for share in rounded]).mean(0) - shares.mean(0)
    found = replicas(window.records, "grad", name)
    whole = window.weight(name)
    numel = numbers(whole).numel()
    more = numel / shares.shape[1] if shares.shape[1] else 1.0
    got = [window.sampled(one.values) for one in found]
    if window.records[0].head.value is not None:
        kept = _not_clamped(window, shares, got)
        shares, got = shares * kept, [one * kept for one in got]
    weight = window.sampled(whole)
    holders = tuple(one.holder for one in found)
    products = _products(name, shares, got, holders, apart, more)
    written = any(f"made/{name}" in record.tensors for record in window.records)
    made = replicas(window.records, "made", name, instead="grad") if written else ()
    left = [window.sampled(one.values) / window.records[0].head.scale for one in made]
    owners = window.sampled(_of_numbers(found[0])) if found and found[0].owners is not None else None
    parts = []
    for rank in () if owners is None else torch.unique(owners).int().tolist():
        here = owners == rank
        parts.append(_products(name, shares[:, here], [got[0][here]], (rank,), apart[here], more))
    return evolve(
        products,
        weight=tuple((more * (shares @ weight)).tolist()),
        weight_square=more * float(weight @ weight),
        along=tuple(more * float(one @ weight) for one in got),
        decay=_decay(window, name),
        before=(_products(name, shares, left, holders, apart, more),) if left else (),
        parts=tuple(parts),
    )


def _of_numbers(replica: Replica) -> Tensor:
    """The rank that holds each number."""
    assert replica.owners is not None, "it lies in parts"
    owners = replica.owners
    return owners.unsqueeze(-1).expand(*owners.shape, 2) if replica.values.is_complex() else owners


def _products(
    name: str, shares: Tensor, got: list[Tensor], holders: tuple[int, ...], apart: Tensor, more: float
) -> GradientProof:
    """Those of some elements, each of which stands for ``more``."""
    return GradientProof(
        name=name,
        numel=round(more * shares.shape[1]),
        gram=tuple(map(tuple, (more * (shares @ shares.T)).tolist())),
        dots=tuple(tuple((more * (shares @ one)).tolist()) for one in got),
        squares=tuple(more * float(one @ one) for one in got),
        holders=holders,
        noise=more**0.5 * float(apart.norm()),
    )


def _not_clamped(window: Replay, shares: Tensor, got: list[Tensor]) -> Tensor:
    """1 for each element that is to be compared, 0 where a clipping by value explains what it is."""
    most = window.records[0].head.value or 0.0
    weights = torch.tensor([share.weight for share in loss_shares(window.records)], dtype=shares.dtype)
    mean = weights @ shares / len(shares)
    near = [(one.abs() - most).abs() <= CLAMPED * most for one in got]
    reached = torch.stack([at & (one.sign() == mean.sign()) for at, one in zip(near, got, strict=True)]).any(0)
    return (~(reached & (mean.abs() >= 0.99 * most))).to(shares.dtype)


def _is_over(window: Replay, name: str) -> bool:
    """Return whether an element of its gradient is larger than the run allows."""
    most = window.records[0].head.value
    found = replicas(window.records, "grad", name) if most is not None else ()
    return any(bool((one.values.abs() > (1 + CLAMPED) * (most or 0.0)).any()) for one in found)


def _decay(window: Replay, name: str) -> float:
    """Return what the options of its group say."""
    head = window.records[0].head
    group = next((one.group for record in window.records for one in record.head.params if one.name == name), None)
    return float(json.loads(head.groups[group]).get("weight_decay") or 0.0) if group is not None else 0.0


def _unlike(model: nn.Module, records: tuple[Record, ...]) -> tuple[str, ...]:
    """Why gradients cannot be compared."""
    given = [read(record) for record in records]
    cut = any(one.head.cut for one in records) and any(one in given[:at] for at, one in enumerate(given))
    found = {
        "SyncBatchNorm normalises over the samples of all ranks, and each micro-batch is replayed by itself: "
        "gradients were not compared": bare.normalises_over_ranks(model),
        "dropout inside of cut layers draws other numbers than a whole layer does: gradients were not compared": cut
        and bare.drops(model),
        "dropout on an accelerator draws other numbers than in float64 on the host: gradients were not compared": any(
            record.head.device != "cpu" for record in records
        )
        and bare.drops(model),
        "weights were changed between two forwards and put back, as by an optimizer that perturbs them: gradients were "
        "not compared": disturbed_of(records).swung and not disturbed_of(records).moved,
        f"what was left of the step before, {disturbed_of(records).faded:.3g} x of each of its gradients, is in these, "
        "as of a momentum by hand: gradients were not compared": disturbed_of(records).faded,
        "no gradient arrived at an output of the model: gradients were not compared": not any(
            call.outputs for record in records for call in record.head.calls
        ),
    }
    return tuple(text for text, here in found.items() if here)
