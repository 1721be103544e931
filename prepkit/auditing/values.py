"""What a program computes on the way: shapes, casts and random numbers; and how its weights began."""

from __future__ import annotations

import ast
import re
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from prepkit.auditing.loops import Draws, random_states
from prepkit.auditing.shapes import call_at, is_being_made, may_be_cut, permuted, was_padded
from prepkit.facts.values import LostSums, Permuted, ValueFacts
from prepkit.observe.prepared.around import (
    Line,
    frames_above,
    innermost,
    is_foreign,
    is_of_library,
    line_of_program,
    lines_of_program,
    name_of,
    nodes,
    nodes_of,
    own_frames,
    parsed,
)
from prepkit.observe.prepared.instead import around_calls

RESHAPES = ("view", "reshape")
CASTS = ("long", "int", "short", "char", "byte", "to", "type")
FEWEST = 16
"""Of fewer numbers nothing is told."""
MOST_NUMBERS = 1 << 16
"""Of more, so many of all are looked at."""
MOST_LOOKS = 8
"""How often one line is looked at."""
BLENDS = ("linear", "bilinear", "bicubic", "trilinear", "area")
"""Modes of ``interpolate`` that compute means of what lies beside each other."""
MOST_CLASSES = 255
"""Of masks that are pictures themselves are as many levels, and no classes."""
MOST_BLENDED = 16
"""Blends that are kept."""
MOST_HOLDERS = 16
"""Of a tensor with more references somebody keeps one."""
MOST_INDICES = 1 << 16
"""Of the places that are written at once."""
LOOKS = 3
"""In so many steps one behind the other a line seeds with one number before it is said to do so in each."""
MOST_PAIRS = 64
"""Values for one place that are compared with each other."""
COUNTED = re.compile(r"count|hist|freq|num|deg|usage|load", re.IGNORECASE)
"""Of tables to which 1 is added names that say that they count."""
CallPlace = tuple[CodeType, int]
"""One call in the text of a program: of several in a line each is another."""
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8)
NOTHING = Permuted(line="", function="", before=(), after=())


@frozen(eq=False)
class _Seeded:
    """A number that torch was seeded with."""

    seed: int
    stands: list[Line]
    looks: tuple[int, ...]
    """Before which looks it was."""
    state: tuple[float, ...]
    """Of generators, just behind it."""


