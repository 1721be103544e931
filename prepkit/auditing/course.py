"""Where a run stands at one look, as ``CourseFacts``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import chain
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler

from prepkit.facts.window import CourseFacts
from prepkit.objects.local_part import local
from prepkit.objects.names import Site, first_names, parameters_at
from prepkit.observe.fingerprints.parts import Part
from prepkit.observe.optimizer import horizon
from prepkit.observe.prepared.averaging import unaveraged
from prepkit.observe.prepared.modules import rate
from prepkit.observe.prepared.optimizers import counted, grouped, inner
from prepkit.saving.saved_facts import CYCLED, cycles_momentum

Pair = tuple[str, str]


def course(places: list[Site], optimizers: Iterable[Any], scheduler: Any) -> CourseFacts:
    """Return what can be told without reading a weight."""
    known = [inner(one) for one in optimizers]
    driver = None if scheduler is None else inner(scheduler)
    ticked = getattr(driver, "last_epoch", None)
    moved, first = CYCLED if cycles_momentum(driver) else (), first_names(parameters_at(places))
    return CourseFacts(
        resting=tuple(site.path for site in places if site.first and _rests(site.module)),
        unaveraged=tuple(site.path for site in places for one in site.stack if _unsynced(one)) + unaveraged(places),
        options=tuple(pair for at, one in enumerate(known) for pair in _options(at, len(known), one, moved)),
        groups=grouped(known, first),
        counts=tuple(map(counted, known)),
        rate=_rate([group.get("lr") for one in known for group in one.param_groups]),
        ticked=ticked if isinstance(ticked, int) else None,
        horizon=None if driver is None else horizon(driver),
    )


def _rests(module: nn.Module) -> bool:
    batch = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats
    return not module.training and (batch or rate(module) > 0)


def _unsynced(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel) and not module.require_backward_grad_sync


def _options(at: int, many: int, optimizer: Any, moved: Sequence[str]) -> Iterator[Pair]:
    """Numbers and flags of each group, but for what schedulers set; ``moved``: what the one that is given sets too."""
    for group, options in enumerate(optimizer.param_groups):
        where = f"{'optimizer' if many == 1 else f'optimizer[{at}]'}.param_groups[{group}]"
        cycled = ("momentum", "betas") if "base_momentum" in options else ()  # by OneCycleLR or CyclicLR, if not often
        for name, value in options.items():
            if name not in (*_BY_SCHEDULERS, *moved, *cycled) and _plain(value):
                yield f"{where}.{name}", str(value)


_BY_SCHEDULERS = ("params", "lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "param_names")


def _plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) or (isinstance(value, tuple | list) and all(map(_plain, value)))


def _rate(rates: list[Any]) -> float | None:
    """The greatest of them; None where one is no number here."""
    here = [one.device.type == "cpu" if isinstance(one, Tensor) else isinstance(one, int | float) for one in rates]
    return max(map(float, rates)) if rates and all(here) else None


def not_finite(held: Mapping[str, Part], names: Iterable[str]) -> tuple[str, ...]:
    """Those of them that have NaN or infinite elements here. Reads each once, and waits for each device once."""
    chosen = [name for name in names if name in held and held[name].values.is_floating_point()]
    sums = [_largest(held[name].values.detach()) if held[name].values.numel() else None for name in chosen]
    return tuple(name for name, one in zip(chosen, _numbers(sums), strict=True) if not one < float("inf"))


def at_zero(optimizers: Iterable[Any], first: Mapping[int, str], names: set[str]) -> dict[str, bool]:
    """Return whether the moments of a parameter are zero, of those of the named ones that have moments."""
    chosen, sums = [], []
    for optimizer in map(inner, optimizers):
        for param, state in getattr(optimizer, "state", {}).items():
            name = first.get(id(param), "")
            if name not in names or not isinstance(state, dict):
                continue
            moments = [local(one) for one in state.values() if isinstance(one, Tensor) and one.shape == param.shape]
            parts = [_largest(one.detach()) for one in moments if one.numel() and one.is_floating_point()]
            if param.ndim and parts:
                chosen.append(name)
                sums.append(torch.stack(parts).amax())
    return {name: one == 0.0 for name, one in zip(chosen, _numbers(sums), strict=True)}


def _largest(values: Tensor) -> Tensor:
    """The largest magnitude, without a copy but of elements of 8 bits; NaN where one is."""
    low, high = (values.float() if values.element_size() == 1 else values).aminmax()
    return torch.maximum(high, -low).float()


def _numbers(found: list[Any]) -> list[float]:
    """Their values; each device is waited for once."""
    told = [0.0] * len(found)
    places: dict[torch.device, list[int]] = {}
    for at, one in enumerate(found):
        if one is not None:
            places.setdefault(one.device, []).append(at)
    for each in places.values():
        values = torch.stack([found[at].float() for at in each]).tolist()
        for at, value in zip(each, values, strict=True):
            told[at] = value
    return told


def highest_in_buffers(places: Iterable[Site], most: float) -> dict[str, float]:
    """The greatest element of each buffer of up to so many; NaN where one is. Masks hold minus infinity on purpose."""
    named = {
        f"{site.path}.{name}".lstrip("."): local(one)
        for site in places
        for name, one in (site.module._buffers.items() if site.first else ())
        if one is not None
        and not is_lazy(one)
        and one.is_floating_point()
        and not one.is_meta
        and one.numel() <= most
        and not is_lazy(one)
        and one.is_floating_point()
        and 0 < one.numel() <= most
        and not one.is_meta
    }
    plain = {name: one.detach() for name, one in named.items() if type(one) is Tensor and one.numel()}
    return dict(zip(plain, _numbers([one.float().amax() for one in plain.values()]), strict=True))


def gradients_there(optimizers: Iterable[Any]) -> bool:
    """Return whether some gradient that is about to be stepped is other than zero."""
    slots = (param for one in map(inner, optimizers) for group in one.param_groups for param in group["params"])
    return any(param.grad is not None and bool(local(param.grad).any()) for param in slots)


STILL = 32
"""Steps after which weights are compared: fewer may lie in a warm-up."""


@define(eq=False)
class Moves:
    """Whether weights move: one is compared at each look, and all of them where that one stays as it was."""

    _one: str = ""
    _seen: int | None = None
    """What it held at the last look."""
    _all: dict[str, int] = field(factory=dict)
    """What all held after ``_at`` steps."""
    _at: int = 0

    def look(self, held: Mapping[str, Part], steps: int) -> tuple[bool | None, int]:
        """Whether the one has moved since the last look; None: it is the first. For how many steps none has; 0: some.

        Where others move the least of them is compared from then on.
        """
        if self._one not in held:
            self._one, self._seen = min(held, key=lambda name: (held[name].numel, name), default=""), None
        total = int(held[self._one].total()) if self._one else None
        before, self._seen = self._seen, total
        if before is None or total != before:
            self._all = {}
            return (None if before is None else True), 0
        if self._all and steps - self._at < STILL:
            return False, 0
        now = {name: int(part.total()) for name, part in held.items()}
        stood, self._all = self._all, now
        since, self._at = steps - self._at if stood else 0, steps
        if moved := {name: held[name] for name in now if now[name] != stood.get(name, now[name])}:
            self._one = min(moved, key=lambda name: (held[name].numel, name))
            self._seen, self._all = now[self._one], {}
        return bool(moved), 0 if moved else since


@define(eq=False)
class SampledEpochs:
    """Listens to which epochs ``DistributedSampler``s go through, from ``listen`` to ``close`` or its own end."""

    repeated: dict[str, None] = field(factory=dict)
    _epochs: weakref.WeakKeyDictionary[Any, int] = field(factory=weakref.WeakKeyDictionary)

    def listen(self) -> None:
        """Begin. What torch gives is replaced once, however many listen."""
        _LISTENING.add(self)
        if DistributedSampler.__iter__ is _PLAIN:
            DistributedSampler.__iter__ = _heard  # type: ignore[method-assign]

    def close(self) -> None:
        """End; the last to do so puts back what was there, unless somebody else has replaced it meanwhile."""
        _LISTENING.discard(self)
        if not _LISTENING and DistributedSampler.__iter__ is _heard:
            DistributedSampler.__iter__ = _PLAIN  # type: ignore[method-assign]

    def hear(self, sampler: Any, epoch: int) -> None:
        """A pass of the sampler has ended, which trains nothing where gradients are off."""
        if not torch.is_grad_enabled():
            return
        if sampler.shuffle and self._epochs.get(sampler) == epoch:
            self.repeated[f"of {len(sampler.dataset)} samples, at epoch {epoch}"] = None
        self._epochs[sampler] = epoch


_LISTENING: weakref.WeakSet[SampledEpochs] = weakref.WeakSet()
_PLAIN = DistributedSampler.__iter__


def _heard(sampler: Any) -> Iterator[Any]:
    """Return the sampler's indices, and tell who listens once they are at their end; an index costs nothing more."""
    return chain(_PLAIN(sampler), _ended(sampler, sampler.epoch))


