"""Tensors of no module that an optimizer steps beside parameters of a model: no wrapper averages their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import define, field, frozen
from torch import Tensor, nn

from prepkit.objects.alive import alive
from prepkit.objects.local_part import local
from prepkit.observe.fingerprints.tensor import fingerprint
from prepkit.ranks.world import world


@frozen
class Strays:
    """Those of one optimizer that is stepping."""

    shapes: tuple[tuple[int, ...], ...]
    gradients: tuple[float, ...]
    """A digest of each gradient."""
    rest: float
    """A digest of all other gradients that it steps."""


def strays_of(stepped: Iterable[Tensor]) -> Strays | None:
    """Those among what an optimizer steps; None: there are none, or nothing else is beside them."""
    held = [one for one in stepped if one.grad is not None]
    living = {id(param) for module in alive(nn.Module) for param in module._parameters.values()}
    own = [one for one in held if id(one) not in living and type(one) in (Tensor, nn.Parameter)]
    if not own or len(own) == len(held):
        return None
    mine = {id(one) for one in own}
    rest = sum(_digest(one) for one in held if id(one) not in mine)
    return Strays(tuple(tuple(one.shape) for one in own), tuple(map(_digest, own)), rest)


@define(eq=False)
class HeardStrays:
    """Those of every optimizer, at its first step."""

    held: list[Strays] = field(factory=list)
    _stepped: list[Any] = field(factory=list)

    def hears(self, optimizer: Any, params: Iterable[Tensor]) -> None:
        """An optimizer has stepped these."""
        if world().carries_data and not any(optimizer is one for one in self._stepped):
            self._stepped.append(optimizer)
            self.held += [one] if (one := strays_of(params)) is not None else []


def strays_apart(held: Sequence[Strays]) -> tuple[tuple[int, ...], ...]:
    """Shapes of those that ranks step by unlike gradients, where they step all else alike. Collective."""
    every = world().gather(list(held))
    found: list[tuple[int, ...]] = []
    for at, one in enumerate(held):
        told = [others[at] for others in every if at < len(others) and others[at].shapes == one.shapes]
        if len(told) == len(every) and len({other.rest for other in told}) == 1:
            found += [shape for n, shape in enumerate(one.shapes) if len({other.gradients[n] for other in told}) > 1]
    return tuple(found)


def _digest(param: Tensor) -> float:
    assert param.grad is not None, "others are not stepped"
    return float(fingerprint(local(param.grad.detach()).to_dense()))
