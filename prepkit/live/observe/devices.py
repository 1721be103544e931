"""Where a device map has put a model, in words that are the same on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from prepkit.live.model.names import Site
from prepkit.live.ranks import launcher

LOCAL = "local"
"""Stands for the index of this rank's own device: ``cuda:local``; alone where no type is known."""


def device_map(places: Iterable[Site]) -> tuple[tuple[str, str], ...]:
    """``hf_device_map`` of the first module that carries one with more than one entry, else of the first with one.

    Ranks hold different devices, and their facts must be alike: a map to this rank's own device alone says
    ``cuda:local``, and in a map of several devices indices count from the lowest one.
    """
    held = (site.module.__dict__.get("hf_device_map") for site in places)
    maps = [one for one in held if isinstance(one, dict) and one]
    chosen = next((one for one in maps if len(one) > 1), maps[0] if maps else {})
    return tuple(zip(map(str, chosen), alike(list(chosen.values())), strict=True))


def alike(devices: Sequence[object]) -> tuple[str, ...]:
    """The devices of one map, by type and index, without the part that depends on the rank.

    >>> alike([torch.device("meta", 2), "meta:3", "cpu", "disk"])
    ('meta:0', 'meta:1', 'cpu', 'disk')
    """
    named = [_named(device) for device in devices]
    found = [_INDEXED(name) for name in named]
    indices = [int(one[2]) for one in found if one]
    if not indices:
        return tuple(named)
    if len(set(named)) == 1:
        kind = found[0][1] if found[0] else ""
        return (f"{kind}{LOCAL}" if indices[0] == _own(kind) else named[0],) * len(named)
    least = min(indices)
    return tuple(f"{one[1]}{int(one[2]) - least}" if one else name for one, name in zip(found, named, strict=True))


_INDEXED = re.compile(r"(\w+:|)(\d+)").fullmatch
"""``cuda:1``, or ``1`` where it is not known of what."""


def _named(device: object) -> str:
    """``cuda:1`` of an index, a text or a torch device; a type without an index is its first (Q-3, Q-7)."""
    text, kind = str(device), _accelerator()
    if text.isdecimal():  # counts the accelerators that are visible
        return f"{kind}:{text}" if kind else text
    return text if ":" in text or text in ("", "cpu", "disk", "meta") else f"{text}:0"


def _own(kind: str) -> int:
    """Index of the device that a step would bind here; the local rank where this machine has none of the type."""
    here = _accelerator()
    alone = kind == f"{here}:" and torch.get_device_module(here).device_count() < 2
    return 0 if alone else launcher.local_rank()


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found else ""
