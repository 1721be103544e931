"""Where two recorded windows part: what they read, the first module, then the first operator, forward then backward."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from math import sqrt
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from prepkit.proving.parts_of import numbers, replicas
from prepkit.proving.record_file import Record, Traced, read
from prepkit.proving.trace import COMPILED

MARGIN = 8.0
"""By how much more than what came before, or than rounding, an output may differ."""


@frozen(kw_only=True)
class Parting:
    """Where two windows first differ by more than rounding."""

    stage: str
    """``inputs``, ``weights``, ``forward``, ``backward``, ``gradients`` or ``step``; empty: nowhere."""
    where: str = ""
    """The module, or the parameter."""
    operator: str = ""
    """The first operator in it; empty: none of its own, or none was recorded."""
    alone: str = ""
    """The window that alone computes that operator, ``first`` or ``second``; empty: both do."""
    micro: int = 0
    apart: float = 0.0
    """Norm of the difference over the norm."""
    before: float = 0.0
    """The most that anything before it was apart."""
    compared: int = 0
    """Outputs that both windows have."""

    def __str__(self) -> str:
        if not self.stage:
            return f"the windows differ nowhere beyond rounding: {self.compared} outputs were compared"
        if self.stage == "inputs":
            return "no micro-batch of one window was given what one of the other was: compare runs over the same data"
        place = f"at `{self.where}`" if self.where else "at the root"
        inside = f", in {self.operator}" if self.operator else ""
        inside += f", which the {self.alone} window alone computes," if self.alone else ""
        words = {
            "weights": f"the windows begin with other weights {place}",
            "forward": f"the first module that differs in the forward is {place.removeprefix('at ')}{inside}",
            "backward": f"the forwards are the same; the first gradient that differs in the backward arrives {place}",
            "gradients": f"every backward is the same; the gradient that was stepped differs {place}: what averages, "
            "clips or scales it does otherwise",
            "step": f"gradients are the same; the step differs {place}",
        }
        size = f" ({self.apart:.2e} of it, {self.before:.2e} before)"
        return words[self.stage] + (f" of micro-batch {self.micro}" if self.stage in WAYS else "") + size


WAYS = {"forward": "module", "backward": "gradient"}
Key = tuple[str, str, str, tuple[int, ...], int]


def parting(first: Path, second: Path) -> Parting:
    """Return where the records in two folders part. Raises ``PlanRejected`` where one cannot be read."""
    return between(read(first), read(second))


def between(first: tuple[Record, ...], second: tuple[Record, ...]) -> Parting:
    """The same of records in memory. Ranks and micro-batches are paired by what they were given."""
    found = next(_weights(first, second), None)
    if found is not None:
        return found
    pairs = list(_pairs(first, second))
    if not pairs:
        return Parting(stage="inputs")
    compared = 0
    for stage, kind in WAYS.items():
        each = [_first(a, b, micros, stage, kind) for a, b, micros in pairs]
        compared += sum(one.compared for one in each)
        if there := [one for one in each if one.stage]:
            return there[0]
    for stage, kind in (("gradients", "grad"), ("step", "after")):
        if (late := next(_stepped(first, second, stage, kind), None)) is not None:
            return late
    return Parting(stage="", compared=compared)


def _pairs(first: tuple[Record, ...], second: tuple[Record, ...]) -> Iterator[tuple[Record, Record, tuple[int, int]]]:
    """Records with the micro-batches of each that were given the same."""
    there = {call.digest: (record, call.micro) for record in reversed(second) for call in reversed(record.head.calls)}
    for record in first:
        for call in record.head.calls:
            if call.micro >= 0 and call.digest in there:
                other, micro = there[call.digest]
                yield record, other, (call.micro, micro)


def _noise(*records: Record) -> float:
    return max(torch.finfo(getattr(torch, record.head.dtype)).eps for record in records)


def _weights(first: tuple[Record, ...], second: tuple[Record, ...]) -> Iterator[Parting]:
    for name in (one.name for one in first[0].head.params):
        a, b = replicas(first, "weight", name), replicas(second, "weight", name)
        if a and b and (apart := _apart(a[0].values, b[0].values)) > MARGIN * _noise(first[0], second[0]):
            yield Parting(stage="weights", where=name, apart=apart)


def _stepped(first: tuple[Record, ...], second: tuple[Record, ...], stage: str, kind: str) -> Iterator[Parting]:
    """Parameters of which something differs at the step: by a hundred times rounding, since it is a sum of many.

    A gradient is a sum of what arrives at its module, which may cancel, as for the bias of an attention's keys, or for
    its third of a bias of all three: what is left is rounding of the terms, and so is what an optimizer makes of it.
    """
    noise = _noise(*first, *second)
    for name in (one.name for one in first[0].head.params):
        found = [replicas(records, kind, name) for records in (first, second)]
        if not all(found) or _apart(found[0][0].values, found[1][0].values) <= 100 * noise:
            continue
        a, b = (numbers(one[0].values) for one in found)
        grads = [replicas(records, "grad", name) for records in (first, second)]
        if all(grads):
            grad, other = (numbers(one[0].values) for one in grads)
            a, b = _counting(a, b, grad, other, _arrived(first, name), noise)
        if (apart := _apart(a, b)) > 100 * noise:
            yield Parting(stage=stage, where=name, apart=apart, before=noise)


def _counting(a: Tensor, b: Tensor, grad: Tensor, other: Tensor, terms: float, noise: float) -> tuple[Tensor, Tensor]:
    """Both without elements whose gradients differ by more than their own rounding, and not more than their terms'."""
    if not a.shape == b.shape == grad.shape == other.shape:
        return a, b
    off, size = (grad.double() - other.double()).abs(), torch.maximum(grad.abs(), other.abs()).double()
    counts = (off <= 100 * noise * size) | (off > MARGIN * noise * terms)
    return a[counts], b[counts]


