"""Buffers by their bytes: unchanged by the steps, and equal on all ranks.

A buffer is in no optimizer and often in no checkpoint: one that was left uninitialised, or that each rank has drawn for
itself, trains silently and wrongly.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from prepkit.objects.state import LiveModel
from prepkit.plan import Plan
from prepkit.plan.attestation import Check, each
from prepkit.ranks.agree import spans
from prepkit.ranks.world import world
from prepkit.steps import InitializeDeepSpeed, ReadTensors, SendTensors, WrapDDP, WrapFSDP1

REWRITES: dict[type, Callable[[Any, int], bool]] = {
    WrapDDP: lambda step, rank: step.broadcast_buffers and rank > 0,  # it sends rank 0's to all
    WrapFSDP1: lambda step, rank: step.sync_module_states and rank > 0,  # likewise
    SendTensors: lambda _, rank: rank > 0,  # likewise
    InitializeDeepSpeed: lambda step, rank: step.dtype is not None or rank > 0,  # casts, and sends rank 0's
}
"""Step kinds that may change the values of buffers, and whether this step does on this rank."""

LEAVES_APART: dict[type, Callable[[Any], bool]] = {
    WrapDDP: lambda step: not step.broadcast_buffers,
}
"""Step kinds that can mean that every rank keeps buffers of its own, and whether this step does."""

PLAIN = (Tensor,)
"""Classes whose bytes lie as their shape says."""


def digests(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Name to SHA-256 of the bytes; without those on meta and those of tensor subclasses, which lie as they like."""
    return {name: _digest(buffer) for name, buffer in named.items() if not buffer.is_meta and type(buffer) in PLAIN}


def _digest(buffer: Tensor) -> str:
    on_host = buffer.detach().cpu().contiguous()
    size = on_host.numel() * on_host.element_size()
    data = (ctypes.c_char * size).from_address(on_host.data_ptr()) if size else b""  # no copy, and no numpy
    return hashlib.sha256(data).hexdigest()


def checks(plan: Plan, live: LiveModel, rank: int, before: Mapping[str, str]) -> Iterator[Check]:
    """Whether buffers kept the values of ``before``, but for those that a step may write, and are equal on all ranks.

    Collective where a group runs that carries data, for every rank of it alike. ``before``: name to digest, as
    ``fingerprints`` gave them before the first step.
    """
    steps = [planned.step for planned in plan.steps]
    now = digests(live.buffers)
    if not any(REWRITES[type(step)](step, rank) for step in steps if type(step) in REWRITES):
        sources = {source.name for step in steps if isinstance(step, ReadTensors) for source in step.sources}
        read = {id(buffer) for name, buffer in live.buffers.items() if name in sources}  # one may have two names
        bad = [
            f"{name} holds other values than before the first step"
            for name in before
            if id(live.buffers.get(name)) not in read and now.get(name, before[name]) != before[name]
        ]
        yield each("model", "buffers kept their values", bad)
    apart = any(LEAVES_APART[type(step)](step) for step in steps if type(step) in LEAVES_APART)
    if not apart and world().carries_data:
        yield each("model", "buffers are equal on all ranks", _unequal(now))


def _unequal(mine: dict[str, str]) -> list[str]:
    """Buffers that are not the same everywhere, and on which ranks. Collective: 32 bytes, or all digests."""
    if world().same(sorted(mine.items())):
        return []
    by_rank = world().gather(mine)
    first = by_rank[0]
    names = dict.fromkeys(name for digests in by_rank for name in digests)
    fix = "build the model with the same seed everywhere, or broadcast its buffers from rank 0, before apply"
    odd = {
        name: tuple(r for r, digests in enumerate(by_rank) if digests.get(name) != first.get(name)) for name in names
    }
    bad = [
        f"{name} differs between rank 0 and rank{'s' * (len(ranks) > 1)} {spans(ranks)}"
        for name, ranks in odd.items()
        if ranks
    ]
    return [f"{bad[0]} ({fix})", *bad[1:]] if bad else []
