"""What a program computes on the way: shapes, casts and random numbers; and how its weights began."""

from __future__ import annotations

import ast
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from prepkit.auditing.shapes import call_at, is_being_made, may_be_cut, permuted, was_padded
from prepkit.facts.values import Permuted, ValueFacts
from prepkit.observe.prepared.around import (
    Line,
    frames_above,
    innermost,
    is_of_library,
    line_of_program,
    lines_of_program,
    nodes,
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
CallPlace = tuple[CodeType, int]
"""One call in the text of a program: of several in a line each is another."""
NOTHING = Permuted(line="", function="", before=(), after=())


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
    _seeds: dict[str, tuple[int, list[Line]]] = field(factory=dict)
    """By line of the program the last number that it has seeded torch with, and where it stands."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            for name in RESHAPES:
                stack.enter_context(around_calls(Tensor, name, partial(self._reshapes, name)))
            stack.enter_context(around_calls(torch, "reshape", partial(self._reshapes, "reshape")))
            for name in CASTS:
                stack.enter_context(around_calls(Tensor, name, partial(self._casts, name)))
            stack.enter_context(around_calls(torch, "manual_seed", self._seeded))
            stack.enter_context(around_calls(nn.functional, "interpolate", self._interpolates))
            yield

    def facts(self) -> ValueFacts:
        """What was heard so far."""
        return ValueFacts(
            permuted=tuple(one for one in self._shapes.values() if one is not None),
            emptied=tuple(one for one in self._emptied.values() if one is not None),
            reseeded=tuple(self._reseeded()),
            not_called=tuple(_not_called()),
            blended=tuple(self._blended),
        )

    def _seeded(self, plain: Any, seed: Any, *given: Any) -> Any:
        frames = list(frames_above(__file__))
        if isinstance(seed, int):
            self._seeds[line_of_program(frames)] = seed, lines_of_program(frames)
        return plain(seed, *given)

    def _reseeded(self) -> Iterator[tuple[str, int]]:
        """Lines that seed in each step with one number that is written out, and that nobody has put back since."""
        now = lines_of_program(frames_above(__file__))
        for line, (seed, stands) in self._seeds.items():
            if torch.initial_seed() == seed and stands and _as_often(stands, now) and _is_written_out(stands[0], seed):
                yield line, seed

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

    def _cast(self, name: str, tensor: Tensor) -> None:
        frame = _caller()
        if frame is None or tensor.numel() < FEWEST or tensor.is_meta:
            return
        place = _place(frame)
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


def _place(frame: FrameType) -> CallPlace:
    return frame.f_code, frame.f_lasti


def _is_written_out(stands: Line, number: int) -> bool:
    """Return whether a call in a line is given this number as a constant."""
    calls = (one for one in nodes(parsed(stands[0].co_filename)) if isinstance(one, ast.Call))
    given = (arg for one in calls if one.lineno == stands[1] for arg in one.args)
    return any(isinstance(one, ast.Constant) and one.value == number for one in given)


def _not_called() -> Iterator[tuple[str, str]]:
    """Yield lines of the files whose functions run that name a method and do not call it: ``model.eval``."""
    for file in dict.fromkeys(one.f_code.co_filename for one in own_frames()):
        for one in nodes(parsed(file)):
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
            ifs = [one for one in nodes(parsed(code.co_filename)) if isinstance(one, ast.If)]
            chosen = any(begin <= one.lineno <= first <= (one.end_lineno or 0) for one in ifs)
            return begin <= first <= end and not chosen
        if code.co_name == "<module>":
            return False  # what runs the program may do so in a loop
    return False