def _ended(sampler: Any, epoch: int) -> Iterator[Any]:
    for one in tuple(_LISTENING):
        one.hear(sampler, epoch)
    yield from ()


@define(eq=False)
class Ticks:
    """Counts the steps between two ticks of a scheduler."""

    scheduler: Any
    by_batch: bool
    """Whether it is made to be ticked in each step, as ``PreparedScheduler.by_batch``."""
    since: int = 0
    """Steps since the last tick."""
    _most: int = 0
    """That lay between two of them."""
    _seen: int = 0
    """Ticks while somebody has counted."""
    stretches: int = 0
    """Between two steps, of whatever optimizers, in which it was ticked."""
    _last: int | None = field(init=False)
    _begun: int | None = field(init=False)
    """Ticks when the present stretch began."""

    def __attrs_post_init__(self) -> None:
        self._last = self._begun = getattr(self.scheduler, "last_epoch", None)

    def listen(self) -> None:
        """Begin to count stretches, while gradients are followed."""
        _TICKING.add(self)

    def close(self) -> None:
        """End."""
        _TICKING.discard(self)

    def steps(self) -> None:
        """Counts a stretch, as any optimizer steps: of two that step in turn each may have a tick behind it."""
        last = getattr(self.scheduler, "last_epoch", None)
        self.stretches += last != self._begun
        self._begun = last

    def step(self, least: int) -> bool:
        """Count a step that begins: whether ``least`` times as many have gone by as ever before.

        One tick says nothing of the next, unless each step has one; one that is made for fewer ticks than there were
        steps has none in each, and passes may grow. At its end a scheduler may rest, and where its lambdas say that its
        next rate is the one it has.
        """
        last = getattr(self.scheduler, "last_epoch", None)
        if last != self._last:
            self._most, self.since = max(self._most, self.since), 0
            self._last, self._seen = last, self._seen + 1
        self.since += 1
        known = self._seen > 1 or (self.by_batch and self.since < (horizon(self.scheduler) or self.since + 1))
        many = self.since == least * max(1, self._most) + 1
        return known and many and isinstance(last, int) and not self._rests(last)

    def _rests(self, last: int) -> bool:
        end, rates = horizon(self.scheduler), getattr(self.scheduler, "lr_lambdas", ())
        alike = [rate(last + 1) == rate(last) for rate in rates]
        return (end is not None and last >= end) or (bool(alike) and all(alike))


