"""What the graph of a loss says: by which factor it was multiplied on its way, and in which dtype it was computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed import ReduceOp

from prepkit.objects.local_part import local
from prepkit.ranks.world import world

MOST = 20_000
"""Nodes that are looked at."""
THROUGH = (
    "ToCopyBackward",
    "CloneBackward",
    "AliasBackward",
    "ViewBackward",
    "ReshapeAliasBackward",
    "SqueezeBackward",
)
"""Nodes that leave the value as it is."""


@frozen
class Factor:
    """How a loss was scaled."""

    value: float
    total: bool = False
    """Whether what was scaled is a sum over samples."""
    count: float | None = None
    """Over how many samples or tokens it is a mean, or a sum; None: nobody knows."""
    meant: tuple[float, ...] = ()
    """Parts of the value that may be the loss's own: multiplications by less than one, a mean of several losses, and
    the square of a number by which outputs were divided, as distillation at a temperature has it."""
    terms: tuple[tuple[Any, float], ...] = ()
    """The node of each loss that it is the sum of, and by what it was multiplied before they were added."""
    divisors: tuple[tuple[float, int], ...] = ()
    """Numbers that it was divided by, each with the place in memory of the tensor that it was."""
    summed: float | None = None
    """How many elements a plain sum has added up, be some of them masked."""


def seed_of(loss: Tensor, gradient: Any) -> float | None:
    """The number by which ``loss.backward(gradient)`` multiplies a loss, or each of several; None: there is none."""
    given = gradient[0] if isinstance(gradient, tuple | list) and gradient else gradient
    if not isinstance(given, Tensor):
        return 1.0 if loss.numel() == 1 else None
    first, *_ = seeds = local(given).detach().reshape(-1)
    return float(first) if bool((seeds == first).all()) else None


def factor_of(loss: Tensor, ends: Collection[int]) -> Factor:
    """The product of all numbers that the loss was multiplied with, back to what a loss function has returned.

    Also inside of a model that returns its loss, as a LightningModule does. ``ends``: identities of nodes at which the
    model's outputs begin.
    """
    value, last, node, place = 1.0, 1.0, loss.grad_fn, loss.output_nr
    meant: list[float] = []
    divisors: list[tuple[float, int]] = []
    while node is not None:
        inputs = [one for one in node.next_functions if one[0] is not None]
        sink = node.name() == "_DDPSinkBackward"  # hands each output on as it is
        by = 1.0 if sink else _scaled(node) if len(inputs) == 1 else None
        if by is None:
            terms = tuple(_terms(node))
            if last * len(terms) == 1 and last < 1:
                meant.append(last)
            meant += dict.fromkeys(_squares(node, ends))
            return Factor(value, _sums(node), _count(node), tuple(meant), terms, tuple(divisors), _summed(node))
        value *= by
        if node.name().startswith("DivBackward") and (other := getattr(node, "_saved_other", None)) is not None:
            divisors.append((float(other), other.untyped_storage().data_ptr()))
        last = last if by == 1 else by
        if node.name().startswith("MulBackward") and abs(by) < 1:
            meant.append(abs(by))
        node, place = node.next_functions[place] if sink else inputs[0]
    return Factor(value, meant=tuple(meant))


def terms_of(loss: Tensor, ends: Collection[int]) -> list[Any]:
    """Nodes of the losses of the model's outputs that it is the sum of."""
    every = [] if loss.grad_fn is None else [node for node, _ in _terms(loss.grad_fn)]
    return [node for node in every if _reaches(node, ends)]


def _terms(node: Any, by: float = 1.0) -> Iterator[tuple[Any, float]]:
    """Yield the node of each loss that it is the sum of, and by what that was multiplied."""
    inside = [following for following, _ in node.next_functions if following is not None]
    stacked = node.name().startswith("SumBackward") and inside and inside[0].name().startswith("StackBackward")
    if node.name().startswith("AddBackward"):
        for one in inside:
            yield from _terms(one, by)
    elif stacked:
        for one, _ in inside[0].next_functions:
            yield from () if one is None else _terms(one, by)
    elif len(inside) == 1 and (more := _scaled(node)) is not None:
        yield from _terms(inside[0], by * more)
    else:
        yield node, by


def _squares(node: Any, ends: Collection[int]) -> Iterator[float]:
    """Yield squares of the numbers by which outputs were divided on the way to a loss."""
    for one in _behind(node, ends):
        scales = one.name().startswith(("MulBackward", "DivBackward")) and prod(one._input_metadata[0].shape) > 1
        if scales and (by := _scaled(one)) and abs(by) < 1:
            yield round(1 / by**2, 6)


