"""What a program writes into tensors by an index: sums for one place of which one is kept, copies that nobody keeps."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.distributed.fsdp import fully_sharded_data_parallel

from prepkit.facts.values import LostSums
from prepkit.observe.prepared.around import (
    frames_above,
    is_foreign,
    known,
    line_of_program,
    nodes_of,
    parsed,
)
from prepkit.observe.prepared.instead import around_calls
from prepkit.observe.prepared.reading import digest_of

MOST_LOOKS = 8
"""How often one line is looked at."""
MOST_HOLDERS = 16
"""Of a tensor with more references somebody keeps one."""
MOST_INDICES = 1 << 16
"""Of the places that are written at once."""
MOST_DIGITS = 256
"""Numbers of a weight by which a write is seen."""
MOST_PAIRS = 64
"""Values for one place that are compared with each other."""
COUNTED = re.compile(r"count|hist|freq|num|deg|usage|load", re.IGNORECASE)
"""Of tables to which 1 is added names that say that they count."""
CallPlace = tuple[CodeType, int]
"""One call in the text of a program: of several in a line each is another."""
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
_OURS = str(Path(__file__).parents[1])
IN_PLACE = ("zero_", "fill_", "add_", "sub_", "mul_", "div_", "clamp_", "copy_", "masked_fill_", "normal_", "uniform_")
"""Methods that write into their tensor."""


@define(eq=False)
class Writes:
    """Listens inside ``on()``."""

    lost: dict[CallPlace, LostSums] = field(factory=dict)
    away: dict[CallPlace, tuple[str, str, str]] = field(factory=dict)
    unshards: dict[str, tuple[str, ...]] = field(factory=dict)
    """By line what was written while FSDP1 had put it together, and is thrown away."""
    _looked: Counter[CallPlace] = field(factory=Counter)
    _fewest: int = 0
    """Holders of what nobody keeps, as they are counted where a write is heard."""
    _probes: bool = False
    """Whether such a one is written now."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(around_calls(Tensor, "__setitem__", self._sets))
            stack.enter_context(around_calls(fully_sharded_data_parallel, "_unshard_params", self._unshards))
            for name in IN_PLACE:
                stack.enter_context(around_calls(Tensor, name, partial(self._changes, name)))
            yield

    def _changes(self, name: str, plain: Any, *given: Any, **named: Any) -> Any:
        """A method writes into a tensor: a copy that an index has made, where the statement is nothing but the call."""
        frame = None if torch.compiler.is_compiling() else _caller()
        if frame is not None and given and _owns(given[0]) and self._looked[place_of(frame)] < MOST_LOOKS:
            self._looked[place_of(frame)] += 1
            target = _called_on(frame, name)
            held: Any = None if target is None else known(frame, target.value)
            if target is not None and _owns(held) and held.data_ptr() != given[0].data_ptr():
                said = f"{ast.unparse(target)}.{name}"
                self.away[place_of(frame)] = line_of_program([frame]), said, ast.unparse(target)
        return plain(*given, **named)

    @contextmanager
    def _unshards(self, plain: Any, module: nn.Module, recurse: bool, writeback: bool, *given: Any) -> Iterator[None]:
        """FSDP1 puts weights together, and throws away what is written into them where it is told so."""
        with plain(module, recurse, writeback, *given):
            before = {} if writeback else {name: _state(param) for name, param in module.named_parameters()}
            yield
            after = {name: _state(param) for name, param in module.named_parameters() if name in before}
            if changed := tuple(name for name, state in after.items() if before[name] != state):
                self.unshards[line_of_program(frames_above(__file__))] = changed

    def _sets(self, plain: Any, *given: Any) -> Any:
        holders = sys.getrefcount(given[0])
        if self._probes:
            self._fewest = self._fewest or holders  # a mode of torch calls it once more, and holds it too
        elif holders < MOST_HOLDERS and not torch.compiler.is_compiling() and _owns(given[0]):
            self._writes_away(holders)
        if not torch.compiler.is_compiling() and type(given[0]) is Tensor and type(given[-1]) is Tensor:
            written = _written(given[0], given[1])
            if written is not None and torch._C._functorch.maybe_current_level() is None:
                self._writes(given[0], given[1], given[2], written)
        return plain(*given)

    def _writes_away(self, holders: int) -> None:
        """Looks for what is written to a copy that nobody holds, as indexing by a mask, or by places, makes one."""
        frame = _program()
        if frame is None or self._looked[place := place_of(frame)] >= MOST_LOOKS or place in self.away:
            return
        self._looked[place] += 1
        written = _written_at(frame)
        if written is not None and isinstance(written[1].value, ast.Subscript):
            statement, target = written
            self._fewest, self._probes = 0, True
            if isinstance(statement, ast.AugAssign):
                torch.zeros(1)[[0]][:1] *= 1.0  # has as few holders as can be
            else:
                torch.zeros(1)[[0]][:1] = 0.0
            self._probes = False
            if holders <= self._fewest:
                self.away[place] = line_of_program([frame]), ast.unparse(target), ast.unparse(target.value)

    def _writes(self, tensor: Tensor, index: Any, value: Tensor, written: _Written) -> None:
        """Looks for several values of one place, each a sum with what stood there, of which one is kept."""
        frame = _program()
        if (
            frame is None
            or tensor.is_meta
            or self._looked[place := place_of(frame)] >= MOST_LOOKS
            or place in self.lost
        ):
            return
        self._looked[place] += 1
        if (said := _said_sum(frame)) is None:
            return
        with torch.no_grad():
            first, second = written.repeats()
            if not len(first) or value.shape != written.shape(tensor):
                return
            one, other = (written.rows(value, some[:MOST_PAIRS]) for some in (first, second))
            added = one - written.rows(tensor[index], first[:MOST_PAIRS]) if COUNTED.search(said[0]) else None
            if bool((one != other).any()) or (added is not None and bool((added == 1).all())):
                line, instead = line_of_program([frame]), written.adds(*said)
                self.lost[place] = LostSums(line=line, said=said[2], repeats=len(first), instead=instead)


