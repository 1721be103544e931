"""Whole tensors out of what the ranks have recorded of them, one for each replica, and the sizes of what one holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import hypot, prod

import torch
from attrs import frozen
from torch import Tensor, nn

from prepkit.objects.fsdp1_flat import holders
from prepkit.objects.local_part import local
from prepkit.observe.fingerprints.parts import as_computed, parts
from prepkit.proving.record_file import HeldPart, Record

SAMPLE = 4096
"""Elements of each gradient that say whether it is what was stepped, times a number."""


class CannotReplay(RuntimeError):
    """The window cannot be done again plainly; the text says why.

    ``sends``: that is since its forward asks other ranks by a collective that carries a gradient.
    """

    def __init__(self, text: str, *, sends: bool = False) -> None:
        super().__init__(text)
        self.sends = sends


@frozen(eq=False)
class Replica:
    """One whole tensor."""

    holder: int
    """The first rank that holds it or a part of it."""
    values: Tensor
    owners: Tensor | None
    """Of the first replica the rank that holds each element; None: of any other, or where one rank holds all."""


def numbers(tensor: Tensor) -> Tensor:
    """The numbers of a tensor as a row that torch can add up: of complex ones both parts, float8 and integers wider."""
    row = tensor.detach()
    row = row.dequantize() if row.is_quantized else row
    row = torch.view_as_real(row.resolve_conj()) if row.is_complex() else row.to_dense()
    adds = row.is_floating_point() and row.itemsize > 1
    return (row if adds else row.double()).reshape(-1)


def as_wide(dtype: torch.dtype, like: Tensor) -> torch.dtype:
    """The dtype, or for complex numbers the complex one of its width."""
    return dtype.to_complex() if like.is_complex() else dtype


def replicas(records: tuple[Record, ...], kind: str, name: str, instead: str = "") -> tuple[Replica, ...]:
    """Each whole tensor that the parts of the ranks make, in the order of its holders; nothing where a part lacks.

    ``instead``: the kind of which a rank's part is taken that has none of the former.
    """
    found: dict[tuple[int, object, int], list[tuple[int, Tensor, HeldPart]]] = {}
    shape: tuple[int, ...] = ()
    for record in records:
        held = next((one for one in record.head.params if one.name == name), None)
        key = f"{kind}/{name}" if f"{kind}/{name}" in record.tensors else f"{instead}/{name}"
        part = record.tensors.get(key)
        if held is None or part is None or (part.numel() == 0 and 0 not in held.shape):
            continue
        shape = held.shape
        found.setdefault((held.start, held.dims, part.numel()), []).append((record.head.rank, part, held))
    if not found or sum(numel for _, _, numel in found) != prod(shape):
        return ()
    made = []
    for at in range(min(map(len, found.values()))):
        whole = found_dtype(found).new_empty(prod(shape))
        owners = torch.empty(prod(shape), dtype=torch.int32) if at == 0 and len(found) > 1 else None
        for ranks in found.values():
            rank, part, held = ranks[at]
            _put(whole, part.reshape(-1), held)
            if owners is not None:
                _put(owners, torch.full((part.numel(),), rank, dtype=torch.int32), held)
        made.append(Replica(min(ranks[at][0] for ranks in found.values()), whole.view(shape), owners))
    return tuple(made)


def found_dtype(found: dict[tuple[int, object, int], list[tuple[int, Tensor, HeldPart]]]) -> Tensor:
    """A part, whose dtype the whole has."""
    return next(iter(found.values()))[0][1]


def _put(whole: Tensor, part: Tensor, held: HeldPart) -> None:
    if held.dims is None:
        whole[held.start : held.start + part.numel()] = part
        return
    index = torch.zeros((), dtype=torch.int64)
    for size, offset, stride in held.dims:
        index = index.unsqueeze(-1) + (torch.arange(size, device="cpu") + offset) * stride
    whole[index.reshape(-1)[held.start : held.start + part.numel()]] = part


def parameters(root: nn.Module | None) -> list[tuple[str, nn.Parameter]]:
    """Every parameter, or the flat one of FSDP1 that trains in its place."""
    return list(holders(root).items()) if root is not None else []


Size = tuple[int, float, float]
"""Number, sum and norm of the elements that a rank holds, which tell whether anything has changed them meanwhile."""


def sizes(root: nn.Module | None) -> dict[str, Size]:
    """Of every parameter: of what the model computes with, and of master weights where an engine keeps some beside."""
    found, computed = dict[str, Size](), {} if root is None else dict(as_computed(root))
    for name, part in (parts(root, masters=True) if root is not None else {}).items():
        held = {one.data_ptr(): one for one in (part.values, computed.get(name, part).values)}.values()
        norm = hypot(*(float(torch.linalg.vector_norm(numbers(one), dtype=torch.float64)) for one in held))
        total = sum(float(numbers(one).sum(dtype=torch.float64)) for one in held)
        found[name] = (sum(one.numel() for one in held), total, norm)
    return found


def same_size(one: Size, other: Size, by: float = 1e-9) -> bool:
    """Return whether two of them may be those of the same values, in whatever order they were added.

    ``by``: the part of the norm that they may differ by. Where the numbers of elements differ nobody can tell: FSDP2
    leaves weights whole between two micro-batches.
    """
    return one[0] != other[0] or max(abs(a - b) for a, b in zip(one[1:], other[1:], strict=True)) <= by * one[2]


def others(before: Mapping[str, Size], now: Mapping[str, Size]) -> tuple[str, ...]:
    """Parameters whose values are certainly others by now."""
    return tuple(name for name, one in before.items() if name in now and not same_size(one, now[name]))


def faded(root: nn.Module | None, now: Collection[str], stepped: Mapping[str, Tensor]) -> float:
    """The one number by which gradients are smaller than they were stepped, as those of a heavy ball by hand; 0: none.

    ``now``: parameters that have a gradient; ``stepped``: the tensors of a record.
    """
    by = list[float]()
    for name, param in parameters(root) if now else ():
        was = stepped.get(f"grad/{name}")
        if name not in now or param.grad is None or was is None:
            continue
        here = numbers(local(param.grad))[:SAMPLE].cpu().double()
        there = numbers(was)[:SAMPLE].double()
        square = float(there @ there)
        if len(here) != len(there) or not square:
            continue
        by.append(float(here @ there) / square)
        if float((here - by[-1] * there).norm()) > 8 * torch.finfo(was.dtype.to_real()).eps * square**0.5:
            return 0.0
    alike = by and max(by) - min(by) <= 8 * torch.finfo(torch.bfloat16).eps * abs(by[0])
    return by[0] if alike and 1e-3 < abs(by[0]) < 0.999 else 0.0


def sampled_gradients(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some elements of each gradient of a record, which say what the next window has begun with."""
    return {key: numbers(one)[:SAMPLE].clone() for key, one in tensors.items() if key.startswith("grad/")}


def faded_said(by: float) -> str:
    """What is to be said of that."""
    return (
        f"of the gradients of this step {by:.3g} x was left when the next went backward, of all alike: taken for a "
        "momentum that is meant"
    )