@define(eq=False)
class RefusedSteps:
    """Counts steps that a ``GradScaler`` has not made, as gradients were not finite. Schedulers tick behind them."""

    optimizer: Any
    made: int = 0
    """Steps that the optimizer has begun, which whoever listens counts."""
    refused: int = 0

    def listen(self) -> None:
        """Begin. What torch gives is replaced once, however many listen."""
        _COUNTING.add(self)
        if _SCALER.step is _SCALED:
            _SCALER.step = _scaled

    def close(self) -> None:
        """End, as ``SampledEpochs.close`` does."""
        _COUNTING.discard(self)
        if not _COUNTING and _SCALER.step is _scaled:
            _SCALER.step = _SCALED


_COUNTING: weakref.WeakSet[RefusedSteps] = weakref.WeakSet()
_SCALER: Any = torch.amp.GradScaler
_SCALED = _SCALER.step


def _scaled(scaler: Any, optimizer: Any, *args: Any, **given: Any) -> Any:
    """Steps through the scaler, and tells who listens where no step was made."""
    listening = [(one, one.made) for one in _COUNTING if inner(optimizer) is one.optimizer]
    returned = _SCALED(scaler, optimizer, *args, **given)
    for one, before in listening:
        one.refused += one.made == before
    return returned


SAMPLED = 3
"""Parameters of an optimizer whose gradients are followed: its smallest."""
Tell = Callable[..., None]
"""Is given the id of a rule, and fields of ``CourseFacts`` that it reads."""


