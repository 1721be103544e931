"""Averages of weights that stand still, are of one model alone, or stay in the model that they were put into."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from prepkit.facts.copies import RoundedAway, StandsStill, StaysIn
from prepkit.objects.alive import alive, alive_of
from prepkit.objects.names import unwrap_root
from prepkit.observe.prepared.around import Line, frames_above, is_of_library, line_of_program
from prepkit.observe.prepared.fabric import module_of
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
MOST_LINES = 64
MOST_OPTIMIZERS = 4
MOST_HOLDERS = 8
MOVES = 3
"""In so many steps after each other what holds an average has changed: it follows the model, and is no other weight."""
OPTIMIZERS = Path(torch.optim.__file__).parent


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
            self._trained[unwrap_root(module_of(module))[-1]] = self._steps
        elif not module.training and self._steps >= SECOND and self._looks < MOST_LOOKS:
            self._rests(module)

    @torch.no_grad()
    def _begins(self, *_: Any) -> None:
        self._steps += 1
        if self._steps == SECOND and not torch.compiler.is_compiling():
            for one in [one for one in alive(nn.Module) if _has_norm(one)][:MOST_NORMS]:
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
            line, name = line_of_program(frames_above(__file__)), type(unwrap_root(module_of(module))[-1]).__name__
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
    params = [[*each.parameters()] for each in (one, other)]
    if any(map(is_lazy, params[0] + params[1])):
        return False
    shapes = [[tuple(param.shape) for param in each] for each in params]
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
class InPlace:
    """Listens inside ``on()`` to the averages that a program makes in place.

    Of weights with themselves, as with a teacher that is the student, and in a dtype of few digits.
    """

    quiet: bool = False
    """Whether another look has told of those with themselves."""
    _apart: set[Line] = field(factory=set)
    """Lines that average something with something else."""
    _itself: dict[Line, set[int]] = field(factory=dict)
    """Lines that average memory with itself, and where it lies."""
    _trained: dict[Line, None] = field(factory=dict)
    """Those of them whose memory an optimizer steps."""
    _kept: tuple[int, float, Tensor | None] = (0, 0.0, None)
    """What was multiplied last, by what, and some numbers of it before, where it has few digits."""
    _followed: dict[tuple[int, tuple[int, ...]], _Followed] = field(factory=dict)
    """By memory and shape."""
    _rounded: dict[str, RoundedAway] = field(factory=dict)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        with ExitStack() as stack:
            stack.enter_context(around_calls(Tensor, "lerp_", self._lerps))
            stack.enter_context(around_calls(Tensor, "mul_", self._keeps))
            stack.enter_context(around_calls(Tensor, "add_", self._adds))
            stack.enter_context(around_calls(torch, "_foreach_lerp_", self._lerps_each))
            stack.callback(register_optimizer_step_pre_hook(self._steps).remove)
            yield

    def itself(self) -> tuple[str, ...]:
        """The lines that average weights with themselves, of those that were heard so far."""
        found = [one for one in self._trained if one not in self._apart and not self.quiet]
        return tuple(f"{Path(code.co_filename).name}:{line}" for code, line in found)

    def rounded(self) -> tuple[RoundedAway, ...]:
        """The averages of few digits that were heard so far."""
        return tuple(self._rounded.values())

    def _lerps(self, plain: Any, one: Any, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(one, *given, **named)
        end, part = (*given, *(named[name] for name in ("end", "weight") if name in named), None, None)[:2]
        self._hears([(one, end)])
        before = _low(one)
        result = plain(one, *given, **named)
        self._follows(one, before, end, part)
        return result

    def _lerps_each(self, plain: Any, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or len(given) < 2:
            return plain(*given, **named)
        pairs = [*zip(*given[:2], strict=False)]
        self._hears(pairs)
        before = [_low(one) for one, _ in pairs[:LEAST]]
        result = plain(*given, **named)
        for (one, end), was in zip(pairs, before, strict=False):
            self._follows(one, was, end, (*given, named.get("weight"))[2])
        return result

    def _keeps(self, plain: Any, one: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            factor = given[0] if given else None
            self._kept = (_place(one), factor, _low(one)) if type(factor) is float else (0, 0.0, None)
        return plain(one, *given, **named)

    def _adds(self, plain: Any, one: Any, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(one, *given, **named)
        (place, factor, before), self._kept = self._kept, (0, 0.0, None)
        part = named.get("alpha")
        averages = place and given and type(part) is float and abs(factor + part - 1) < NEAR and _place(one) == place
        if averages:
            self._hears([(one, given[0])])
        result = plain(one, *given, **named)
        if averages:
            self._follows(one, before, given[0], part)
        return result

    def _hears(self, pairs: list[tuple[Any, Any]]) -> None:
        frame = next(frames_above(__file__), None)
        if frame is None or is_of_library(frame) or torch._C._functorch.maybe_current_level() is not None:
            return
        line = (frame.f_code, frame.f_lineno)
        if line in self._apart or len(self._itself) >= MOST_LINES:
            return
        places = [_place(one) if _are_one(one, other) else 0 for one, other in pairs]
        if all(places):
            self._itself.setdefault(line, set()).update(places)
        else:
            self._apart.add(line)

    def _steps(self, optimizer: Any, *_: Any) -> None:
        waiting = [line for line in self._itself if line not in self._trained and line not in self._apart]
        if waiting and not torch.compiler.is_compiling():
            params = [param for group in optimizer.param_groups for param in group["params"]]
            held = {_place(param) for param in params if param.requires_grad and param.grad is not None} - {0}
            self._trained |= {line: None for line in waiting if self._itself[line] & held}

    @torch.no_grad()
    def _follows(self, one: Tensor, before: Tensor | None, end: Any, weight: Any) -> None:
        """An average was updated; ``before``: some numbers of it, where it has few digits."""
        if before is None:
            return
        line = line_of_program(frames_above(__file__))
        plain = _is_plain(end) and end.shape == one.shape and (_is_part(weight) or isinstance(weight, Tensor))
        key = (one.data_ptr(), tuple(one.shape))
        if not plain or line in self._rounded or (key not in self._followed and len(self._followed) >= MOST_FOLLOWED):
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
            self._rounded[line] = RoundedAway(line=line, dtype=str(one.dtype).removeprefix("torch."), share=share)


def _are_one(one: Any, other: Any) -> bool:
    """Return whether both are the same numbers of one memory."""
    place = _place(one)
    return place > 0 and place == _place(other) and (one.shape, one.stride()) == (other.shape, other.stride())


def _place(one: Any) -> int:
    """Where a plain tensor lies; 0: it has no place, or no numbers."""
    plain = type(one) in (Tensor, nn.Parameter) and one.layout == torch.strided and not one.is_meta
    return one.data_ptr() if plain and one.numel() and torch._C._functorch.maybe_current_level() is None else 0


def _is_part(weight: Any) -> bool:
    return type(weight) is float and 0 < weight < 1


def _low(one: Any) -> Tensor | None:
    """Some numbers of a plain tensor with few digits; None: it is another, or an optimizer has it for itself."""
    if torch.compiler.is_compiling() or type(one) not in (Tensor, nn.Parameter) or one.dtype not in LOW:
        return None
    home = Path(next(frames_above(__file__)).f_code.co_filename)
    moment = home.parent == OPTIMIZERS and home.name != "swa_utils.py"
    inside = torch._C._functorch.maybe_current_level() is not None
    return None if inside or moment or one.is_meta or not one.numel() or one.grad_fn is not None else _kept(one)


def _is_stepped(end: Tensor) -> bool:
    """Return whether these are the numbers of a weight that an optimizer steps."""
    here = _kept(end)
    optimizers = alive(torch.optim.Optimizer)
    params = (param for one in optimizers for group in one.param_groups for param in group["params"])
    alike = (one for one in params if one.shape == end.shape and _is_plain(one) and one.device == end.device)
    return any(torch.equal(_kept(one).to(here.dtype), here) for one in alike)


# --- averages that stay in a model ---


@frozen(eq=False)
class _Asked:
    """A model that was called to rest, with weights that its optimizer has not left."""

    told: StaysIn
    some: Tensor
    holders: list[tuple[Any, Any, Tensor]]
    """What else holds these numbers: a dict or list, the key, and some of them as they stand."""
    steps: int = 0


@define(eq=False)
class _Shown:
    """A weight that shows whether somebody writes between the steps of an optimizer."""

    param: weakref.ref[Any]
    stands: Tensor
    """Some of its numbers behind the last step."""
    inside: weakref.WeakKeyDictionary[nn.Module, bool] = field(factory=weakref.WeakKeyDictionary)
    """Modules that were called, and whether they have it."""
    asked: _Asked | None = None
    stays: _Asked | None = None
    """Behind a call that trains with the numbers that were asked."""
    written: bool = False
    """Whether the program writes it where it asks nobody, as with slow weights, or limits."""


@define(eq=False)
class StayingIn:
    """Listens inside ``on()`` for averages that are put into a model, and stay; is told of calls of modules."""

    _shown: weakref.WeakKeyDictionary[Any, _Shown] = field(factory=weakref.WeakKeyDictionary)
    """By optimizer."""
    _told: dict[StaysIn, None] = field(factory=dict)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it listens."""
        handle = register_optimizer_step_post_hook(self._stepped)
        try:
            yield
        finally:
            handle.remove()
            self._shown.clear()

    def told(self) -> tuple[StaysIn, ...]:
        """The models that were heard so far."""
        return tuple(self._told)

    @torch.no_grad()
    def enters(self, module: nn.Module, *, trains: bool) -> None:
        """A module is called from outside of any other."""
        for shown in [*self._shown.values()] if torch._C._functorch.maybe_current_level() is None else []:
            param = None if shown.written else shown.param()
            if param is not None and module not in shown.inside:
                shown.inside[module] = any(one is param for one in module.parameters())
            if param is None or not shown.inside[module]:
                continue
            now = _kept(param)
            if trains:
                self._trains(shown, now)
            elif shown.asked is None and not torch.equal(now, shown.stands):
                line, model = line_of_program(frames_above(__file__)), unwrap_root(module_of(module))[-1]
                told = StaysIn(line=line, model=type(model).__name__)
                shown.asked = _Asked(told, now, [*_holders(param, now)])

    def _trains(self, shown: _Shown, now: Tensor) -> None:
        asked, shown.asked = shown.asked, None
        if asked is not None and torch.equal(now, asked.some) and asked.holders:
            shown.stays = asked
        elif asked is None and shown.stays is None and not torch.equal(now, shown.stands):
            shown.written = True

    @torch.no_grad()
    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._told:
            return
        if (shown := self._shown.get(optimizer)) is None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            several = (one for one in params if one.grad is not None and _is_plain(one) and one.numel() >= LEAST)
            param = max(several, key=torch.Tensor.dim, default=None)
            if param is not None and len(self._shown) < MOST_OPTIMIZERS:
                self._shown[optimizer] = _Shown(weakref.ref(param), _kept(param))
        elif (param := shown.param()) is not None:
            shown.stands = _kept(param)
            shown.stays = None if shown.stays is None else self._moved(shown.stays)

    def _moved(self, asked: _Asked) -> _Asked | None:
        """The same behind one more step; None: it is told, or nothing that holds these numbers follows the model."""
        if not asked.steps:  # the average follows this step later
            return evolve(asked, steps=1)
        now = [(held, key, some) for held, key, was in asked.holders if (some := _held(held, key, was)) is not None]
        if now and asked.steps > MOVES:
            self._told[asked.told] = None
        return _Asked(asked.told, asked.some, now, asked.steps + 1) if now and asked.steps <= MOVES else None


def _held(held: Any, key: Any, was: Tensor) -> Tensor | None:
    """Some numbers of what stands there now; None: the same as before, or nothing."""
    try:
        one = held[key]
    except LookupError:
        return None
    some = _kept(one) if _is_plain(one) else was
    return None if some.shape == was.shape and torch.equal(some, was) else some


def _holders(param: Tensor, some: Tensor) -> Iterator[tuple[Any, Any, Tensor]]:
    """Yield dicts and lists that hold other tensors with these numbers."""
    tensors = alive_of((Tensor, nn.Parameter).__contains__)
    alike = (one for one in tensors if one is not param and one.shape == param.shape and one.device == param.device)
    for one in [one for one in alike if _is_plain(one) and torch.equal(_kept(one).to(some.dtype), some)][:MOST_HOLDERS]:
        for held in gc.get_referrers(one):
            pairs = held.items() if type(held) is dict else enumerate(held) if type(held) is list else ()
            yield from [(held, key, some) for key, other in [*pairs] if other is one]
