"""Whether a change of a shape only gives its sizes another order, as a permutation does, and whether two make pairs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, permutations
from math import prod
from types import FrameType
from typing import Any

from torch import Tensor

from prepkit.observe.prepared.around import frames_above, line_of_program, name_of, nodes_of, parsed

SHAPES = frozenset(
    {"View", "ReshapeAlias", "UnsafeView", "Transpose", "Permute", "ToCopy", "Squeeze", "Unsqueeze", "Alias", "Clone"}
    | {"T", "Select", "Slice", "Index", "AsStrided", "Contiguous"}
)
"""Operations that change no value."""
MOST_DIMS = 6
"""Of tensors with more nothing is told."""
MADE = frozenset({"rand", "randn", "randint", "arange", "zeros", "ones", "empty", "full", "linspace", "tensor"})
"""Functions whose values are only being made, and have no order yet."""

FEWEST = 4
"""Samples that meet; of fewer, other dimensions are as long by chance."""
DEEP, NEAR = 256, 16
"""Nodes behind a loss, or behind what meets, that are looked at."""
EQUAL = 1e-3
"""How far levels may be off, as a part of the steps between them."""
MARK = "prepkit.all-with-all"
LAYERS = frozenset(
    {"Addmm", "Mm", "Bmm", "Baddbmm", "Addbmm", "Convolution", "Embedding", "MkldnnRnnLayer", "CudnnRnn"}
)
COLUMNS = LAYERS | {"Slice", "Split", "SplitWithSizes", "Gather", "Cat", "Index", "IndexSelect"}
"""What gives a column of its own accord."""
MEASURES = frozenset({"Mean", "Sum", "Pow", "Abs", "Sqrt", "Neg", "Add", "Sub", "Rsub", "Mul", "Div", "Clamp"} | SHAPES)
MEASURES |= {"Minimum", "Maximum", "Expand", "Log", "Log1P", "Cosh"}
"""What stands between a loss and what it measures; what is done to pairs on purpose, as in a kernel, is not in it."""


@lru_cache(maxsize=1024)
def permuted(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """The order of dimensions that brings sizes, some merged, to where they are now; empty: they are in that order.

    Sizes of 1 count for nothing.
    """
    old, new = [one for one in before if one != 1], [one for one in after if one != 1]
    if not 2 <= len(new) <= len(old) <= MOST_DIMS or old == new or _merges(old, new):
        return ()
    same = next(at for at, (one, other) in enumerate(zip(old, new, strict=False)) if one != other)
    rest, wanted = old[same:], new[same:]
    for order in permutations(range(len(rest))):
        if _merges([rest[at] for at in order], wanted) and _in_groups(order, [rest[at] for at in order], wanted):
            return (*range(same), *(at + same for at in order))
    return ()


def _merges(old: Sequence[int], new: Sequence[int]) -> bool:
    """Return whether the new sizes are the old ones, with neighbours merged."""
    ends = set(accumulate(old, lambda one, other: one * other))
    return prod(old) == prod(new) and set(accumulate(new, lambda one, other: one * other)) <= ends


def _in_groups(order: Sequence[int], old: Sequence[int], new: Sequence[int]) -> bool:
    """Return whether what is merged were neighbours before, in this order; or it is the last, and the first was moved.

    As of heads and widths, which are no neighbours, merged behind what stood between them.
    """
    groups, at = [], 0
    for size in new:
        group: list[int] = []
        while prod(old[at - len(group) : at]) != size or not group:
            group.append(order[at])
            at += 1
        groups.append(group)
    if all(group == [*range(group[0], group[0] + len(group))] for group in groups):
        return True
    first = dict(zip(order, old, strict=True))[0]
    return all(group == sorted(group) for group in groups) and first % new[0] != 0


def may_be_cut(before: Sequence[int], after: Sequence[int], call: ast.Call | None) -> bool:
    """Return whether one of two sizes may be cut, and merged with the other: ``(b * k, b)`` to ``(b, k * b)``.

    Where nobody has written both sizes out.
    """
    old, new = [one for one in before if one != 1], [one for one in after if one != 1]
    moved = [one for one, other in zip(old, new, strict=False) if one != other]
    if len(old) != len(new) or len(moved) != 2:
        return False
    if abs(moved[0] - moved[1]) == 1:  # a shift of rows, as of relative positions
        return True
    if max(moved) % min(moved):
        return False
    return len(old) == 2 or call is None or any(isinstance(one, ast.BinOp | ast.UnaryOp) for one in _given(call))


def _given(call: ast.Call) -> Iterable[ast.AST]:
    return (one for argument in call.args for one in ast.walk(argument))


def call_at(frame: FrameType, names: Iterable[str]) -> ast.Call | None:
    """The call of one of these names where a frame stands; None: there are several, or none."""
    lines = nodes_of(parsed(frame.f_code.co_filename), ast.Call)
    here = [one for one in lines if one.lineno <= frame.f_lineno <= (one.end_lineno or 0) and name_of(one) in names]
    return here[0] if len(here) == 1 else None


def is_being_made(call: ast.Call | None) -> bool:
    """Return whether what it is called of was made in the same expression."""
    owner = call.func.value if call is not None and isinstance(call.func, ast.Attribute) else None
    inside = [owner] if owner is not None else []
    inside += call.args[:1] if call is not None else []
    return any(isinstance(one, ast.Call) and name_of(one) in MADE for one in inside)


def was_padded(tensor: Tensor) -> bool:
    """Return whether something was put beside it just before, as where its rows are to be shifted."""
    name = type(tensor.grad_fn).__name__
    if "Pad" in name:
        return True
    inputs = tensor.grad_fn.next_functions if tensor.grad_fn is not None else ()
    return name.startswith("Cat") and any(one is None for one, _ in inputs)


# --- each sample against all ---


def meets_all(given: Sequence[Any], result: Tensor) -> bool:
    """Mark what has made a square where it holds each output against all targets, and return whether it does."""
    if what := _outer(*given):
        node: Any = result.grad_fn
        node.metadata[MARK] = f"{what} meet in {line_of_program(frames_above(__file__))}", len(result)
    return bool(what)


def meant(given: Sequence[Any], result: Tensor) -> None:
    """Take the mark from what meets constants that are a square themselves, such as a mask of pairs or a spectrum."""
    for each, beside in zip(given, reversed(given), strict=True):
        pairs = isinstance(beside, Tensor) and not beside.requires_grad and beside.shape == result.shape
        if pairs and isinstance(each, Tensor) and each.grad_fn is not None:
            for node in near(each.grad_fn, NEAR, _measures):
                node.metadata.pop(MARK, None)


def all_with_all(loss: Any) -> Iterator[tuple[str, str]]:
    """Yield what a loss measures that was marked so, and what to do."""
    node = getattr(loss, "grad_fn", None)
    for one in () if node is None else near(node, DEEP, _measures):
        if (marked := one.metadata.get(MARK)) is not None:
            what, count = marked
            fix = f"Give both one shape: squeeze(-1) what is [{count}, 1]."
            yield f"what compares each of {count} outputs with all {count} targets: {what}", fix


def _outer(one: Any, other: Any) -> str:
    """What two tensors are that meet as (N,) and (N, 1), one from a layer, the other without a graph; empty: no such.

    Not where somebody has written a column or a row, where numbers are as far apart as levels are, or all the same.
    """
    if not (type(one) is type(other) is Tensor and {one.dim(), other.dim()} == {1, 2}):
        return ""
    outputs, targets = (one, other) if one.requires_grad else (other, one)
    count = len(one)
    if targets.requires_grad or {tuple(one.shape), tuple(other.shape)} != {(count,), (count, 1)} or count < FEWEST:
        return ""
    written = targets.dim() == 2 and targets._base is not None and targets._base.dim() < 2
    if written or outputs.grad_fn is None or not _is_of_layer(outputs) or targets.is_complex():
        return ""
    steps = targets.detach().float().flatten().diff()
    spaced = float((steps - steps[0]).abs().max()) <= EQUAL * float(steps[0].abs())
    return "" if spaced else f"outputs of {[*outputs.shape]} and constants of {[*targets.shape]}"


def _is_of_layer(outputs: Tensor) -> bool:
    """Return whether these are of a layer, and have been given the shape of a column by nobody behind it."""
    node: Any = outputs.grad_fn
    if outputs.dim() == 2:
        while (before := past(node)) is not None and shape_of(before) == tuple(outputs.shape):
            node = before
        name, known = kind_of(node), () if before is None else shape_of(before)
        if name not in COLUMNS and not (name in SHAPES and len(known) > 2 and known[0] == len(outputs)):
            return False
    return any(kind_of(one) in LAYERS for one in near(node, NEAR, lambda _: True))


def near(node: Any, most: int, passes: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield nodes of a graph from the top, so many, and what lies behind those that are passed."""
    waiting, known = [node], {node}
    while waiting and len(known) <= most:
        one = waiting.pop(0)
        yield one
        after = [each for each, _ in one.next_functions if each is not None and each not in known]
        waiting += after if passes(one) else []
        known |= {*after}


def _measures(node: Any) -> bool:
    """Return whether a node only adds up what it is given, or how far that is from something, or chooses of two."""
    chooses = kind_of(node) == "Where" and all(one is not None for one, _ in node.next_functions)
    return chooses or kind_of(node) in MEASURES


def kind_of(node: Any) -> str:
    """Return ``Softmax`` of ``SoftmaxBackward0``."""
    return type(node).__name__.partition("Backward")[0]


def past(node: Any) -> Any:
    """What a node was given first that has a graph and a known shape; None: nothing."""
    return next((one for one, _ in node.next_functions if one is not None and hasattr(one, "_input_metadata")), None)


def shape_of(node: Any) -> tuple[int, ...]:
    """Of what a node of a graph has computed."""
    return tuple(node._input_metadata[0].shape)
