"""Weights that lie over each other, and averages of weights that follow them at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from attrs import define, field
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from prepkit.auditing.averages import InPlace, StayingIn, StillNorms
from prepkit.facts.copies import AverageFacts
from prepkit.facts.values import Following
from prepkit.objects.alive import alive
from prepkit.objects.names import named_parameters

MOST_ASKED = 64
"""Parameters of an optimizer among which one is looked for that shows what an average does."""
MOST_OPTIMIZERS = 4
MOST_LOOKS = 3
"""First steps at which a copy of it is looked for."""
MOST_COPIES = 4
SAMPLE = 1024
"""Numbers of a weight that are compared."""
LEAST = 8
STEPS = 4
"""In so many steps after each other it has followed."""
OFTEN = 2
"""In so many it has been moved several times, by which it is meant to be."""
FOLLOWS = (0.8, 0.99995)
"""The part of its distance that it goes; above it is a copy, which is never quite exact."""
STRAIGHT = 0.02
"""Of the distance an average may stand beside the way to what it follows."""
ALIKE = (0.02, 3e-5)
"""By so much of what is left, and so much at all, the parts may differ; of a decay that is warmed up they grow."""
ROUNDED = 1e-6
"""By such a part of itself a copy is off that was averaged with what it is a copy of."""
FAR = 1e3
"""Roundings that a distance has to be, to be measured."""


@define(eq=False)
class Copy:
    """A copy of a weight, as it was before a step."""

    tensor: weakref.ref[Tensor]
    shape: torch.Size
    before: Tensor
    parts: list[float] = field(factory=list)
    """Of its distance to the weight it has gone, step by step."""
    seen: Tensor | None = None
    """As it was at the last backward."""
    moves: int = 0
    """Backwards since the last step by which it had come nearer to the weight."""
    often: int = 0
    """Steps in a row before which these were several."""


@define(eq=False)
class Followed:
    """A weight of an optimizer, and the copies of it."""

    param: weakref.ref[Tensor]
    before: Tensor
    looks: int = 0
    copies: list[Copy] = field(factory=list)


@define(eq=False)
class Copies:
    """Looks inside ``on()`` at copies of weights before each step."""

    mixed: InPlace = field(factory=InPlace)
    norms: StillNorms = field(factory=StillNorms)
    stays: StayingIn = field(factory=StayingIn)
    _followed: dict[int, Followed | None] = field(factory=dict)
    """By optimizer; None: nothing of it shows what an average does."""
    _told: dict[int, float] = field(factory=dict)
    """By weight the part that a copy of it goes in each step."""
    _often: dict[int, int] = field(factory=dict)
    """By weight how often a copy of it goes nearer in each step."""
    _names: dict[int, str] = field(factory=dict)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, it looks."""
        handle = register_optimizer_step_pre_hook(self._looks)
        try:
            with self.mixed.on(), self.norms.on(), self.stays.on():
                yield
        finally:
            handle.remove()
            self._followed.clear()

    def told(self) -> dict[str, Any]:
        """What was found so far, as fields of ``WindowFacts``."""
        found = (Following(name=self._names.get(key, ""), part=part) for key, part in self._told.items())
        kept = AverageFacts(
            itself=self.mixed.itself(),
            still=self.norms.told(),
            rounded=self.mixed.rounded(),
            stays=self.stays.told(),
            often=tuple((self._names.get(key, ""), times) for key, times in self._often.items()),
        )
        return {"following": tuple(found), "averages": kept}

    @torch.no_grad()
    def goes_backward(self) -> None:
        """Hears of a backward, by which an average may have been moved since the last one."""
        followed = () if torch.compiler.is_compiling() else self._followed.values()
        known = ((one.param(), copy, copy.tensor()) for one in followed if one is not None for copy in one.copies)
        for param, copy, tensor in known:
            if param is not None and tensor is not None:
                here, to = _sample(tensor), _sample(param)
                nearer = copy.seen is not None and float((here - to).norm()) < float((copy.seen - to).norm())
                copy.moves, copy.seen = copy.moves + nearer, here

    def enters(self, module: Any, *given: Any) -> None:
        """A module is called from outside of any other."""
        self.norms.enters(module, *given)
        self.stays.enters(module, trains=module.training and torch.is_grad_enabled())

    def overlapping(self, alive: Sequence[Any], model: Any) -> tuple[tuple[str, str], ...]:
        """Pairs of names of two trained parameters that are one piece of memory, each of which is stepped."""
        named = {} if model is None else named_parameters(model)
        self._names |= {id(param): name for name, param in named.items()}
        optimizers = [one for one in alive if issubclass(type(one), torch.optim.Optimizer)]
        groups = [group for one in optimizers for group in one.param_groups if not _sums(one, group)]
        held = {id(param) for group in groups for param in group["params"]}
        places = [(place, name) for name, param in named.items() if id(param) in held and (place := _place(param))]
        places.sort()
        return tuple(
            (first, second)
            for ((memory, _, end), first), ((other, begin, _), second) in pairwise(places)
            if memory == other and begin < end
        )

    def _looks(self, optimizer: Any, *_: Any) -> None:
        if torch.compiler.is_compiling() or torch._C._current_graph_task_id() != -1:
            return
        key = id(optimizer)
        if key not in self._followed and len(self._followed) < MOST_OPTIMIZERS:
            self._followed[key] = _telling(optimizer)
        one = self._followed.get(key)
        if one is None or (param := one.param()) is None:
            return
        now = _sample(param)
        for copy in one.copies:
            _follows(copy, now, one.before)
            if _is_steady(copy.parts[-STEPS:]):
                self._told[id(param)] = copy.parts[-1]
            copy.often = copy.often + 1 if copy.moves > 1 else 0
            if copy.often >= OFTEN:
                self._often[id(param)] = copy.moves
            copy.moves = 0
        if not one.copies and one.looks < MOST_LOOKS:
            one.copies, one.looks = _copies(param, now), one.looks + 1
        one.before = now


