"""Averages of weights that stand still: the buffers of their norms, and what rounding loses of each update."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prepkit.facts.copies import RoundedAway, StandsStill
from prepkit.objects.names import unwrap_root
from prepkit.observe.prepared.around import frames_above, line_of_program
from prepkit.observe.prepared.instead import around_calls

SAMPLE = 64
"""Numbers of a tensor that are compared."""
MOST_NORMS = 512
MOST_LOOKS = 64
"""Calls of averages that are looked at."""
MOST_TRAINED = 8
SECOND = 2
"""The step before which the norms of all models are looked at: few averages are made later."""
APART = 0.1
"""Of its deviation a feature's mean has to differ; nearer ones give what the right ones give."""
RUNNING = "running_"
"""Begins the names of buffers that follow the batches, of torch's norms and of others."""
LOW = (torch.bfloat16, torch.float16)
UNITS = 8
"""Units of rounding by which an average has to differ from the weight that it follows."""
UPDATES = 3
"""In so many updates after each other a number has stood still."""
LEAST = 4
"""So many numbers of a sample, and this part of those that differ, say that it is no chance."""
PART = 0.1
MOST_FOLLOWED = 32
NEAR = 1e-6
"""So near to 1 is the sum of both factors of an average."""


@frozen(eq=False)
class _Stand:
    """A norm as it was: its running buffers, and what else of it an average moves."""

    buffers: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]


@define(eq=False)
class StillNorms:
    """Listens inside ``on()``; is told of calls of modules."""

    _steps: int = 0
    _before: weakref.WeakKeyDictionary[nn.Module, _Stand] = field(factory=weakref.WeakKeyDictionary)
    _trained: weakref.WeakKeyDictionary[nn.Module, int] = field(factory=weakref.WeakKeyDictionary)
    """Models that were called to train, and the step before which they were last."""
    _asked: weakref.WeakKeyDictionary[nn.Module, int] = field(factory=weakref.WeakKeyDictionary)
    """Models that were called to rest, and the step before which they were looked at last."""
    _looks: int = 0
    _told: dict[StandsStill, None] = field(factory=dict)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        handle = register_optimizer_step_pre_hook(self._begins)
        try:
            yield
        finally:
            handle.remove()
            self._before.clear()

    def told(self) -> tuple[StandsStill, ...]:
        """The averages that were heard so far."""
        return tuple(self._told)

    def enters(self, module: nn.Module, *_: Any) -> None:
        """A module is called from outside of any other."""
        if torch._C._functorch.maybe_current_level() is not None:
            return
        if module.training and torch.is_grad_enabled() and len(self._trained) < MOST_TRAINED:
            self._trained[unwrap_root(module)[-1]] = self._steps
        elif not module.training and self._steps >= SECOND and self._looks < MOST_LOOKS:
            self._rests(module)

    @torch.no_grad()
    def _begins(self, *_: Any) -> None:
        self._steps += 1
        if self._steps == SECOND and not torch.compiler.is_compiling():
            modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
            for one in [one for one in modules if _has_norm(one)][:MOST_NORMS]:
                self._before[one] = _stand(one)

    @torch.no_grad()
    def _rests(self, module: nn.Module) -> None:
        """A model is called in evaluation mode."""
        if self._asked.get(module) == self._steps or any(one is module for one in self._trained):
            return
        self._asked[module] = self._steps
        norms = _norms(module)
        trained = next((one for one in self._trained if norms and _are_alike(one, module)), None)
        if trained is None or any(one.training for one in norms):
            return
        self._looks += 1
        pairs = [*zip(norms, _norms(trained), strict=True)]
        if any(one is other for one, other in pairs):
            return
        if any(one not in self._before for one in norms):
            self._before.update({one: _stand(one) for pair in pairs for one in pair})
        elif self._are_left(pairs):
            line, name = line_of_program(frames_above(__file__)), type(unwrap_root(module)[-1]).__name__
            self._told[StandsStill(line=line, model=name, norms=len(norms))] = None

    def _are_left(self, pairs: list[tuple[nn.Module, nn.Module]]) -> bool:
        """Whether the weights of the first ones follow those of the others, and their buffers do not, which moved."""
        stands = [(self._before.get(one), self._before.get(other), _stand(one), _stand(other)) for one, other in pairs]
        follow, moved = False, False
        for was, model_was, now, model_now in stands:
            if was is None or model_was is None or not _same(was.buffers, now.buffers):
                return False
            follow = follow or _follows(was.weights, now.weights, model_now.weights)
            moved = moved or (not _same(model_was.buffers, model_now.buffers) and _are_apart(now, model_now))
        return follow and moved


