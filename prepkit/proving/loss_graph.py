"""What the graph of a loss says: by which factor it was multiplied on its way, and in which dtype it was computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed import ReduceOp

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
    """Parts of the value that may be the loss's own: multiplications by less than one, and a mean of several losses."""


def seed_of(loss: Tensor, gradient: Any) -> float:
    """The number by which ``loss.backward(gradient)`` multiplies a loss of one element."""
    given = gradient[0] if isinstance(gradient, tuple | list) and gradient else gradient
    return float(given) if isinstance(given, Tensor) and loss.numel() == 1 else 1.0


def factor_of(loss: Tensor) -> Factor:
    """The product of all numbers that the loss was multiplied with, back to what a loss function has returned.

    Also inside of a model that returns its loss, as a LightningModule does.
    """
    value, last, node, place = 1.0, 1.0, loss.grad_fn, loss.output_nr
    meant: list[float] = []
    while node is not None:
        inputs = [one for one in node.next_functions if one[0] is not None]
        sink = node.name() == "_DDPSinkBackward"  # hands each output on as it is
        by = 1.0 if sink else _scaled(node) if len(inputs) == 1 else None
        if by is None:
            if last * _terms(node) == 1 and last < 1:
                meant.append(last)
            return Factor(value, _sums(node), _count(node), tuple(meant))
        value *= by
        last = last if by == 1 else by
        if node.name().startswith("MulBackward") and abs(by) < 1:
            meant.append(abs(by))
        node, place = node.next_functions[place] if sink else inputs[0]
    return Factor(value, meant=tuple(meant))


def _terms(node: Any) -> int:
    """Of how many losses it is the sum."""
    if not node.name().startswith("AddBackward"):
        return 1
    return sum(_terms(following) for following, _ in node.next_functions if following is not None)


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


def used_outside(loss: Tensor, ends: Collection[int]) -> Iterator[Tensor]:
    """Leaves that the loss reaches past the model's outputs, as far as one walks."""
    leaves = (getattr(node, "variable", None) for node in _made_by(loss, ends))
    yield from (leaf for leaf in leaves if leaf is not None)


def operators_of(loss: Tensor, ends: Collection[int]) -> str:
    """Which operators have made it of the model's outputs, and how often: ``NllLossBackward0, DivBackward0 x 2``."""
    found = Counter(node.name() for node in _made_by(loss, ends))
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in sorted(found.items()))


def given_to(losses: Sequence[Tensor], gradient: Any, ends: Collection[int]) -> bool:
    """Whether a backward over outputs that begin at these nodes is given their gradients, and starts at no loss."""
    given = gradient[0] if isinstance(gradient, tuple | list) and gradient else gradient
    return isinstance(given, Tensor) and given.numel() > 1 and any(made_of(loss, ends) for loss in losses)


def made_of(loss: Tensor, ends: Collection[int]) -> bool:
    """Whether one of these nodes has a part in it, as far as one walks."""
    following = (id(one) for node in _made_by(loss, ends) for one, _ in node.next_functions)
    return id(loss.grad_fn) in ends or any(one in ends for one in following)


def _made_by(loss: Tensor, ends: Collection[int]) -> Iterator[Any]:
    seen: set[int] = set()
    left = [loss.grad_fn]
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
