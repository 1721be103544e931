"""Functions of a program that come with a backward of their own: whether that is the slope of their forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.autograd import Function, grad

from prepkit.facts.terms import OddBackward
from prepkit.observe.prepared.around import frames_above, is_foreign, line_of_program
from prepkit.ranks.no_collectives import NoCollectives

MOST = 16
"""Functions that are looked at, each by its first call."""
MOST_ELEMENTS = 1 << 18
"""Of what one is given."""
LOOKED_AT = 12
"""Elements of each argument that are moved."""
STEP = 1e-6
"""By this part of the largest element."""
JUMPS, WAYS, NARROW, JUMP = 4, 24, 1e-6, 1e-2
"""Elements of each argument that are moved further, in how many steps, down to which width, and what is left there."""
NEAR = 1e-3
"""Part of a slope that a derivative may be off it."""
KINK = 1e-2
"""Part by which the slopes of both sides may differ; from there on, it has none."""
ROUNDING = 1e-14
"""Of what comes of a call, so much is rounding."""


@frozen(eq=False)
class _Call:
    """The first one of a function, with copies of what it was given."""

    kind: Any
    values: list[Any]
    moved: list[int]
    """Places of what trains among that."""
    line: str

    @property
    def name(self) -> str:
        return str(self.kind.__name__)

    def argument(self, at: int) -> str:
        """The name of one that it was given."""
        names = [*inspect.signature(self.kind.forward).parameters]
        names = names[1:] if len(names) > len(self.values) else names
        return names[at] if at < len(names) else f"argument {at}"


@define(eq=False)
class OwnBackwards:
    """Listens inside ``on()`` to calls of functions with a backward of the program's own."""

    _seen: set[type] = field(factory=set)
    _others: set[type] = field(factory=set)
    """Functions of libraries."""
    _waiting: list[_Call] = field(factory=list)
    _found: list[OddBackward] = field(factory=list)
    _over: bool = False
    """Whether nobody listens any more, though a program may have kept ``apply`` under a name of its own."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        home: Any = Function
        plain: Any = vars(home)["apply"]

        def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
            if not (kwargs or self._over) and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                self._hears(kind, args)
            return plain.__func__(kind, *args, **kwargs)

        home.apply = classmethod(applied)
        try:
            yield
        finally:
            home.apply, self._over = plain, True

    def _hears(self, kind: Any, args: Sequence[Any]) -> None:
        if kind in self._seen or kind in self._others or len(self._seen) >= MOST:
            return
        file = getattr(getattr(kind.forward, "__code__", None), "co_filename", "")
        if not file or is_foreign(file):
            self._others.add(kind)
            return
        tensors = [one for one in args if isinstance(one, Tensor)]
        moved = [at for at, one in enumerate(args) if _moves(one)]
        plain = all(type(one) in (Tensor, nn.Parameter) for one in tensors) and not any(map(callable, args))
        if moved and plain and sum(one.numel() for one in tensors) <= MOST_ELEMENTS:
            self._seen.add(kind)
            line = line_of_program(frames_above(__file__))
            self._waiting.append(_Call(kind, [_exact(one) for one in args], moved, line))

    def found(self) -> tuple[OddBackward, ...]:
        """Those whose backward gives something else than the slope of their forward; asked by calls of them, aside."""
        while self._waiting:
            call = self._waiting.pop()
            with suppress(Exception):  # of one that takes no float64, or asks other ranks: nobody knows
                self._found += _odd(call)
        return tuple(self._found)


def _odd(call: _Call) -> Iterator[OddBackward]:
    """Yield what it gives for each argument that is no slope."""
    with _kept(), NoCollectives(RuntimeError), torch.autocast("cpu", enabled=False), torch.enable_grad():
        asked = _Asked(call)
        if not asked.computes or any(map(asked.jumps, call.moved)):
            return  # what has no slope somewhere is given another gradient on purpose
        pairs = {at: [*asked.pairs(at)] for at in call.moved if asked.grads[at] is not None}
    if any(not slope and gives for found in pairs.values() for gives, slope in found):
        return  # it stands for a step that has no slope
    for at, found in pairs.items():
        off = any(abs(gives - slope) > NEAR * max(abs(gives), abs(slope)) for gives, slope in found)
        ratios = [gives / slope for gives, slope in found if slope]
        alike = bool(ratios) and max(ratios) - min(ratios) <= NEAR * max(map(abs, ratios))
        if off and not (alike and ratios[0] < 0):  # one that is turned round is meant
            ratio = ratios[0] if alike else None
            yield OddBackward(line=call.line, name=call.name, argument=call.argument(at), ratio=ratio)


@contextmanager
def _kept() -> Iterator[None]:
    """Behind it torch's generator on the host stands where it stood."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _moves(one: Any) -> bool:
    return isinstance(one, Tensor) and one.requires_grad and one.is_floating_point() and one.numel() > 0


