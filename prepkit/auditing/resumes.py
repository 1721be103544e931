"""What stood behind each step, against what a training that goes on from there has: moments, and samples of a pass."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from prepkit.facts.phases import OtherMoments, OtherSamples
from prepkit.objects.local_part import local
from prepkit.observe.prepared.around import frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls

STANDS = 64
"""Steps behind which it is known what stood there."""
WEIGHTS, NUMBERS = 64, 64
"""Weights of an optimizer that are remembered of each, and numbers of each of them."""
ROUNDED = 2.0**-7
"""A change of a moment's norm that may be of bfloat16."""
MOST_BATCHES = 4096
"""Of a pass, that are remembered."""

_State = Mapping[str, Tensor]
_Batch = tuple[Any, ...]
"""The indices of its samples."""


@define(eq=False)
class _Pass:
    """A pass through a loader."""

    kind: tuple[type, int]
    """Of its data, and how many samples it has."""
    batches: int
    """How many it has; 0: nobody knows."""
    skips: bool
    order: list[_Batch] = field(factory=list)
    given: int = 0
    trained: int = 0
    """Batches behind which a model was called, with gradients."""
    fresh: bool = False
    """Whether none was, behind the last one."""


@frozen(eq=False)
class _Stand:
    """What stood behind a step."""

    step: int
    kind: type
    weights: list[Tensor]
    state: list[_State]
    reads: _Pass | None
    given: int
    trained: int


