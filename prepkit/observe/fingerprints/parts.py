"""What a rank holds of every parameter, and where in the whole parameter it lies, whoever has divided it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from prepkit.court import refused
from prepkit.objects import fsdp1_flat, names, zero3, zero_masters
from prepkit.objects.fsdp1_flat import FlatShard
from prepkit.observe.fingerprints.tensor import Dim, fingerprint_sum
from prepkit.plan.layout import chunk
from prepkit.ranks.world import ranks_of, world


@frozen(eq=False, kw_only=True, repr=False)
class Part:
    """Elements of one parameter on this rank."""

    values: Tensor
    """They, in the order of their indices; a view."""
    start: int = 0
    """Place of the first one."""
    dims: tuple[Dim, ...] | None = None
    """How places become indices of the whole; None: they are the indices."""
    numel: int
    """Elements of the whole parameter."""
    replica: int
    """Lowest rank among those that hold the whole together with this one; other ranks hold other replicas."""

    def total(self) -> Tensor:
        """Sum of the part, as int64 that has wrapped around, on its device."""
        return fingerprint_sum(self.values, self.start, self.dims)


def parts(model: nn.Module, *, masters: bool = False) -> dict[str, Part]:
    """Canonical name to this rank's part of every parameter, each once; nothing of it is gathered or copied.

    Left out, on every rank alike, is what has no bits of its own that could be compared: tensor subclasses that hold
    several tensors, layers without a shape yet, experts that each rank has for itself, what DeepSpeed's AutoTP has
    split, ``Partial`` placements.
    ``masters``: of what DeepSpeed steps the float32 master weights, which are what is saved and exported.
    Raises ``RunRefused`` for parameters on meta, and what ``zero_masters.refuse_unreadable`` raises.
    """
    stepped = _masters(model) if masters else {}
    found = {name: stepped.get(name) or part for name, part in as_computed(model)}
    if empty := [name for name, part in found.items() if part.values.is_meta]:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise refused("plan.no-weights", f"{empty[0]}{more}", "on meta, without values")
    return found


def as_computed(model: nn.Module) -> Iterator[tuple[str, Part]]:
    """The parts of what the model computes with, those on meta included."""
    shards = fsdp1_flat.flat_shards(model)
    flats = {id(shard.flat) for shard in shards.values()}
    replicas: dict[Any, int] = {}
    units = fsdp1_flat.units(model)
    for name, shard in shards.items():
        yield name, _of_flat(shard, units[shard.unit])
    for name, param in names.named_parameters(model).items():
        part = None if name in shards or id(param) in flats else _of_param(param, replicas)
        if part is not None:
            yield name, part


def _of_param(param: Any, replicas: dict[Any, int]) -> Part | None:
    if hasattr(param, "ds_autotp_universal_checkpoint_meta") or not getattr(param, "allreduce", True):
        return None
    if zero3.is_partitioned(param):
        start = min(param.ds_tensor.numel() * param.ds_zero_partition_rank, param.ds_numel)
        lowest = min(ranks_of(param.ds_process_group).members)
        return Part(values=zero3.held(param), start=start, numel=param.ds_numel, replica=lowest)
    if isinstance(param, DTensor):
        return _of_dtensor(param, replicas)
    if is_traceable_wrapper_subclass(param) or is_lazy(param):
        return None
    return Part(values=param, numel=param.numel(), replica=world().rank)


def _of_dtensor(param: DTensor, replicas: dict[Any, int]) -> Part | None:
    mesh, coordinate = param.device_mesh, param.device_mesh.get_coordinate()
    local = param._local_tensor  # to_local() would enter the graph of autograd
    if any(placement.is_partial() for placement in param.placements) or is_traceable_wrapper_subclass(local):
        return None
    if coordinate is None:
        return Part(values=local.new_empty(0), numel=param.numel(), replica=-1)
    spans = [(0, size) for size in param.shape]
    order = sorted(range(mesh.ndim), key=lambda axis: isinstance(param.placements[axis], _StridedShard))
    for axis in order:  # what is strided divides what the other axes have divided already (``fully_shard``)
        placement = param.placements[axis]
        if isinstance(placement, Shard | _StridedShard):
            first, size = spans[placement.dim]
            begin, rows = chunk(size, mesh.size(axis), coordinate[axis])
            spans[placement.dim] = (first + begin, rows)
    if tuple(size for _, size in spans) != tuple(local.shape):
        raise ValueError(f"a DTensor of {tuple(param.shape)} lies as {param.placements} and has {tuple(local.shape)}")
    key = (id(mesh), tuple(placement.is_replicate() for placement in param.placements))
    if key not in replicas:
        held = tuple(at if whole else slice(None) for at, whole in zip(coordinate, key[1], strict=True))
        replicas[key] = int(mesh.mesh[held].min())
    start, dims = _box(tuple(param.shape), spans)
    return Part(values=local, start=start, dims=dims, numel=param.numel(), replica=replicas[key])


def _box(shape: tuple[int, ...], spans: list[tuple[int, int]]) -> tuple[int, tuple[Dim, ...] | None]:
    """First index of a box that is one run of the whole; else 0 and its dims, whole ones joined to those before."""
    dims: list[Dim] = []
    for at, (first, size) in enumerate(spans):
        stride = prod(shape[at + 1 :])
        if dims and size == shape[at]:
            before, offset, _ = dims[-1]
            dims[-1] = (before * size, offset * size, stride)
        else:
            dims.append((size, first, stride))
    if len(dims) <= 1:
        return (dims[0][1] * dims[0][2] if dims else 0), None
    return 0, tuple(dims)


def _of_flat(shard: FlatShard, unit: Any) -> Part:
    """A run of the elements in the order in which they lie, which is that of the strides (``FlatShard.line``)."""
    local = getattr(shard.flat, "_local_shard", None) if shard.cut else None
    row = (shard.flat if local is None else local).detach().view(-1)
    begin = 0 if shard.first else shard.start % shard.shard if shard.cut else shard.start
    numel = prod(shard.shape)
    lowest = min(ranks_of(unit.process_group).members) if shard.cut else world().rank
    values = row[begin : begin + shard.last - shard.first]
    return Part(values=values, start=shard.first, dims=_permuted(shard), numel=numel, replica=lowest)


def _permuted(shard: FlatShard) -> tuple[Dim, ...] | None:
    shape = tuple(shard.shape)
    rows = tuple(prod(shape[at + 1 :]) for at in range(len(shape)))
    kept = [at for at, size in enumerate(shape) if size != 1]
    order = sorted(kept, key=lambda at: -shard.stride[at])
    return None if order == kept else tuple((shape[at], 0, rows[at]) for at in order)


def _masters(model: nn.Module) -> dict[str, Part]:
    found: dict[str, Part] = {}
    for engine in (module for module in model.modules() if "DeepSpeedEngine" in names.known_bases(type(module))):
        zero_masters.refuse_unreadable(engine)
        runs = zero_masters.masters(engine)
        divided = type(engine.optimizer).__name__ in (zero_masters.ZERO3, *zero_masters.MAPPED)
        stepped = {id(param) for group in zero_masters.groups(engine) for param in group}
        for name, param in names.named_parameters(engine).items():
            if id(param) not in stepped:
                continue
            group: Any = getattr(param, "ds_process_group", None) or engine.seq_data_parallel_group
            lowest = min(ranks_of(group).members) if divided else world().rank
            numel = int(getattr(param, "ds_numel", param.numel()))
            run = runs[name].part(runs[name].flat) if name in runs else None
            values = param.detach().reshape(-1)[:0] if run is None else run.values
            found[name] = Part(values=values, start=0 if run is None else run.start, numel=numel, replica=lowest)
    return found


def masters_apart(model: nn.Module) -> tuple[str, ...]:
    """Parameters that the model computes with, and of which an engine of DeepSpeed steps other values on this rank."""
    computed = dict(as_computed(model))
    return tuple(name for name, one in _masters(model).items() if name in computed and _apart(one, computed[name]))


def _apart(master: Part, part: Part) -> bool:
    """Of the elements that both hold; ZeRO cuts what it steps, and what the model computes with from stage 3 on."""
    mine = part.values.reshape(-1)
    mine = mine if mine.numel() == master.values.numel() else mine[master.start : master.start + master.values.numel()]
    stepped = master.values.detach().reshape(-1)
    return mine.numel() == stepped.numel() and not torch.equal(stepped.to(mine.device, mine.dtype), mine)