def _exact(one: Any) -> Any:
    if not isinstance(one, Tensor):
        return one
    held = one.detach().cpu().clone(memory_format=torch.contiguous_format)
    return held.double() if held.is_floating_point() else held


class _Asked:
    """One function at what it was given, in float64."""

    def __init__(self, call: _Call) -> None:
        self.kind, self.values, moved = call.kind, call.values, call.moved
        leaves = {at: self.values[at].clone().requires_grad_() for at in moved}
        outputs = self._outputs([leaves.get(at, one) for at, one in enumerate(self.values)])
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(one.shape, dtype=torch.float64, generator=generator) for one in outputs]
        given = [self.values[at] for at in moved]
        self.computes = bool(outputs) and not any(_same(one, other) for one in outputs for other in given)
        """Whether it does more than hand on what it is given, as what changes a gradient does."""
        there = [(one, weight) for one, weight in zip(outputs, self.weights, strict=True) if one.requires_grad]
        found = grad([one for one, _ in there], [*leaves.values()], [weight for _, weight in there], allow_unused=True)
        self.grads = dict(zip(moved, found, strict=True))

    def _outputs(self, values: list[Any]) -> list[Tensor]:
        torch.default_generator.manual_seed(0)
        given = [one.clone() if isinstance(one, Tensor) and not one.requires_grad else one for one in values]
        outputs = self.kind.apply(*given)
        every = outputs if isinstance(outputs, tuple | list) else (outputs,)
        return [one for one in every if isinstance(one, Tensor) and one.dtype == torch.float64]

    def _at(self, at: int, element: int, by: float) -> float:
        values = [one.clone() if isinstance(one, Tensor) else one for one in self.values]
        values[at].view(-1)[element] += by
        with torch.no_grad():
            outputs = self._outputs(values)
        return sum(float((weight * one).sum()) for weight, one in zip(self.weights, outputs, strict=True))

    def jumps(self, at: int) -> bool:
        """Whether what comes of it jumps somewhere, as a rounding, a sign or a comparison does."""
        value = self.values[at]
        far = 3 * (float(value.abs().max()) or 1.0)
        for element in torch.randperm(value.numel(), generator=torch.Generator().manual_seed(1))[:JUMPS].tolist():
            ways = torch.linspace(-far, far, WAYS, dtype=torch.float64).tolist()
            found = [self._at(at, element, way) for way in ways]
            pairs = zip(ways, ways[1:], found, found[1:], strict=False)
            below, above, low, high = max(pairs, key=lambda one: abs(one[3] - one[2]))
            first = abs(high - low)
            while above - below > NARROW * far:
                middle = (below + above) / 2
                here = self._at(at, element, middle)
                if abs(here - low) >= abs(high - here):
                    above, high = middle, here
                else:
                    below, low = middle, here
            if first and abs(high - low) > JUMP * first:
                return True
        return False

    def pairs(self, at: int) -> Iterator[tuple[float, float]]:
        """Yield what it gives for some elements of an argument, with the slope there, where there is one."""
        gives, value = self.grads[at], self.values[at]
        assert gives is not None, "only those are asked"
        by, here = STEP * (float(value.abs().max()) or 1.0), self._at(at, 0, 0.0)
        rounding = ROUNDING * abs(here) / by
        for element in torch.randperm(value.numel(), generator=torch.Generator().manual_seed(0))[:LOOKED_AT].tolist():
            above, below = (self._at(at, element, to) - here for to in (by, -by))
            further = (self._at(at, element, 2 * by) - self._at(at, element, -2 * by)) / (4 * by)
            slope, bend = (above - below) / (2 * by), abs(above + below) / by
            if bend <= KINK * abs(slope) + rounding and abs(slope - further) <= 0.1 * NEAR * abs(slope) + rounding:
                given = float(gives.reshape(-1)[element])
                yield (given, slope) if abs(slope) > rounding else (given if abs(given) > rounding else 0.0, 0.0)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.detach(), other)