def _scaled(node: Any) -> float | None:
    """By how much a node scales what comes into it; None: it does something else."""
    name = node.name()
    if name.startswith(THROUGH):
        return 1.0
    if name.startswith("NegBackward"):
        return -1.0
    if name == "_AllReduceBackward" and node.op in (ReduceOp.SUM, ReduceOp.AVG):
        number = world().size if node.group is None else node.group.size()
        return float(number) if node.op == ReduceOp.SUM else 1.0  # it is in the loss of every rank
    if not name.startswith(("MulBackward", "DivBackward")):
        return None
    other = node._saved_other if node._saved_other is not None else getattr(node, "_saved_self", None)
    if not isinstance(other, Tensor) or other.numel() != 1:
        return None
    number = float(other)
    return number if name.startswith("Mul") else 1 / number if number else None


def _sums(node: Any) -> bool:
    """Return whether it is a sum, or a loss function that was told to sum."""
    return node.name().startswith("SumBackward") or getattr(node, "_saved_reduction", None) == 2


def _count(node: Any) -> float | None:
    """Over how many elements a mean or a sum was taken, those with an ignored label left out."""
    name = "" if node is None else node.name()
    if name.startswith("NllLoss") and getattr(node, "_saved_reduction", 0):
        return float(node._saved_total_weight)
    return float(node._saved_self_sym_numel) if name == "MeanBackward0" else None


def _summed(node: Any) -> float | None:
    return float(prod(node._saved_self_sym_sizes)) if node.name() == "SumBackward0" else None


def used_outside(loss: Tensor, ends: Collection[int]) -> Iterator[Tensor]:
    """Leaves that the loss reaches past the model's outputs, as far as one walks."""
    leaves = (getattr(node, "variable", None) for node in _made_by(loss, ends))
    yield from (leaf for leaf in leaves if leaf is not None)


def edges_outside(loss: Tensor, ends: Collection[int]) -> Iterator[tuple[Any, Tensor, int]]:
    """Yield every node past the model's outputs that uses a leaf, with that leaf and its place among the inputs."""
    for node in _made_by(loss, ends):
        for at, (following, _) in enumerate(node.next_functions):
            if (leaf := getattr(following, "variable", None)) is not None:
                yield node, leaf, at


def weights_of(loss: Tensor, ends: Collection[int]) -> Iterator[int]:
    """Identities of the parameters that it reaches past the model's outputs, as those of a head beside the model."""
    yield from (id(leaf) for leaf in used_outside(loss, ends) if isinstance(leaf, nn.Parameter))


def operators_of(loss: Tensor, ends: Collection[int]) -> str:
    """Which operators have made it of the model's outputs, and how often: ``NllLossBackward0, DivBackward0 x 2``."""
    found = Counter(node.name() for node in _made_by(loss, ends))
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in sorted(found.items()))


def given_gradients(losses: Sequence[Tensor], gradient: Any, ends: Collection[int]) -> bool:
    """Whether a backward over outputs that begin at these nodes is given their gradients, and starts at no loss."""
    given = gradient[0] if isinstance(gradient, tuple | list) and gradient else gradient
    return isinstance(given, Tensor) and given.numel() > 1 and any(made_of(loss, ends) for loss in losses)


def made_of(loss: Tensor, ends: Collection[int]) -> bool:
    """Whether one of these nodes has a part in it, as far as one walks."""
    return _reaches(loss.grad_fn, ends)


def _reaches(node: Any, ends: Collection[int]) -> bool:
    following = (id(one) for made in _behind(node, ends) for one, _ in made.next_functions)
    return id(node) in ends or any(one in ends for one in following)


def _made_by(loss: Tensor, ends: Collection[int]) -> Iterator[Any]:
    yield from _behind(loss.grad_fn, ends)


def _behind(node: Any, ends: Collection[int]) -> Iterator[Any]:
    seen: set[int] = set()
    left = [node]
    while left and len(seen) < MOST:
        node = left.pop()
        if node is None or id(node) in seen or id(node) in ends:
            continue
        seen.add(id(node))
        yield node
        left.extend(following for following, _ in node.next_functions)


def dtype_inside(output: Tensor) -> torch.dtype:
    """The lowest floating dtype that an output was computed in, before it was cast last."""
    node = output.grad_fn
    while node is not None and node.name().startswith(THROUGH):
        node = node.next_functions[0][0]
    return output.dtype if node is None else lowest_dtype((node,), torch.float64)


def lowest_dtype(ends: Collection[Any], known: torch.dtype) -> torch.dtype:
    """The lowest floating dtype of the nodes behind these, as far as one walks."""
    seen: set[int] = set()
    left, lowest = list(ends), known
    while left and len(seen) < MOST:
        node = left.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        for one in getattr(node, "_input_metadata", ()):
            if one.dtype.is_floating_point and torch.finfo(one.dtype).eps > torch.finfo(lowest).eps:
                lowest = one.dtype
        left.extend(following for following, _ in node.next_functions)
    return lowest