@define(eq=False)
class Computing:
    """Listens inside ``on()``."""

    _shapes: dict[CallPlace, Permuted | None] = field(factory=dict)
    """By call what it does; None: that it did something else too."""
    _emptied: dict[CallPlace, tuple[str, str] | None] = field(factory=dict)
    _looked: Counter[CallPlace] = field(factory=Counter)
    _blends: deque[weakref.ref[Tensor]] = field(factory=partial(deque, maxlen=MOST_BLENDED))
    """Means of whole numbers, of which most are none."""
    _blended: dict[str, None] = field(factory=dict)
    """Lines that make whole numbers of these."""
    _lost: dict[CallPlace, LostSums] = field(factory=dict)
    _away: dict[CallPlace, tuple[str, str, str]] = field(factory=dict)
    _fewest: int = 0
    """Holders of what nobody keeps, as they are counted where a write is heard."""
    _probes: bool = False
    """Whether such a one is written now."""
    _seeds: dict[str, _Seeded] = field(factory=dict)
    """By line of the program."""
    _draws: Draws = field(factory=Draws)
    _looks: int = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(self._draws.on())
            for name in RESHAPES:
                stack.enter_context(around_calls(Tensor, name, partial(self._reshapes, name)))
            stack.enter_context(around_calls(torch, "reshape", partial(self._reshapes, "reshape")))
            for name in CASTS:
                stack.enter_context(around_calls(Tensor, name, partial(self._casts, name)))
            stack.enter_context(around_calls(torch, "manual_seed", self._seeded))
            stack.enter_context(around_calls(nn.functional, "interpolate", self._interpolates))
            stack.enter_context(around_calls(Tensor, "__setitem__", self._sets))
            yield

    def facts(self) -> ValueFacts:
        """What was heard so far."""
        self._looks += 1
        return ValueFacts(
            permuted=tuple(one for one in self._shapes.values() if one is not None),
            emptied=tuple(one for one in self._emptied.values() if one is not None),
            reseeded=tuple(self._reseeded()),
            repeated=self._draws.told(),
            not_called=tuple(_not_called()),
            blended=tuple(self._blended),
            lost_sums=tuple(self._lost.values()),
            written_away=tuple(self._away.values()),
        )

    def _seeded(self, plain: Any, seed: Any, *given: Any) -> Any:
        frames = list(frames_above(__file__))
        seeded, line = plain(seed, *given), line_of_program(frames)
        asked = any(str(one.f_globals.get("__name__")).startswith("torch.optim.") for one in frames)  # of a closure
        if isinstance(seed, int) and not asked and not torch.compiler.is_compiling():
            known = self._seeds.get(line)
            looks = known.looks if known is not None and known.seed == seed else ()
            stands, at = lines_of_program(frames), (*looks[-LOOKS:], self._looks)
            self._seeds[line] = _Seeded(seed, stands, at, random_states())
            self._draws.seeds(seed, stands, frames)
        return seeded

    def _reseeded(self) -> Iterator[tuple[str, int]]:
        """Lines that seed in each step with one number, which nobody has put back since, and what is drawn by then."""
        now = lines_of_program(frames_above(__file__))
        drawn = random_states()
        for line, one in self._seeds.items():
            if torch.initial_seed() == one.seed and one.stands and one.state != drawn:
                last = {self._looks - 1 - at for at in range(LOOKS)}
                if last <= {*one.looks} or (_as_often(one.stands, now) and _is_fixed(one.stands, now)):
                    yield line, one.seed

    def _reshapes(self, name: str, plain: Any, *given: Any, **named: Any) -> Any:
        result = plain(*given, **named)
        if not torch.compiler.is_compiling() and given and type(given[0]) in (Tensor, nn.Parameter):
            before, after = given[0].shape, result.shape
            if before != after and len(after) >= 2 and len(before) >= 2 and result.dtype == given[0].dtype:
                self._reshaped(name, given[0], after)
        return result

    def _reshaped(self, name: str, tensor: Tensor, after: torch.Size) -> None:
        frame = _caller()
        if frame is None or self._shapes.get(place := _place(frame), NOTHING) is None:
            return
        order = permuted(tuple(tensor.shape), tuple(after))
        call = call_at(frame, RESHAPES) if order else None
        if not order or not tensor.is_contiguous() or was_padded(tensor):
            self._shapes[place] = None
        elif place not in self._shapes and not is_being_made(call) and not may_be_cut(tensor.shape, after, call):
            line, before = line_of_program([frame]), tuple(tensor.shape)
            known = order if 1 not in before else ()
            self._shapes[place] = Permuted(line=line, function=name, before=before, after=tuple(after), order=known)

    def _casts(self, name: str, plain: Any, *given: Any, **named: Any) -> Any:
        result = plain(*given, **named)
        if not torch.compiler.is_compiling() and given and type(given[0]) is Tensor and type(result) is Tensor:
            to_whole = not result.dtype.is_floating_point and not result.dtype.is_complex
            if given[0].is_floating_point() and to_whole and result.dtype != torch.bool:
                self._cast(name, given[0])
                if any(one() is given[0] or (one() is given[0]._base is not None) for one in self._blends):
                    self._blended[line_of_program(frames_above(__file__))] = None
        return result

    def _interpolates(self, plain: Any, tensor: Any, *given: Any, **named: Any) -> Any:
        result = plain(tensor, *given, **named)
        mode = named.get("mode", given[2] if len(given) > 2 else "nearest")
        blends = mode in BLENDS and not torch.compiler.is_compiling() and type(result) is Tensor
        if blends and _are_classes(tensor) and bool((result != result.round()).any()):
            self._blends.append(weakref.ref(result))
        return result

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
        if frame is None or self._looked[place := _place(frame)] >= MOST_LOOKS or place in self._away:
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
                self._away[place] = line_of_program([frame]), ast.unparse(target), ast.unparse(target.value)

    def _writes(self, tensor: Tensor, index: Any, value: Tensor, written: _Written) -> None:
        """Looks for several values of one place, each a sum with what stood there, of which one is kept."""
        frame = _program()
        if frame is None or tensor.is_meta or self._looked[place := _place(frame)] >= MOST_LOOKS or place in self._lost:
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
                self._lost[place] = LostSums(line=line, said=said[2], repeats=len(first), instead=instead)

    def _cast(self, name: str, tensor: Tensor) -> None:
        frame = _caller()
        if frame is None or tensor.numel() < FEWEST or tensor.is_meta:
            return
        place = _place(frame)
        if self._looked[place] < MOST_LOOKS and self._emptied.get(place, ("", "")) is not None:
            self._looked[place] += 1
            told = (line_of_program([frame]), name) if _become_nothing(tensor.detach()) else None
            self._emptied[place] = told


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
    plain = type(tensor) is Tensor and tensor._base is None and not tensor.is_meta and tensor.layout == torch.strided
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