@define(eq=False)
class Kept:
    """A gradient that was stepped, and whether it is there still as it was. Holds no memory of it."""

    param: Tensor
    memory: tuple[StorageWeakRef, int, int]
    """Where it lies, and how often that was written."""
    at: int
    """When it was stepped."""
    backwards: int = 0
    """That began while it was there, and added to it."""

    def untouched(self) -> bool:
        """Whether nobody has cleared, replaced or written it."""
        return memory_of(self.param) == self.memory

    def still(self) -> bool:
        """Whether it lies where it lay, whoever has written it."""
        return (now := memory_of(self.param)) is not None and now[:2] == self.memory[:2]

    def zero(self) -> bool:
        """Whether it holds zeros alone. Waits for its device."""
        with torch.no_grad():
            return self.param.grad is None or not local(self.param.grad).any().item()


@torch.no_grad()
def memory_of(param: Tensor) -> tuple[StorageWeakRef, int, int] | None:
    """Where its gradient lies, and how often that was written; None without one that lies in memory."""
    part = None if param.grad is None else local(param.grad)
    if part is None or part.layout is not torch.strided or part.device.type == "meta" or not part.numel():
        return None
    storage = StorageWeakRef(part.untyped_storage())  # type: ignore[no-untyped-call]  # torch types none of it
    return storage, int(part.storage_offset()), part._version


def stand() -> None:
    """Hears of all steps. None can be put on inside of one, while torch goes through its hooks."""
    if not _HANDLES:
        _HANDLES.extend((register_optimizer_step_pre_hook(_begins), register_optimizer_step_post_hook(_stepped)))


def lets_go() -> None:
    """Hears of none, where nobody follows any."""
    while _HANDLES and not _FOLLOWING:
        _HANDLES.pop().remove()