def _sums(optimizer: Any, group: dict[str, Any]) -> bool:
    """Return whether two that step one memory do what one does with the sum of both gradients."""
    return type(optimizer) is torch.optim.SGD and not group["weight_decay"]


def _place(param: Any) -> tuple[int, int, int] | None:
    """The memory of a parameter that has a gradient, with its first and last byte in it."""
    local = getattr(param, "_local_tensor", param)
    if not param.requires_grad or param.grad is None or not local.numel() or local.is_meta:
        return None
    try:
        memory = local.untyped_storage().data_ptr()
        dense = torch.ops.aten.is_non_overlapping_and_dense(local)
        begin = local.storage_offset() * local.element_size()
    except (RuntimeError, NotImplementedError):  # as of subclasses that have no memory of their own
        return None
    return (memory, begin, begin + local.numel() * local.element_size()) if dense and memory else None


def _telling(optimizer: Any) -> Followed | None:
    """A weight that no other one equals by chance."""
    params = [param for group in optimizer.param_groups for param in group["params"]][:MOST_ASKED]
    for param in params:
        plain = issubclass(type(param), Tensor) and not hasattr(param, "_local_tensor") and not param.is_meta
        wide = plain and param.dtype in (torch.float32, torch.float64) and param.numel() >= LEAST
        if wide and param.is_contiguous() and param.grad is not None:
            now = _sample(param)
            if bool((now != now[0]).any()) and bool(now.isfinite().all()):
                return Followed(weakref.ref(param), now)
    return None


def _sample(tensor: Tensor) -> Tensor:
    """Its first elements; NaN where its memory was freed, as FSDP1 frees what it has gathered."""
    if tensor.untyped_storage().nbytes() < (tensor.storage_offset() + tensor.numel()) * tensor.element_size():
        return torch.full((min(SAMPLE, tensor.numel()),), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return tensor.detach().view(-1)[:SAMPLE].clone()


def _alive() -> list[Tensor]:
    """Every tensor that there is, but for weights that have no shape yet."""
    return [one for one in alive(Tensor) if not is_lazy(one)]


def _copies(param: Tensor, now: Tensor) -> list[Copy]:
    """The tensors that hold the same values in other memory, and do not train."""
    found: list[Copy] = []
    kind = (param.shape, param.dtype, param.device)
    for one in _alive():
        if one is param:
            continue
        like = not one.is_meta and (one.shape, one.dtype, one.device) == kind and one.is_contiguous()
        plain = like and type(one.data) is Tensor  # not what a compiler traces with
        rests = plain and one.grad_fn is None and (not one.requires_grad or one.grad is None)
        if rests and one.data_ptr() != param.data_ptr() and torch.allclose(_sample(one), now, rtol=ROUNDED, atol=0.0):
            found.append(Copy(weakref.ref(one), one.shape, now))
    return found[:MOST_COPIES]


def _follows(copy: Copy, now: Tensor, was: Tensor) -> None:
    """Adds the part of its way that a copy has gone since the last step; 0: it has gone elsewhere, or nowhere."""
    tensor = copy.tensor()
    if tensor is None:
        tensor = _successor(copy, now)
        if tensor is None:
            copy.parts = []
            return
        copy.tensor = weakref.ref(tensor)
    here = _sample(tensor)
    copy.parts.append(_part(copy.before, here, now) if bool((now != was).any()) else 0.0)
    copy.before = here


def _successor(copy: Copy, now: Tensor) -> Tensor | None:
    """What stands for a copy that is made anew in each step: it lies on its way."""
    for one in _alive():
        plain = one.shape == copy.shape and not one.requires_grad and type(one.data) is Tensor
        if plain and one.is_contiguous():
            here = _sample(one) if (one.dtype, one.device) == (now.dtype, now.device) and not one.is_meta else now
            if FOLLOWS[0] < _part(copy.before, here, now) < FOLLOWS[1]:
                return one
    return None


def _part(before: Tensor, here: Tensor, now: Tensor) -> float:
    """The part of its way from there to the weight; 0: it has gone elsewhere, or all of it, or nothing can be seen."""
    if torch.equal(here, now):
        return 0.0
    way, gone = (now - before).double(), (here - before).double()
    length, rounding = float(way.norm()), torch.finfo(now.dtype).eps * float(now.double().norm())
    if not length > FAR * rounding:
        return 0.0
    along = float(gone @ way) / length**2
    return along if float((gone - along * way).norm()) <= STRAIGHT * length else 0.0


def _is_steady(parts: list[float]) -> bool:
    """Return whether it has gone the same large part in each of these steps."""
    if len(parts) < STEPS or not all(FOLLOWS[0] < one < FOLLOWS[1] for one in parts):
        return False
    left = [1 - one for one in parts]
    return max(left) - min(left) <= max(ALIKE[0] * max(left), ALIKE[1])