def _state(param: nn.Parameter) -> str:
    return digest_of(param.detach().flatten()[:MOST_DIGITS])


@frozen(eq=False)
class _Written:
    """Places that are written at once: along ``dim``, and as many behind it as there are tensors of whole numbers."""

    dim: int
    ids: tuple[Tensor, ...]
    """Each of one shape."""
    sizes: tuple[int, ...]

    def repeats(self) -> tuple[Tensor, Tensor]:
        """Pairs of values that are written to one place."""
        keys = torch.zeros_like(self.ids[0].flatten()[:MOST_INDICES], dtype=torch.long)
        for ids, size in zip(self.ids, self.sizes, strict=True):
            keys = keys * size + ids.flatten()[:MOST_INDICES].long() % size
        order = keys.argsort()
        same = keys[order][1:] == keys[order][:-1]
        return order[:-1][same], order[1:][same]

    def shape(self, tensor: Tensor) -> torch.Size | None:
        """That of what is written, where all before and behind is written whole."""
        behind = tensor.shape[self.dim + len(self.ids) :]
        return torch.Size((*tensor.shape[: self.dim], *self.ids[0].shape, *behind))

    def rows(self, value: Tensor, some: Tensor) -> Tensor:
        """Values for these."""
        ids = self.ids[0].dim()
        return value.detach().flatten(self.dim, self.dim + ids - 1).index_select(self.dim, some.to(value.device))

    def adds(self, target: str, added: str, said: str) -> str:
        """What keeps all of them, as code; empty: that takes more than a line."""
        place = ast.parse(target, mode="eval").body
        if not isinstance(place, ast.Subscript) or len(self.ids) > 1 or self.ids[0].dim() > 1:
            return ""
        inside = place.slice.elts if isinstance(place.slice, ast.Tuple) else [place.slice]
        owner, names = ast.unparse(place.value), ast.unparse(inside[self.dim])
        minus = f"{owner}[" in said and ("-=" in said or " - " in said)
        if added in ("1", "1.0") and len(inside) == 1:
            return f"{owner} {'-' if minus else '+'}= torch.bincount({names}, minlength=len({owner}))"
        return f"{owner}.index_add_({self.dim}, {names}, {added}{', alpha=-1' if minus else ''})"