def _arrived(records: tuple[Record, ...], name: str) -> float:
    """Norm of all gradients that have arrived at the module of a parameter, averaged over the ranks."""
    path, total = name.rpartition(".")[0], 0.0
    for record in records:
        for at, one in enumerate(record.head.trace):
            if one.kind == "gradient" and one.path == path:
                total += (float(record.tensors[f"trace/{at}"][0]) / record.head.scale) ** 2
    return sqrt(total) / len(records)


def _apart(a: Tensor, b: Tensor, by: float = 1.0) -> float:
    """Norm of the difference over the larger norm. ``by``: with what the second one is multiplied."""
    one, other = a.double().reshape(-1), b.double().reshape(-1) * by
    if one.shape != other.shape:
        return float("inf")
    size = max(float(one.norm()), float(other.norm()))
    return float((one - other).norm()) / size if size else 0.0


def _factor(a: Record, b: Record, micros: tuple[int, int]) -> float:
    """By how much more the first loss was multiplied: one of more ranks is divided by fewer micro-batches.

    Whether all that comes to the same average is seen in the gradients that are stepped.
    """
    one, other = a.head.micros[micros[0]].factor, b.head.micros[micros[1]].factor
    return one / other if one and other else 1.0


def _keyed(record: Record, micro: int, kind: str) -> dict[Key, int]:
    """Entries of one kind, by what they are and how often that came before."""
    seen: dict[tuple[str, str, str, tuple[int, ...]], int] = {}
    found: dict[Key, int] = {}
    for at, one in enumerate(record.head.trace):
        if one.micro == micro and one.kind == kind:
            what = (one.kind, one.path, one.operator * (kind == "operator"), one.shape)
            found[*what, seen.get(what, 0)] = at
            seen[what] = seen.get(what, 0) + 1
    return found


def _floors(record: Record) -> list[float]:
    """Rounding at each entry of a trace: that of the coarsest dtype which anything has had by then.

    Compiled modules hide what they compute in.
    """
    kinds = (record.head.dtype if one.operator == COMPILED else one.dtype for one in record.head.trace)
    return list(accumulate(map(_eps, kinds), max, initial=_eps("float32")))[1:]


def _eps(dtype: str) -> float:
    kind = getattr(torch, dtype)
    return torch.finfo(kind).eps if kind.is_floating_point else 0.0


def _walked(a: Record, b: Record, micros: tuple[int, int], kind: str) -> Iterator[tuple[int, int, float, float]]:
    """Yield what both have, as its places in both traces, with how far it is apart and how far that may be.

    As far as anything before it was at most, or as the finer of both rounds: a layer that one of them computes in a
    coarser dtype is a difference.
    """
    mine, other = _keyed(a, micros[0], kind), _keyed(b, micros[1], kind)
    one_rounds, other_rounds = _floors(a), _floors(b)
    worst, by = 0.0, _factor(a, b, micros) if kind == "gradient" else 1.0
    for key, at in mine.items():
        if key in other:
            there = other[key]
            apart = _apart(a.tensors[f"trace/{at}"], b.tensors[f"trace/{there}"], by)
            yield at, there, apart, max(worst, min(one_rounds[at], other_rounds[there]))
            worst = max(worst, apart)


def _first(a: Record, b: Record, micros: tuple[int, int], stage: str, kind: str) -> Parting:
    compared = 0
    for at, _, apart, before in _walked(a, b, micros, kind):
        compared += 1
        if apart > MARGIN * before:
            where, operator, alone = a.head.trace[at].path, "", ""
            if stage == "forward":
                where, operator, alone = _operator(a, b, micros, at)
            return Parting(
                stage=stage,
                where=where,
                operator=operator,
                alone=alone,
                micro=micros[0],
                apart=apart,
                before=before,
                compared=compared,
            )
    return Parting(stage="", compared=compared)


def _operator(a: Record, b: Record, micros: tuple[int, int], module: int) -> tuple[str, str, str]:
    """The first operator whose output differs in a module, or before it in what encloses it, and whose it is.

    Where that was given what only one window computes, it is the first of these; then also which window.
    """
    trace = a.head.trace
    path = trace[module].path
    for at, there, apart, before in _walked(a, b, micros, "operator"):
        encloses = path == trace[at].path or path.startswith(f"{trace[at].path}." * bool(trace[at].path))
        if at < module and encloses and apart > MARGIN * before:
            mine, other = _keyed(a, micros[0], "operator"), _keyed(b, micros[1], "operator")
            for window, record, place, keys in (("second", b, there, other), ("first", a, at, mine)):
                both = {keys[key] for key in mine.keys() & other.keys()}
                if (one := _alone(record, place, both)) is not None:
                    return one.path, one.operator, window
            return trace[at].path, trace[at].operator, ""
    return path, "", ""


def _alone(record: Record, at: int, both: set[int]) -> Traced | None:
    """The first in the chain of operators before this one that the other window does not compute; None: it has all."""
    found = None
    while fed := [one for one in record.head.trace[at].fed if one not in both]:
        at, found = fed[0], record.head.trace[fed[0]]
    return found