@define(eq=False)
class Resumes:
    """Listens inside ``on()``; is told of calls of modules."""

    moments: dict[OtherMoments, None] = field(factory=dict)
    samples: dict[OtherSamples, None] = field(factory=dict)
    _steps: int = 0
    _stands: deque[_Stand] = field(factory=lambda: deque(maxlen=STANDS))
    _loaded: weakref.WeakKeyDictionary[Any, str] = field(factory=weakref.WeakKeyDictionary)
    """Optimizers whose state was loaded since they have stepped last, with the line."""
    _passes: weakref.WeakKeyDictionary[Any, _Pass] = field(factory=weakref.WeakKeyDictionary)
    _last: _Pass | None = None
    """The pass that has given the last batch."""
    _reads: _Pass | None = None
    """The one whose batches train."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        handles = register_optimizer_step_pre_hook(self._begins), register_optimizer_step_post_hook(self._ends)
        try:
            with ExitStack() as stack:
                stack.enter_context(around_calls(torch.optim.Optimizer, "load_state_dict", self._loads))
                stack.enter_context(around_calls(_BaseDataLoaderIter, "_next_index", self._draws))
                stack.enter_context(around_calls(_BaseDataLoaderIter, "__next__", self._gives))
                yield
        finally:
            for one in handles:
                one.remove()

    def enters(self, module: nn.Module, *_: Any) -> None:
        """A module is called from outside of any other."""
        if self._last is not None and self._last.fresh and module.training and torch.is_grad_enabled():
            self._reads = self._last
            self._reads.trained, self._reads.fresh = self._reads.trained + 1, False

    def _loads(self, plain: Any, optimizer: Any, *given: Any, **named: Any) -> Any:
        result = plain(optimizer, *given, **named)
        if self._steps:
            self._loaded[optimizer] = line_of_program(frames_above(__file__))
        return result

    def _draws(self, plain: Any, reading: Any) -> Any:
        batch = plain(reading)
        known = self._passes.setdefault(reading, _pass_of(reading))
        if len(known.order) < MOST_BATCHES:
            known.order.append(tuple(batch) if isinstance(batch, list | tuple) else (batch,))
        return batch

    def _gives(self, plain: Any, reading: Any) -> Any:
        batch = plain(reading)
        if (known := self._passes.get(reading)) is not None:
            known.given, known.fresh, self._last = known.given + 1, True, known
        return batch

    @torch.no_grad()
    def _ends(self, optimizer: Any, *_: Any) -> None:
        """A step of any optimizer ends."""
        self._steps += 1
        weights, state = _held(optimizer)
        reads = self._reads
        read = (None, 0, 0) if reads is None else (reads, reads.given, reads.trained)
        self._stands.append(_Stand(self._steps, type(optimizer), weights, state, *read))

    @torch.no_grad()
    def _begins(self, optimizer: Any, *_: Any) -> None:
        """A step of any optimizer begins."""
        line = self._loaded.pop(optimizer, None)
        if line is None:
            return
        weights, state = _held(optimizer)
        stands = [(one, _others(one, weights, state)) for one in self._stands if one.kind is type(optimizer)]
        known = [(one, others) for one, others in stands if others is not None]
        if not known or not any(state):
            return
        stand, others = known[-1]
        if all(each for _, each in known):
            kind, key = type(optimizer).__name__, others[0]
            told = OtherMoments(optimizer=kind, line=line, step=stand.step, weights=len(others), key=key)
            self.moments[told] = None
        if self._reads is not None and (left := _other_samples(stand, self._reads, line)) is not None:
            self.samples[left] = None


def _pass_of(reading: Any) -> _Pass:
    data, sampler = reading._dataset, reading._index_sampler
    return _Pass((type(data), _count(data)), _count(sampler), type(sampler).__name__.startswith("Skip"))


def _count(one: Any) -> int:
    try:
        return len(one)
    except Exception:  # of a stream, or what a program has written
        return 0


def _held(optimizer: Any) -> tuple[list[Tensor], list[_State]]:
    """Some numbers of some of its weights, and of what it has of each."""
    params = [one for group in optimizer.param_groups for one in group["params"]][:WEIGHTS]
    kept = [optimizer.state.get(one, {}) for one in params]
    tensors = ({key: one for key, one in each.items() if isinstance(one, Tensor)} for each in kept)
    return [*map(_some, params)], [{key: _some(one) for key, one in each.items()} for each in tensors]


def _some(tensor: Tensor) -> Tensor:
    return local(tensor).detach().reshape(-1)[:NUMBERS].clone()


def _others(stand: _Stand, weights: Sequence[Tensor], states: Sequence[_State]) -> list[str] | None:
    """What was more than zeros beside each weight, and is something else now; None: these are other weights.

    Whichever place they have in the optimizer.
    """
    found = []
    for weight, state in zip(weights, states, strict=True):
        beside = [kept for one, kept in zip(stand.weights, stand.state, strict=True) if _same(one, weight)]
        if not beside:
            return None
        others = [[key for key, one in kept.items() if key in state and _is_other(one, state[key])] for kept in beside]
        found += min(others, key=len)[:1]
    return found if len(weights) == len(stand.weights) else None


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.device == other.device and torch.equal(one, other.to(one.dtype))


def _is_other(before: Tensor, now: Tensor) -> bool:
    before, now = before.double(), now.to(before.device).double()
    if before.shape != now.shape or not bool(before.isfinite().all()):
        return False
    return float((now - before).norm()) > ROUNDED * float(before.norm()) > 0


def _other_samples(stand: _Stand, now: _Pass, line: str) -> OtherSamples | None:
    """What a pass that goes on within another one, by passing over batches, passes over in the place of its samples."""
    before = stand.reads
    if before is None or before is now or before.kind != now.kind or not 0 < stand.trained < before.batches:
        return None
    ahead = stand.given - stand.trained  # of a loader that reads one batch ahead
    trained, passed = before.order[: stand.trained], now.order[: max(now.given - now.trained - ahead, 0)]
    first = now.order[0] if now.skips or now.order[0] in trained[1:] else ()
    again = not passed and not {*first}.isdisjoint(one for batch in trained for one in batch)
    if not again and (not passed or _samples(passed) == _samples(trained)):
        return None
    shared = min(len(trained), len(passed))
    others = _samples(trained[:shared]) != _samples(passed[:shared])
    return OtherSamples(line=line, step=stand.step, trained=stand.trained, passed=len(passed), others=others)


def _samples(batches: Sequence[_Batch]) -> Counter[Any]:
    return Counter(one for batch in batches for one in batch)