def _written(tensor: Tensor, index: Any) -> _Written | None:
    """Places that tensors of whole numbers name one by one; None: something else is written, such as by a mask."""
    parts = index if isinstance(index, tuple) else (index,)
    at = next((at for at, one in enumerate(parts) if isinstance(one, Tensor)), None)
    if at is None or any(one != slice(None) for one in parts[:at] if isinstance(one, slice)):
        return None
    ids = [*takewhile(lambda one: isinstance(one, Tensor), parts[at:])]
    others = (*parts[:at], *parts[at + len(ids) :])
    whole = all(type(one) is Tensor and one.dtype in WHOLE for one in ids)
    if not whole or any(not isinstance(one, slice) or one != slice(None) for one in others):
        return None
    try:
        spread = torch.broadcast_tensors(*ids)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None  # which the write will say itself
    sizes = tuple(tensor.shape[at : at + len(ids)])
    return _Written(at, spread, sizes) if spread[0].numel() > 1 and len(sizes) == len(ids) and all(sizes) else None


def _said_sum(frame: FrameType) -> tuple[str, str, str] | None:
    """Of ``t[i] += v``, or ``t[i] = t[i] + v``, that a frame runs: ``t[i]``, ``v`` and the whole; None: of no other.

    Nor of a ``v`` that is computed from ``t``, as of an average of which each has its turn.
    """
    if (written := _written_at(frame)) is None:
        return None
    statement, target = written
    return _sum_of(statement, ast.unparse(target), ast.unparse(target.value))


def _written_at(frame: FrameType) -> tuple[ast.AST, ast.Subscript] | None:
    """The statement that a frame runs, and what it writes to by an index; None: it does not."""
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    for one in nodes_of(parsed(frame.f_code.co_filename), ast.Assign, ast.AugAssign):
        targets = one.targets if isinstance(one, ast.Assign) else [one.target]
        for target in (each for each in targets if isinstance(each, ast.Subscript)):
            if (target.lineno, target.end_lineno, target.col_offset, target.end_col_offset) == position:
                return one, target
    return None


def _owns(tensor: Any) -> bool:
    """Return whether it is no view, and no array of numpy's."""
    plain = (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor._base is None
        and not tensor.is_meta
        and tensor.layout == torch.strided
    )
    return plain and torch._C._functorch.maybe_current_level() is None and tensor.untyped_storage().resizable()


def _sum_of(node: ast.AST, target: str, owner: str) -> tuple[str, str, str] | None:
    added: ast.expr | None = None
    match node:
        case ast.AugAssign(op=ast.Add() | ast.Sub(), value=value):
            added = value
        case ast.Assign(value=ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right)):
            if ast.unparse(left) == target:
                added = right
            elif ast.unparse(right) == target and isinstance(op, ast.Add):
                added = left
    if added is None or any(ast.unparse(one) == owner for one in ast.walk(added) if isinstance(one, ast.expr)):
        return None
    return target, ast.unparse(added), ast.unparse(node)


def _called_on(frame: FrameType, name: str) -> ast.Subscript | None:
    """What a statement, which is a call of this method of something by an index, and nothing else, calls it on."""
    position = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), None)
    for one in nodes_of(parsed(frame.f_code.co_filename), ast.Expr):
        match one.value:
            case ast.Call(func=ast.Attribute(value=ast.Subscript() as target, attr=attr)) as call if attr == name:
                if (call.lineno, call.end_lineno, call.col_offset, call.end_col_offset) == position:
                    return target
    return None


def _caller() -> FrameType | None:
    """The frame of the program that calls, whatever of prepkit listens between; None: a library calls."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return None if frame is None or is_foreign(frame.f_code.co_filename) else frame


def _program() -> FrameType | None:
    """The innermost frame of the program, whatever listens between."""
    return next((one for one in frames_above(__file__) if not is_foreign(one.f_code.co_filename)), None)


def place_of(frame: FrameType) -> CallPlace:
    """Where a frame stands."""
    return frame.f_code, frame.f_lasti
