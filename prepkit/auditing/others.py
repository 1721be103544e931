"""On what depends what a model says of a sample: on the others, its place, or what it is shown of its own class."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice, product
from types import FrameType
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional as fn

from prepkit.auditing.asking import Asking, far, tensors
from prepkit.auditing.losses import LossCompared
from prepkit.facts.window import SamplesMixed

ON_PURPOSE = ("batch", "moe", "expert", "router", "capacity", "quant", "memory")
"""Words in the name of a class that is there to compare samples of a batch, or to compute them by one scale."""
CAN_MIX = (nn.modules.batchnorm._BatchNorm,)
SHORTER = 8
"""Samples that are left out at most, where the size of a batch is that of something else too."""


FEW = 8
"""Samples of which it is no chance that all are shown their class, or that all are shown none."""
SOME = 64
"""Samples of a loss that are looked at."""
LARGE = 1 << 22
"""Numbers of an input, or of what a model says, that are looked at."""


@frozen(kw_only=True, eq=False)
class _Samples:
    """Those that a model is asked about, as many as nothing else has, and what it says of them."""

    size: int
    chosen: Callable[[Tensor], Tensor]
    said: list[Tensor]


def drawn_samples(given: Iterable[Tensor], frames: Iterable[FrameType]) -> int:
    """How many rows of a table a program has drawn for a batch, as ``model(x[places])``; 0: nobody knows.

    Rows that follow each other may be places of one sequence, and what is given beside them, as the edges of a graph,
    may say what they are to each other.
    """
    given = [] if torch._C._functorch.maybe_current_level() is not None else [*given]
    if any(not one.dim() or len(one) != len(given[0]) or len(one) in one.shape[1:] for one in given):
        return 0
    batches = [one for one in given if _is_read(one) and len(one) >= FEW and one.numel() <= LARGE]
    for frame in islice(frames, 2):
        held = [*frame.f_locals.values()] if batches else []
        rows = [one for value in held if (one := _places(value)) is not None]
        tables = [one for one in tensors(held) if one.dim() and _is_read(one)] if rows else []
        for one, table, places in product(batches, tables, rows):
            fits = table.shape[1:] == one.shape[1:] and (table.dtype, table.device) == (one.dtype, one.device)
            inside = fits and len(places) == len(one) < len(table) > int(places.max()) and int(places.min()) >= 0
            if inside and torch.equal(table[places.to(table.device)], one):
                return len(one)
    return 0


def _is_read(one: Tensor) -> bool:
    return type(one) is Tensor and not one.is_meta and one.layout is torch.strided


def _places(value: Any) -> Tensor | None:
    """Places in a table that do not follow each other; None: it is none."""
    if type(value).__module__ == "numpy" and getattr(value, "dtype", None) == "int64":
        value = torch.as_tensor(value)
    is_row = isinstance(value, Tensor) and value.dim() == 1 and value.dtype == torch.int64 and not value.is_meta
    return value if is_row and len(value) >= FEW and bool((value.diff() != 1).any()) else None


def mixed_samples(
    asking: Asking, first: list[Tensor], sizes: Collection[int], losses: list[LossCompared]
) -> SamplesMixed | None:
    """Where the outputs of a sample come to depend on another one; None: nowhere, or it cannot be told.

    Where nobody knows how many samples there are, it can be told of layers that take the first dimension for time.
    """
    known = _size(asking, sizes)
    whole = known or _pooled(asking, losses)
    samples = None if whole < 2 or _on_purpose(asking.module) else _samples(asking, first, whole)
    if samples is None:
        return None
    size, chosen = samples.size, samples.chosen

    def change(one: Tensor) -> Tensor:
        return _first_replaced(size, chosen(one))

    changed = asking.outputs(change)
    if changed is None or not _others_differ(size, samples.said, changed):
        return None
    with _heard(asking.module, size) as before:
        asking.outputs(chosen)
    with _heard(asking.module, size) as after:
        asking.outputs(change)
    for name, (inputs, outputs) in before.items():
        ends = after.get(name, ([], []))
        if _others_differ(size, outputs, ends[1]) and not _others_differ(size, inputs, ends[0]):
            module = asking.module.get_submodule(name)
            kind, by_time = type(module).__name__, getattr(module, "batch_first", True) is False
            if any(word in kind.lower() for word in ON_PURPOSE) or not (known or by_time):
                return None
            return SamplesMixed(path=name, kind=kind, batch=whole, time_first=by_time)
    return None


def is_placed(asking: Asking, first: list[Tensor], sizes: Collection[int]) -> bool:
    """Whether what it says of samples is another thing where all have changed places."""
    size = _size(asking, sizes)
    kept = (one for module in asking.module.modules() for one in tensors(vars(module)))
    own = any(size in one.shape for one in kept)  # a state, or a weight, of each row
    named = "ensemble" in " ".join(type(one).__name__.lower() for one in asking.module.modules())
    if size < 3 or any(size in one.shape[1:] for one in _given(asking)) or _on_purpose(asking.module) or named or own:
        return False
    after = asking.outputs(lambda one: one.roll(1, 0) if one.dim() and one.shape[0] == size else one)
    pairs = [(a, b) for a, b in zip(first, after or (), strict=False) if a.shape == b.shape and len(a.shape)]
    return any(a.shape[0] == size and far(a.roll(1, 0), b) and far(_moved(a, size), b) for a, b in pairs)


def _moved(one: Tensor, size: int) -> Tensor:
    """What is said of pairs of samples where all have changed places."""
    dims = [dim for dim, length in enumerate(one.shape) if length == size]
    return one.roll([1] * len(dims), dims)


def _given(asking: Asking) -> list[Tensor]:
    return [*tensors((asking.call.args, asking.call.kwargs))]


def _size(asking: Asking, sizes: Collection[int]) -> int:
    """Of the batch that it was given; 0: it was given none of these sizes."""
    return next((one.shape[0] for one in _given(asking) if one.dim() and one.shape[0] in sizes), 0)


def _pooled(asking: Asking, losses: list[LossCompared]) -> int:
    """Of the first dimension of sequences of which a loss compares one output each, and no place; 0: of none."""
    for one in _given(asking):
        if one.dim() < (3 if one.is_floating_point() else 2) or one.dtype == torch.bool:
            continue
        size, places = one.shape[0], one.shape[1]
        for loss in losses:
            shapes = (loss.outputs.shape, loss.targets.shape)
            if all(shape[:1] == (size,) and len(shape) <= 2 and places not in shape[1:] for shape in shapes):
                return size if places != size else 0
    return 0


def _samples(asking: Asking, first: list[Tensor], size: int) -> _Samples | None:
    """All of a batch, or fewer, where something else is of its size; None: nobody knows which dimension is which."""
    given = _given(asking)
    unclear = any(size in one.shape[1:] for one in given)
    if not unclear and not any(size in one.shape for one in asking.module.parameters()):
        return _Samples(size=size, chosen=lambda one: one, said=first)
    fewer = _fewer(asking, first, size)
    if fewer is not None or unclear:
        return fewer
    return _Samples(size=size, chosen=lambda one: one, said=first)


def _fewer(asking: Asking, first: list[Tensor], size: int) -> _Samples | None:
    """A batch without its last samples, where the model says something of each of the others."""
    given = _given(asking)
    known = {length for one in (*given, *first, *asking.module.parameters()) for length in one.shape}
    shorter = next((one for one in range(size - 1, max(size - SHORTER, 2), -1) if one not in known), 0)
    pairs = any(one.dim() == 2 and one.shape[0] == one.shape[1] == size and not far(one, one.T) for one in given)
    if not shorter or pairs:  # what each sample is to another
        return None
    chosen = partial(_cut, size, shorter)
    said = asking.outputs(chosen) or []
    shapes = [(a.shape, b.shape) for a, b in zip(first, said, strict=False)]
    follow = [before for before, after in shapes if after[:1] == (shorter,) and before[:1] == (size,)]
    by_place = any(one.shape[1:2] == (size,) for one in given) and any(one[1:2] == (size,) for one in follow)
    return None if not follow or by_place else _Samples(size=shorter, chosen=chosen, said=said)


def _cut(size: int, shorter: int, one: Tensor) -> Tensor:
    return one[:shorter] if one.dim() and one.shape[0] == size else one


def _on_purpose(module: nn.Module) -> bool:
    """Return whether a batch norm of its own averages the samples of every batch."""
    return any(isinstance(one, CAN_MIX) and one.running_mean is None for one in module.modules())


def _first_replaced(size: int, one: Tensor) -> Tensor:
    """The batch with its second sample in the place of the first."""
    if not one.dim() or one.shape[0] != size:
        return one
    return torch.cat([one[1:2], one[1:]])


def _others_differ(size: int, before: list[Tensor], after: list[Tensor]) -> bool:
    pairs = zip(before, after, strict=True) if len(before) == len(after) else ()
    return any(far(a[1:], b[1:]) for a, b in pairs if a.shape == b.shape and _by_sample(a, size))


def _by_sample(one: Tensor, size: int) -> bool:
    return one.dim() > 0 and one.shape[0] == size and size not in one.shape[1:]


Heard = dict[str, tuple[list[Tensor], list[Tensor]]]


@contextmanager
def _heard(module: nn.Module, size: int) -> Iterator[Heard]:
    """What its modules are given and return inside, in the order in which they return."""
    heard: Heard = {}

    def hears(name: str, _: Any, args: Any, kwargs: Any, result: Any) -> None:
        pair = ([one for one in tensors(each) if _by_sample(one, size)] for each in ((args, kwargs), result))
        heard.setdefault(name, tuple(pair))  # type: ignore[arg-type]

    hooks = [one.register_forward_hook(partial(hears, name), with_kwargs=True) for name, one in module.named_modules()]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


# --- its class ---


@frozen(kw_only=True, eq=False)
class _Shown:
    """Where an input says of which class samples are, and that input with one of them hidden as others are."""

    name: str
    given: Tensor
    hidden: Tensor


def shown_classes(asking: Asking, first: list[Tensor], losses: list[LossCompared]) -> str:
    """The name of an input that says of which class the samples of a loss are, and not of which others are.

    As where labels of some nodes of a graph are given, and a loss is to be that of the rest. Empty: none does, or what
    the model says of such a sample does not depend on what it is shown of its own class.
    """
    for loss in losses:
        rows, classes = _rows_of(asking, loss)
        if len(rows) < FEW or not _differ(classes):
            continue
        row = int(rows[0])
        for one in _shown(asking, rows, classes, loss.outputs.shape[1]):
            after = asking.outputs(partial(_replaced, one)) or []
            pairs = [(a, b) for a, b in zip(first, after, strict=False) if a.shape == b.shape and a.dim() == 2]
            if any(len(a) > row and far(a[row], b[row]) for a, b in pairs):
                return one.name
    return ""


def _replaced(shown: _Shown, one: Tensor) -> Tensor:
    return shown.hidden if one is shown.given else one


def _rows_of(asking: Asking, loss: LossCompared) -> tuple[Tensor, Tensor]:
    """Which of what the model has said a loss has compared, as far as that is clear, and with which classes."""
    outputs, targets = loss.outputs, loss.targets
    none = targets.new_empty(0, dtype=torch.long)
    if outputs.dim() != 2 or targets.dim() != 1 or targets.is_floating_point():
        return none, none
    counted = (targets != loss.left_out).nonzero().flatten()[:SOME]
    outputs, targets = outputs[counted], targets[counted]
    said = (one for one in tensors(asking.call.outputs) if one.dim() == 2 and one.shape[1] == outputs.shape[1])
    for one in (each for each in said if len(each) > FEW and each.numel() <= LARGE and each.device == outputs.device):
        for values in (one, one.float().log_softmax(1)):
            at = [(values[:, 0] == row[0]).nonzero().flatten() for row in outputs]
            clear = [
                len(each) == 1 and torch.equal(values[each[0]], row) for each, row in zip(at, outputs, strict=True)
            ]
            if sum(clear) >= FEW:
                rows = torch.cat([each for each, known in zip(at, clear, strict=True) if known])
                return rows, targets[torch.tensor(clear, device=targets.device)]
    return none, none


def _shown(asking: Asking, rows: Tensor, classes: Tensor, count: int) -> Iterator[_Shown]:
    for name, given in asking.call.given.items():
        if given.dim() not in (1, 2) or given.numel() > LARGE or len(given) <= int(rows.max()):
            continue
        if given.dim() == 2 and given.is_floating_point() and given.shape[1] >= count:
            bits = fn.one_hot(classes, count).to(given.dtype)
            same = (given[rows].unfold(1, count, 1) == bits[:, None]).all(2).all(0)
            for begin in same.nonzero().flatten().tolist():
                block = slice(begin, begin + count)
                if int((given[:, block] == 0).all(1).sum()) >= FEW:
                    hidden = given.clone()
                    hidden[rows[0], block] = 0
                    yield _Shown(name=f"{name}[:, {begin}:{begin + count}]", given=given, hidden=hidden)
        elif given.dim() == 1 and not given.is_floating_point() and torch.equal(given[rows], classes):
            rest = given[given >= count]  # a class of its own for those that are hidden
            if len(rest) >= FEW:
                hidden = given.clone()
                hidden[rows[0]] = rest[0]
                yield _Shown(name=name, given=given, hidden=hidden)


def _differ(classes: Tensor) -> bool:
    return bool((classes != classes[0]).any())


# --- its other view ---


def views_apart(asking: Asking, losses: list[LossCompared]) -> int:
    """Samples whose nearest one stands beside them, as two views do, and of which a loss makes another their class.

    As where views were put in turn, and a contrastive loss takes the second half for views of the first. 0: none.
    """
    given = (one for one in _given(asking) if one.dim() > 1 and one.is_floating_point() and one.numel() <= LARGE)
    for one in given:
        size = len(one)
        beside = torch.arange(size, device=one.device) ^ 1
        for loss in losses:
            paired = _paired(loss, size) if FEW <= size <= MOST_VIEWS and size % 2 == 0 else None
            if paired is None:
                continue
            rows = one.flatten(1).float()
            nearest = torch.cdist(rows, rows).fill_diagonal_(torch.inf).argmin(1)
            found = (nearest == each.to(nearest.device) for each in (beside, paired))
            is_beside, is_paired = (float(each.float().mean()) for each in found)
            if is_beside > MANY and is_paired < (1 - MANY) / 4:
                return size
    return 0


MOST_VIEWS = 1024
"""Samples that are held against each other."""
MANY = 0.6
"""Share of samples whose nearest one is a view of them: in a row of samples that change slowly it is half."""


def _paired(loss: LossCompared, size: int) -> Tensor | None:
    """Which other sample a loss makes the class of each; None: its classes are no samples."""
    outputs, targets = loss.outputs, loss.targets
    if targets.is_floating_point() or targets.shape != (size,) or outputs.dim() != 2 or len(outputs) != size:
        return None
    own = torch.arange(size, device=targets.device)
    if outputs.shape[1] == size:
        return None if bool((targets == own).any()) else targets
    return targets + (targets >= own) if outputs.shape[1] == size - 1 else None