@define(eq=False)
class KeptGradients:
    """Follows what becomes of gradients once they were stepped: cleared, added to, or stepped by another optimizer.

    A gradient that is as it was when a backward begins was not cleared, and neither is one that is as each backward
    has left it, up to the next step. Values are read of such alone. Of optimizers that step inside another's step, as
    in a wrapper, the outer one says nothing of the inner one's.
    """

    optimizers: list[Any]
    """Those that are watched; others count that hold parameters of theirs."""
    due: Callable[[], bool]
    """Whether what is stepped now is to be followed up to the next step."""
    tell: Tell
    _kept: weakref.WeakKeyDictionary[Any, list[Kept]] = field(factory=weakref.WeakKeyDictionary)
    _samples: weakref.WeakKeyDictionary[Any, list[Tensor]] = field(factory=weakref.WeakKeyDictionary)
    _begun: weakref.WeakKeyDictionary[Any, int] = field(factory=weakref.WeakKeyDictionary)
    _clock: int = 0

    def listen(self) -> None:
        """Begin. What torch gives is replaced once, however many listen."""
        _FOLLOWING.add(self)
        if not _is_followed(torch.autograd.backward):
            _BACKWARD[:] = [torch.autograd.backward]
            torch.autograd.backward = _followed
        stand()

    def close(self) -> None:
        """End, as ``SampledEpochs.close`` does."""
        _FOLLOWING.discard(self)
        if not _FOLLOWING and torch.autograd.backward is _followed:
            torch.autograd.backward = _BACKWARD[0]
        lets_go()

    def backward_begins(self) -> None:
        """Forget what was cleared or written since it was stepped, or since the last backward."""
        for optimizer, kept in [*self._kept.items()]:
            self._kept[optimizer] = [one for one in kept if one.untouched() and (one.backwards or not one.zero())]

    def backward_ends(self) -> None:
        """Take down where it has left what it has added to."""
        for kept in self._kept.values():
            for one in kept:
                one.memory, one.backwards = memory_of(one.param) or one.memory, one.backwards + 1

    def step_begins(self, optimizer: Any) -> None:
        """Of any optimizer of torch's, be it watched or not."""
        self._clock += 1
        self._begun[optimizer] = self._clock

    def step_ends(self, optimizer: Any) -> None:
        """Tell what it has stepped once more, and take down what it has stepped."""
        due, self._clock = self.due(), self._clock + 1
        if not due and not any(self._kept.values()):
            return
        params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
        if left := [one.param for one in self._kept.pop(optimizer, ()) if one.backwards and one.still()]:
            self.tell("run.left-over", left=left)
        for other, kept in self._kept.items():
            twice = [one for one in kept if id(one.param) in params and self._again(one, optimizer)]
            if twice:
                pair = type(other).__name__, type(optimizer).__name__
                self.tell("run.stepped-twice", twice=[one.param for one in twice], steppers=pair)
        if due and self._counts(optimizer, params):
            self._samples[optimizer] = nsmallest(SAMPLED, params.values(), key=torch.numel)
            followed = {id(one): one for each in self._samples.values() for one in each if id(one) in params}
            places = ((one, memory_of(one)) for one in followed.values())
            self._kept[optimizer] = [Kept(one, memory, self._clock) for one, memory in places if memory is not None]

    def _again(self, one: Kept, optimizer: Any) -> bool:
        """Whether this optimizer has stepped a gradient that another one had stepped, before this one began."""
        since = self._begun.get(optimizer, 0)
        return one.at < since and not one.backwards and one.untouched() and not one.zero()

    def _counts(self, optimizer: Any, params: Mapping[int, Tensor]) -> bool:
        """Whether it is watched, or steps what one of those steps."""
        if any(one is optimizer for one in self.optimizers):
            return True
        groups = (group for one in self.optimizers for group in one.param_groups)
        return any(id(param) in params for group in groups for param in group["params"])


_TICKING: weakref.WeakSet[Ticks] = weakref.WeakSet()
_FOLLOWING: weakref.WeakSet[KeptGradients] = weakref.WeakSet()
_BACKWARD: list[Callable[..., Any]] = []
"""What stood in the place of ``_followed``: torch's own, or that of an audit that listens too."""
_HANDLES: list[Any] = []


def _is_followed(backward: Any) -> bool:
    """Return whether it is ``_followed``, or stands around it."""
    while backward is not None and backward is not _followed:
        backward = getattr(backward, "__wrapped__", None)
    return backward is _followed


def _begins(optimizer: Any, *_: Any) -> None:
    for ticks in tuple(_TICKING):
        ticks.steps()
    for one in tuple(_FOLLOWING):
        one.step_begins(optimizer)


def _stepped(optimizer: Any, *_: Any) -> None:
    for one in tuple(_FOLLOWING):
        one.step_ends(optimizer)


def _followed(*args: Any, **given: Any) -> Any:
    """Go backward, and tell who listens; one inside of another, as of a checkpoint, is a part of that."""
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
        return _BACKWARD[0](*args, **given)
    for one in tuple(_FOLLOWING):
        one.backward_begins()
    returned = _BACKWARD[0](*args, **given)
    for one in tuple(_FOLLOWING):
        one.backward_ends()
    return returned