def _become_nothing(numbers: Tensor) -> bool:
    """Return whether they are fractions, all of them below 1, and not all the same."""
    if torch._C._functorch.maybe_current_level() is not None:
        return False
    some = numbers.flatten()[:: numbers.numel() // MOST_NUMBERS + 1]
    least, most = (float(one) for one in some.aminmax())
    return -1 < least < most < 1


def _are_classes(tensor: Tensor) -> bool:
    """Return whether these are whole numbers, as of classes, between some of which are others."""
    if tensor.requires_grad or not tensor.numel() >= FEWEST or torch._C._functorch.maybe_current_level() is not None:
        return False
    some = tensor.detach().flatten()[:MOST_NUMBERS].float()
    least, most = (float(one) for one in some.aminmax())
    return 2 <= most - least < MOST_CLASSES and bool((some == some.round()).all())


def _caller() -> FrameType | None:
    """The frame of the program that calls; None: a library calls."""
    frame = next(frames_above(__file__), None)
    return None if frame is None or is_of_library(frame) else frame


def _program() -> FrameType | None:
    """The innermost frame of the program, whatever listens between."""
    return next((one for one in frames_above(__file__) if not is_foreign(one.f_code.co_filename)), None)


def _place(frame: FrameType) -> CallPlace:
    return frame.f_code, frame.f_lasti


# --- seeds ---


def _is_fixed(stands: list[Line], now: list[Line]) -> bool:
    """Return whether the text says that a line, in a function or in one that it calls, gives one number each time."""
    around = {code for code, line in now if innermost(code, line)[0]}
    calls = [one for one in _on_line(stands[0]) if isinstance(one, ast.Call)]
    seeding = [one for one in calls if "seed" in name_of(one)] or calls
    given = [arg for one in seeding[:1] for arg in (*one.args, *(key.value for key in one.keywords))]
    if not given or any(_may_be_left_out(one) for one in takewhile(lambda one: one[0] not in around, stands)):
        return False
    return _is_constant(given[0], stands)


def _on_line(stands: Line) -> list[ast.AST]:
    every = nodes(parsed(stands[0].co_filename))
    return [one for one in every if getattr(one, "lineno", stands[1] + 1) <= stands[1] <= getattr(one, "end_lineno", 0)]


def _may_be_left_out(stands: Line) -> bool:
    """Return whether a line of a function stands under an ``if``."""
    return any(isinstance(one, ast.If) and one.lineno >= stands[0].co_firstlineno for one in _on_line(stands))


def _is_constant(node: ast.expr, stands: list[Line]) -> bool:
    """Return whether an expression is the same number each time that these lines run, each of which calls the last."""
    match node:
        case ast.Constant():
            return True
        case ast.BinOp(left=left, right=right):
            return _is_constant(left, stands) and _is_constant(right, stands)
        case ast.Call(args=[]) if name_of(node) == "get_rank":
            return True
        case ast.Attribute(attr=name):
            return not any(name == one.attr for one in _stored(stands) if isinstance(one, ast.Attribute))
        case ast.Name(id=name):
            maker = _function_of(stands[0])
            if maker is not None and name in [one.arg for one in (*maker.args.args, *maker.args.kwonlyargs)]:
                given = _given_for(name, maker, stands)
                return given is not None and _is_constant(given, stands[1:] or stands)
            return not any(name == one.id for one in _stored(stands) if isinstance(one, ast.Name))
    return False


def _stored(stands: list[Line]) -> Iterator[ast.AST]:
    """What a file writes to in its loops, or in methods but for the one that begins."""
    for one in nodes_of(parsed(stands[0][0].co_filename), ast.For, ast.While, ast.FunctionDef):
        is_method = isinstance(one, ast.FunctionDef) and one.name not in ("__init__", "main")
        if not isinstance(one, ast.FunctionDef) or is_method:
            for inside in ast.walk(one):
                written = isinstance(getattr(inside, "ctx", None), ast.Store)
                if written and (not is_method or isinstance(inside, ast.Attribute)):
                    yield inside
                elif isinstance(inside, ast.Global | ast.Nonlocal):
                    yield from (ast.Name(name) for name in inside.names)


def _function_of(stands: Line) -> ast.FunctionDef | None:
    """The function that has a line."""
    found = [one for one in _on_line(stands) if isinstance(one, ast.FunctionDef) and one.name == stands[0].co_name]
    return found[-1] if found else None


def _given_for(name: str, maker: ast.FunctionDef, stands: list[Line]) -> ast.expr | None:
    """What the function that calls gives for a name, or stands for it by default; None: not known."""
    calls = [one for one in _on_line(stands[1]) if isinstance(one, ast.Call)] if len(stands) > 1 else []
    mine = [one for one in calls if name_of(one) == maker.name]
    names = [one.arg for one in maker.args.args]
    names = names[1:] if names[:1] == ["self"] else names
    if len(mine) != 1 or any(isinstance(one, ast.Starred) for one in mine[0].args):
        return None
    given = dict(zip(names, mine[0].args, strict=False))
    found = {**given, **{key.arg: key.value for key in mine[0].keywords if key.arg}}
    defaults = [*zip(reversed(maker.args.args), reversed(maker.args.defaults), strict=False)]
    defaults += [(arg, one) for arg, one in zip(maker.args.kwonlyargs, maker.args.kw_defaults, strict=True) if one]
    return found.get(name, next((one for arg, one in defaults if arg.arg == name), None))


def _not_called() -> Iterator[tuple[str, str]]:
    """Yield lines of the files whose functions run that name a method and do not call it: ``model.eval``."""
    for file in dict.fromkeys(one.f_code.co_filename for one in own_frames()):
        for one in nodes_of(parsed(file), ast.Expr):
            match one:
                case ast.Expr(value=ast.Attribute(attr=name)) if name in DOING:
                    yield f"{Path(file).name}:{one.lineno}", ast.unparse(one.value)


DOING = frozenset({"eval", "train", "zero_grad", "step", "backward", "update", "barrier", "close", "flush"})
"""Methods whose name alone does nothing."""


def _as_often(before: Iterable[Line], now: Iterable[Line]) -> bool:
    """Return whether a line ran as often as the one that runs now: in the innermost loop around it, under no ``if``."""
    known = dict(reversed([*before]))
    for code, line in now:
        begin, end = innermost(code, line)
        if begin:
            first = known.get(code, 0)
            ifs = nodes_of(parsed(code.co_filename), ast.If)
            chosen = any(begin <= one.lineno <= first <= (one.end_lineno or 0) for one in ifs)
            once = begin == first < end  # what a loop goes over is asked for before it
            return begin <= first <= end and not chosen and not once
        if code.co_name == "<module>":
            return False  # what runs the program may do so in a loop
    return False