def _has_norm(module: nn.Module) -> bool:
    return any(name.startswith(RUNNING) and one is not None for name, one in module._buffers.items())


def _norms(module: nn.Module) -> list[nn.Module]:
    return [one for one in module.modules() if _has_norm(one)]


def _are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether both have the same parameters by their shapes, and the same norms."""
    shapes = [[tuple(param.shape) for param in each.parameters()] for each in (one, other)]
    return shapes[0] == shapes[1] and len(_norms(one)) == len(_norms(other))


def _stand(norm: nn.Module) -> _Stand:
    buffers = (one for name, one in norm._buffers.items() if name.startswith(RUNNING))
    weights = norm._parameters.values()
    return _Stand(tuple(map(_kept, filter(_is_plain, buffers))), tuple(map(_kept, filter(_is_plain, weights))))


def _is_plain(one: Any) -> bool:
    return type(one) in (Tensor, nn.Parameter) and not one.is_meta and one.is_floating_point() and one.numel() > 0


def _kept(one: Any) -> Tensor:
    """Some of its numbers."""
    kept: Tensor = one.detach().reshape(-1)[:SAMPLE].clone()
    return kept


def _same(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


def _follows(was: tuple[Tensor, ...], now: tuple[Tensor, ...], model: tuple[Tensor, ...]) -> bool:
    """Whether these weights have gone towards those of the model."""
    ways = [(after - before, to - before) for before, after, to in zip(was, now, model, strict=False)]
    return sum(float((gone.double() * way.to(gone).double()).sum()) for gone, way in ways) > 0


def _are_apart(one: _Stand, other: _Stand) -> bool:
    """Whether the running means of two norms, or what else they hold, differ by some part of a deviation."""
    for mine, theirs in zip(one.buffers, other.buffers, strict=False):
        scale = other.buffers[-1].to(theirs).abs().sqrt() if len(other.buffers) > 1 else theirs.abs()
        if bool(((mine.to(theirs) - theirs).abs() > APART * scale).any()):
            return True
    return False


@define(eq=False)
class _Followed:
    """A tensor that is averaged in a dtype of few digits."""

    runs: Tensor
    """Per number: updates after each other in which it has stood still, apart from what it follows."""
    known: bool | None = None
    """Whether it follows a weight that an optimizer steps; None: nobody has asked."""


@define(eq=False)
class Rounding:
    """Listens inside ``on()`` to averages that are made in place in a dtype of few digits, which rounds to nearest."""

    _followed: dict[tuple[int, tuple[int, ...]], _Followed] = field(factory=dict)
    """By memory and shape."""
    _scaled: tuple[int, float, Tensor | None] = (0, 0.0, None)
    """What was multiplied last, by what, and some numbers of it before."""
    _told: dict[str, RoundedAway] = field(factory=dict)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(around_calls(Tensor, "lerp_", self._lerps))
            stack.enter_context(around_calls(torch, "_foreach_lerp_", self._lerps_each))
            stack.enter_context(around_calls(Tensor, "mul_", self._scales))
            stack.enter_context(around_calls(Tensor, "add_", self._adds))
            yield

    def told(self) -> tuple[RoundedAway, ...]:
        """The averages that were heard so far."""
        return tuple(self._told.values())

    def _lerps(self, plain: Any, one: Any, *given: Any, **named: Any) -> Any:
        before = _low(one)
        result = plain(one, *given, **named)
        if before is not None:
            end, weight = given[0] if given else named.get("end"), given[1] if len(given) > 1 else named.get("weight")
            self._hears(one, before, end, weight)
        return result

    def _lerps_each(self, plain: Any, *given: Any, **named: Any) -> Any:
        first = given[0][:LEAST] if given and isinstance(given[0], list | tuple) else ()
        before = [_low(one) for one in first]
        result = plain(*given, **named)
        if len(given) > 2:
            for one, was, end in zip(first, before, given[1], strict=False):
                if was is not None:
                    self._hears(one, was, end, given[2])
        return result

    def _scales(self, plain: Any, one: Any, *given: Any, **named: Any) -> Any:
        factor, before = given[0] if given else None, _low(one)
        self._scaled = (0, 0.0, None)
        if before is not None and type(factor) is float and _is_part(factor):
            self._scaled = (one.data_ptr(), factor, before)
        return plain(one, *given, **named)

    def _adds(self, plain: Any, one: Any, *given: Any, **named: Any) -> Any:
        (place, factor, before), self._scaled = self._scaled, (0, 0.0, None)
        result = plain(one, *given, **named)
        part = named.get("alpha", 1)
        plainly = before is not None and given and not torch.compiler.is_compiling() and _is_plain(one)
        if (
            before is not None
            and plainly
            and one.data_ptr() == place
            and _is_part(part)
            and abs(factor + part - 1) < NEAR
        ):
            self._hears(one, before, given[0], part)
        return result

    @torch.no_grad()
    def _hears(self, one: Tensor, before: Tensor, end: Any, weight: Any) -> None:
        """An average was updated."""
        line = line_of_program(frames_above(__file__))
        plain = _is_plain(end) and end.shape == one.shape and (_is_part(weight) or isinstance(weight, Tensor))
        key = (one.data_ptr(), tuple(one.shape))
        if not plain or line in self._told or (key not in self._followed and len(self._followed) >= MOST_FOLLOWED):
            return
        known = self._followed.setdefault(key, _Followed(torch.zeros_like(before, dtype=torch.int16)))
        to, unit = _kept(end).float(), torch.finfo(one.dtype).eps * before.float().abs()
        apart = (to - before.float()).abs() > UNITS * unit.clamp_min(torch.finfo(one.dtype).tiny)
        known.runs = torch.where(apart & (_kept(one) == before), known.runs + 1, 0)
        still = int((known.runs >= UPDATES).sum())
        if still < max(LEAST, PART * int(apart.sum())):
            return
        known.known = _is_stepped(end) if known.known is None else known.known
        if known.known:
            share = still / len(before)
            self._told[line] = RoundedAway(line=line, dtype=str(one.dtype).removeprefix("torch."), share=share)


def _is_part(weight: Any) -> bool:
    return type(weight) is float and 0 < weight < 1


def _low(one: Any) -> Tensor | None:
    """Some numbers of a plain tensor with few digits; None: it is another."""
    if torch.compiler.is_compiling() or type(one) not in (Tensor, nn.Parameter) or one.dtype not in LOW:
        return None
    inside = torch._C._functorch.maybe_current_level() is not None
    return None if inside or one.is_meta or not one.numel() or one.grad_fn is not None else _kept(one)


def _is_stepped(end: Tensor) -> bool:
    """Return whether these are the numbers of a weight that an optimizer steps."""
    here = _kept(end)
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    params = (param for one in optimizers for group in one.param_groups for param in group["params"])
    alike = (one for one in params if one.shape == end.shape and _is_plain(one) and one.device == end.device)
    return any(torch.equal(_kept(one).to(here.dtype), here) for one in alike)
