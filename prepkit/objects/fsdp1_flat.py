"""What the flat parameters of FSDP1 hold: which named parameter lies where, and which part of it is on this rank.

Reads torch's ``FlatParameter``, whose attributes are documented there (torch ``_flat_param.py``) but not public.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module, Parameter

from prepkit.objects import names
from prepkit.objects.local_part import differs


@frozen(kw_only=True, eq=False, repr=False)
class FlatShard:
    """Where one named parameter lies in the flat parameter of its unit, and which of its elements are on this rank."""

    flat: Parameter
    """The flat parameter; on this rank its data is one shard."""
    unit: str
    """Path of the unit."""
    start: int
    """First element in the whole flat parameter."""
    shape: torch.Size
    """Of the named parameter as a whole."""
    stride: tuple[int, ...]
    """In which its elements lie one after the other."""
    shard: int
    """Elements of one shard; of an unsharded flat parameter all of them."""
    first: int
    """First of the named parameter's own elements on this rank."""
    last: int
    """One past the last; equal to ``first`` where it has none here."""
    cut: bool
    """True if the flat parameter is cut into shards at all."""
    original: bool
    """True if the named parameter is still there, as a view."""

    def held(self) -> torch.Tensor:
        """The named parameter's elements on this rank, in a row: a view of the flat parameter."""
        begin = 0 if self.first else self.start % self.shard if self.cut else self.start
        return self.flat.detach().view(-1)[begin : begin + self.last - self.first]

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor of the named parameter's shape that are on this rank; a view where it can be."""
        return self.line(whole)[self.first : self.last]

    def line(self, whole: torch.Tensor) -> torch.Tensor:
        """Such a tensor as one row, its elements in the order in which torch flattens the parameter."""
        if whole.stride() != self.stride:
            whole = torch.empty_strided(self.shape, self.stride, dtype=whole.dtype, device=whole.device).copy_(whole)
        return whole.as_strided((whole.numel(),), (1,), whole.storage_offset())


def units(model: Module) -> dict[str, FullyShardedDataParallel]:
    """Path to wrapper of every FSDP1 unit, in module order."""
    found: dict[str, FullyShardedDataParallel] = {}
    for site in names.sites(model):
        for module in site.stack if site.first else ():
            if isinstance(module, FullyShardedDataParallel):
                found[site.path] = module
    return found


def flat_shards(model: Module) -> dict[str, FlatShard]:
    """Canonical name to place of every parameter that lies in a flat parameter; a tied one under its first name."""
    shards: dict[str, FlatShard] = {}
    for path, unit in units(model).items():
        handle: Any = unit._handle
        if handle is not None:
            shards.update(_flat_shards(path, handle))
    return shards


def _flat_shards(path: str, handle: Any) -> dict[str, FlatShard]:
    flat = handle.flat_param
    cut = bool(handle.uses_sharded_strategy)
    whole = flat._unpadded_unsharded_size.numel()
    shard = flat._sharded_size.numel() if cut else whole
    rank = handle.rank if cut else 0
    starts = _starts(flat)
    found: dict[str, FlatShard] = {}
    for name, start, shape, stride in zip(flat._fqns, starts, flat._shapes, flat._strides, strict=True):
        first = min(max(rank * shard - start, 0), shape.numel())
        last = min(max((rank + 1) * shard - start, 0), shape.numel())
        inner = names.canonical(name)
        found[f"{path}.{inner}" if path else inner] = FlatShard(
            flat=flat,
            unit=path,
            start=start,
            shape=shape,
            stride=stride,
            shard=shard,
            first=first,
            last=last,
            cut=cut,
            original=handle._use_orig_params,
        )
    return found


def _starts(flat: Any) -> list[int]:
    """First elements of the parameters; padding has entries of its own among the sizes."""
    starts: list[int] = []
    end = 0
    for size, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            starts.append(end)
        end += size
    return starts


def rewritten(path: str, handle: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Name of each parameter of a gathered unit, and whether this rank's part was written since, which is lost then."""
    flat = handle.flat_param
    if not handle.uses_sharded_strategy or flat.numel() != flat._unpadded_unsharded_size.numel():
        return
    shards = _flat_shards(path, handle)
    for (name, shard), info in zip(shards.items(), flat._param_infos, strict=True):
        whole = getattr(info.module, info.param_name, None)
        if isinstance(whole, torch.Tensor) and whole.shape == shard.shape and shard.last > shard.first:
            begin = 0 if shard.first else shard.start % shard.shard
            kept = flat._local_shard.detach().view(-1)[begin : begin + shard.last - shard.first]
            yield name, differs(shard.part(whole.detach()), kept)


def absent_keys(model: Module) -> dict[int, tuple[tuple[str, str], ...]]:
    """Identity of a module to the keys that FSDP1 has taken from it, each with its parameter's first name.

    Without ``use_orig_params`` a module holds no parameter under a name that its author wrote; a tied one is missing in
    each of its modules (torch ``FlatParamHandle._param_infos``, ``_shared_param_infos``).
    """
    missing: dict[int, list[tuple[str, str]]] = {}
    for path, unit in units(model).items():
        handle: Any = unit._handle
        if handle is None or handle._use_orig_params:
            continue
        named: dict[tuple[int, str], str] = {}
        for fqn, info in zip(handle.flat_param._fqns, handle.flat_param._param_infos, strict=True):
            name = names.canonical(fqn)
            named[id(info.module), info.param_name] = f"{path}.{name}" if path else name
            missing.setdefault(id(info.module), []).append((info.param_name, named[id(info.module), info.param_name]))
        for tied in handle.flat_param._shared_param_infos:
            name = named[id(tied.prim_module), tied.prim_param_name]
            missing.setdefault(id(tied.module), []).append((tied.param_name, name))
    return {module: tuple(keys) for module, keys in missing.items()}


def holders(model: Module) -> dict[str, Parameter]:
    """Canonical name to the parameter that trains what had it: its own, or the flat one that has taken its place."""
    found = {name: shard.flat for name, shard in flat_shards(model).items() if not shard.original}
    return {**found, **names.named_parameters(model)} if found else names.named_parameters(model)
