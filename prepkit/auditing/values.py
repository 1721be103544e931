"""What a program computes on the way: shapes, casts and random numbers; and how its weights began."""

from __future__ import annotations

import ast
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from types import FrameType
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from prepkit.auditing.loops import Draws, random_states
from prepkit.auditing.said import said
from prepkit.auditing.shapes import call_at, is_being_made, may_be_cut, permuted, was_padded
from prepkit.auditing.written import MOST_LOOKS, CallPlace, Writes, place_of
from prepkit.facts.values import Permuted, ValueFacts
from prepkit.observe.prepared.around import (
    Line,
    frames_above,
    innermost,
    is_of_library,
    line_of_program,
    lines_of_program,
    name_of,
    nodes,
    nodes_of,
    parsed,
)
from prepkit.observe.prepared.instead import around_calls

RESHAPES = ("view", "reshape")
CASTS = ("long", "int", "short", "char", "byte", "to", "type")
FEWEST = 16
"""Of fewer numbers nothing is told."""
MOST_NUMBERS = 1 << 16
"""Of more, so many of all are looked at."""
BLENDS = ("linear", "bilinear", "bicubic", "trilinear", "area")
"""Modes of ``interpolate`` that compute means of what lies beside each other."""
MOST_CLASSES = 255
"""Of masks that are pictures themselves are as many levels, and no classes."""
MOST_BLENDED = 16
"""Blends that are kept."""
LOOKS = 3
"""In so many steps one behind the other a line seeds with one number before it is said to do so in each."""
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
    _inverted: dict[str, None] = field(factory=dict)
    """Lines that turn whole numbers of 0 and 1 into -1 and -2."""
    _writes: Writes = field(factory=Writes)
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
            stack.enter_context(around_calls(Tensor, "__invert__", self._inverts))
            stack.enter_context(self._writes.on())
            yield

    def facts(self) -> ValueFacts:
        """What was heard so far."""
        self._looks += 1
        return ValueFacts(
            permuted=tuple(one for one in self._shapes.values() if one is not None),
            emptied=tuple(one for one in self._emptied.values() if one is not None),
            reseeded=tuple(self._reseeded()),
            repeated=self._draws.told(),
            **said(),
            inverted=tuple(self._inverted),
            blended=tuple(self._blended),
            lost_sums=tuple(self._writes.lost.values()),
            written_away=tuple(self._writes.away.values()),
            unkept=tuple(self._writes.unshards.items()),
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

    def _inverts(self, plain: Any, given: Any) -> Any:
        result = plain(given)
        readable = type(given) is Tensor and not given.is_meta and torch._C._functorch.maybe_current_level() is None
        if readable and not torch.compiler.is_compiling() and given.dtype is not torch.bool and given.numel() > 1:
            line = line_of_program(frames_above(__file__))
            if line and line not in self._inverted and bool(((given == 0) | (given == 1)).all()):
                self._inverted[line] = None
        return result

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
        if frame is None or self._shapes.get(place := place_of(frame), NOTHING) is None:
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

    def _cast(self, name: str, tensor: Tensor) -> None:
        frame = _caller()
        if frame is None or tensor.numel() < FEWEST or tensor.is_meta:
            return
        place = place_of(frame)
        if self._looked[place] < MOST_LOOKS and self._emptied.get(place, ("", "")) is not None:
            self._looked[place] += 1
            told = (line_of_program([frame]), name) if _become_nothing(tensor.detach()) else None
            self._emptied[place] = told


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
