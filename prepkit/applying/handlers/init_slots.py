"""The places of modules that hold tensors, and the whole tensors that stand there while initializers run.

A module that was sharded holds something else than its author wrote: a part, an empty parameter (ZeRO-3), or under
FSDP1 without ``use_orig_params`` nothing at all. Initializers are written for the whole, under its own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from prepkit.applying.handlers.optimizer_state import shard
from prepkit.objects import fsdp1_flat, zero3
from prepkit.objects.fsdp1_flat import FlatShard
from prepkit.objects.local_part import local
from prepkit.objects.names import Site

ABSENT = object()
"""Stands for a name that a module does not hold."""


@frozen(eq=False)
class Flattened:
    """What FSDP1 has laid into flat parameters; nothing of it under another engine."""

    shards: Mapping[str, FlatShard]
    """Canonical name to place."""
    absent: Mapping[int, tuple[tuple[str, str], ...]]
    """Identity of a module to the keys that it has lost, each with the name of its parameter."""
    flat: frozenset[int]
    """Identities of the flat parameters."""


def flattened(model: Module) -> Flattened:
    """Looks through a model for flat parameters."""
    shards = fsdp1_flat.flat_shards(model)
    absent = fsdp1_flat.absent_keys(model)
    flat = frozenset(id(place.flat) for place in shards.values())
    return Flattened(shards=shards, absent=absent, flat=flat)


@frozen(eq=False)
class TensorPlace:
    """A name in a module, and what stands there."""

    name: str
    """Canonical name of the tensor, by this path."""
    holder: dict[str, Any]
    """``_parameters`` or ``_buffers`` of the module."""
    key: str
    """Its name in the holder."""
    tensor: Tensor | None
    """What stands there; None: FSDP1 has taken it away."""
    attributes: dict[str, Any]
    """Of the module: FSDP1 leaves a plain tensor under the key, which would hide the parameter."""

    def stands_there(self) -> tuple[Any, Any]:
        """In the holder and among the attributes."""
        return self.holder.get(self.key, ABSENT), self.attributes.get(self.key, ABSENT)


def places(site: Site, flat: Flattened) -> Iterator[TensorPlace]:
    """Those of one module, parameters first, flat ones left out."""
    attributes = vars(site.module)
    for holder in (site.module._parameters, site.module._buffers):
        for key, tensor in holder.items():
            if tensor is not None and id(tensor) not in flat.flat:
                yield TensorPlace(_join(site.path, key), holder, key, tensor, attributes)
    for key, name in flat.absent.get(id(site.module), ()):
        yield TensorPlace(name, site.module._parameters, key, None, attributes)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


@frozen(eq=False)
class Slot:
    """A place, and what stands there while initializers run."""

    name: str
    """First name of the tensor; tied ones have several slots and one name."""
    place: TensorPlace
    twin: Tensor
    """What the initializers write: whole and real if the tensor is wanted, else on meta, where writing does nothing."""
    shard: FlatShard | None
    """Where its elements lie in a flat parameter."""

    def keep(self) -> None:
        """Copies what this rank holds of the twin to where it lies."""
        twin, tensor = self.twin.detach(), self.place.tensor
        if self.shard is not None:
            self.shard.held().copy_(self.shard.part(twin))
        elif zero3.is_partitioned(tensor):
            zero3.held(tensor).copy_(zero3.part(tensor, twin))
        elif tensor is not None:
            values = shard(twin, tensor) if isinstance(tensor, DTensor) else twin
            local(tensor).copy_(local(values))


def slots(inside: Sequence[Site], wanted: set[str], flat: Flattened) -> Iterator[Slot]:
    """Every slot of a unit with its twin; a tied tensor has several slots and one twin."""
    twins: dict[object, tuple[str, Tensor]] = {}
    for site in inside:
        for place in places(site, flat):
            key: object = place.name if place.tensor is None else id(place.tensor)
            if key not in twins:
                real = place.name in wanted
                twins[key] = place.name, _twin(place.tensor, flat.shards.get(place.name), real=real)
            name, twin = twins[key]
            yield Slot(name, place, twin, flat.shards.get(name))


def whole_shape(place: TensorPlace, flat: Flattened) -> torch.Size:
    """Of the tensor as its author wrote it."""
    if (there := flat.shards.get(place.name)) is not None:
        return there.shape
    shape: torch.Size = getattr(place.tensor, "ds_shape", None) or torch.Size(getattr(place.tensor, "shape", ()))
    return shape


def _twin(tensor: Tensor | None, there: FlatShard | None, *, real: bool) -> Tensor:
    """A new object, without flags of the past such as transformers' ``_is_hf_initialized``.

    On meta unless ``real``; a plain tensor's has its storage, so that nothing is there twice.
    """
    if there is not None:
        flat = there.flat
        return _made(there.shape, flat, flat.device, real=real, trains=flat if tensor is None else tensor)
    assert tensor is not None, "only what lies in a flat parameter has left its module"
    if zero3.is_partitioned(tensor):
        return _made(tensor.ds_shape, tensor, local(tensor).device, real=real, trains=tensor)  # type: ignore[attr-defined]  # DeepSpeed's
    if not real or isinstance(tensor, DTensor):
        return _made(tensor.shape, tensor, local(tensor).device, real=real, trains=tensor)
    twin = tensor.detach()
    return Parameter(twin, tensor.requires_grad) if isinstance(tensor, Parameter) else twin


def _made(shape: torch.Size, like: Tensor, device: torch.device, *, real: bool, trains: Tensor) -> Tensor:
    twin = torch.empty(shape, dtype=like.dtype, device=device if real else "meta")
    return Parameter(twin, trains.requires_grad) if isinstance(trains, Parameter) else twin


@contextmanager
def instead(pairs: Iterable[tuple[TensorPlace, Tensor]], sites: Sequence[Site], flat: Flattened) -> Iterator[None]:
    """Meanwhile the modules hold these tensors under their own names, and no flat parameter."""
    with _without_flat(sites, flat):
        before: list[tuple[TensorPlace, tuple[Any, Any]]] = []
        try:
            for place, tensor in pairs:
                before.append((place, place.stands_there()))
                place.attributes.pop(place.key, None)
                place.holder[place.key] = tensor
            yield
        finally:
            for place, (held, attribute) in reversed(before):
                _put(place.holder, place.key, held)
                _put(place.attributes, place.key, attribute)


@contextmanager
def _without_flat(sites: Sequence[Site], flat: Flattened) -> Iterator[None]:
    taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for site in sites if flat.flat else ():
            holder = site.module._parameters
            taken.append((holder, dict(holder)))
            for key in [key for key, param in holder.items() if id(param) in flat.flat]:
                del holder[key]
        yield
    finally:
        for holder, everything in taken:
            holder.clear()  # or what was taken out would come last
            holder.update(everything)


def _put(into: dict[str, Any], key: str, what: Any) -> None:
    if what is ABSENT:
        into.pop(key, None)
    else:
        into[key] = what
