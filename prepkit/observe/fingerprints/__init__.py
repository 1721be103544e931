"""Numbers for the values of weights, the same however they are divided: over time, ranks, engines and files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor, nn

from prepkit.court import refused
from prepkit.findings.text import some
from prepkit.observe.fingerprints.parts import Part, as_computed, parts
from prepkit.observe.fingerprints.tensor import as_hex, bits_sum, fingerprint, fingerprint_sum, unsigned
from prepkit.observe.given import said
from prepkit.ranks.world import world


@frozen(kw_only=True, eq=False, repr=False)
class Fingerprints:
    """One number per parameter, the same on every rank."""

    values: dict[str, int]
    """Canonical name to fingerprint of the whole parameter; where replicas differ that of the lowest rank's."""
    parted: tuple[str, ...] = ()
    """Parameters whose replicas on different ranks differ."""
    replicated: tuple[str, ...] = ()
    """Parameters of which there are several replicas."""
    told: tuple[float, ...] = ()
    """What every rank has told, averaged."""


def fingerprints(model: nn.Module, *, masters: bool = False) -> Fingerprints:
    """Of every parameter, whoever has prepared the model; see ``parts`` for what is left out, and what it raises.

    Collective where a process group with several ranks carries data: 32 bytes, and 24 for each parameter. Raises
    ``RunRefused`` on every rank where they have not the same parameters.
    """
    held = parts(model, masters=masters)
    if not world().same(sorted(held)):
        raise refused(
            "run.ranks-models", "model", "ranks hold parameters of other names, and so no common fingerprints"
        )
    return summed(held)


def as_text(model: nn.Module, *, masters: bool = False) -> dict[str, str]:
    """As ``pk.fingerprints`` gives them."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"weights is {said(model)}; pass a torch.nn.Module, or the path of safetensors files")
    found = fingerprints(model, masters=masters)
    if found.parted:
        raise refused("run.ranks-values", "model", f"ranks hold other values of the same weights: {some(found.parted)}")
    return {name: as_hex(value) for name, value in found.values.items()}


def before(model: nn.Module, dtypes: Mapping[str, str]) -> dict[str, int]:
    """Fingerprints of what this rank holds whole, as if cast to the dtype given by name. Reads only, and alone.

    Without what is on meta or divided already.
    """
    held = as_computed(model)
    whole = {name: part for name, part in held if part.values.numel() == part.numel and not part.values.is_meta}
    kinds = {name: getattr(torch, dtypes[name], None) for name in whole if name in dtypes}
    sums = [fingerprint_sum(part.values, dtype=kinds.get(name)) for name, part in whole.items()]
    return dict(zip(whole, map(unsigned, _on_host(sums)), strict=True))


def summed(held: Mapping[str, Part], told: tuple[float, ...] = ()) -> Fingerprints:
    """The parts of all ranks added up. Collective: one all-reduce of three int64 per parameter; names must agree.

    Of each parameter: the sum over the first replica; the sum over all, each times a hash of the replica; and the sum
    of those hashes. Where the replicas are equal the second is the product of the other two, modulo 2**64.
    ``told``: at most three numbers that travel with them, to a millionth.
    """
    own = _on_host([part.total() for part in held.values()])
    ranks = world()
    if not ranks.carries_data:
        return Fingerprints(values=dict(zip(held, map(unsigned, own), strict=True)))
    rows = [
        (
            value if part.replica == 0 else 0,
            _wrapped(value * _weight(part.replica)),
            _weight(ranks.rank) * (ranks.rank == part.replica),
        )
        for part, value in zip(held.values(), own, strict=True)
    ]
    a, b, c = (round(one * 1e6) for one in (*told, 0.0, 0.0, 0.0)[:3])
    rows.append((a, b, c))
    table = ranks.total(torch.tensor(rows, dtype=torch.int64).reshape(-1, 3))
    first, every, weights = (column.tolist() for column in table.unbind(1))
    same = [unsigned(a * w) == unsigned(b) for a, b, w in zip(first, every, weights, strict=True)]
    return Fingerprints(
        values=dict(zip(held, map(unsigned, first), strict=False)),
        parted=tuple(name for name, one in zip(held, same, strict=False) if not one),
        replicated=tuple(name for name, w in zip(held, weights, strict=False) if w != _weight(0)),
        told=tuple(row[-1] / 1e6 / ranks.size for row in (first, every, weights))[: len(told)],
    )


def sums_of_whole(model: nn.Module) -> dict[str, int]:
    """Sums of the bits of parameters that this rank holds whole, by name: what is compared often has to cost little.

    Left out is what ``as_computed`` leaves out, and what is on meta. Waits for each device once.
    """
    whole = {name: part.values for name, part in as_computed(model) if part.values.numel() == part.numel}
    whole = {name: values for name, values in whole.items() if not values.is_meta}
    return dict(zip(whole, _on_host([bits_sum(values) for values in whole.values()]), strict=True))


def _weight(replica: int) -> int:
    """An odd hash of a replica: differences between two replicas do not cancel."""
    return int.from_bytes(hashlib.sha256(str(replica).encode()).digest()[:7], "big") | 1


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _on_host(sums: list[Tensor]) -> list[int]:
    """Their values; each device is waited for once."""
    by_device: dict[torch.device, list[int]] = {}
    for at, total in enumerate(sums):
        by_device.setdefault(total.device, []).append(at)
    found = [0] * len(sums)
    for places in by_device.values():
        for at, value in zip(places, torch.stack([sums[at] for at in places]).tolist(), strict=True):
            found[at] = value
    return found


def of_files(path: str) -> dict[str, str]:
    """Name to fingerprint of every tensor in a safetensors file, or in those of a folder; one tensor lies in memory.

    Raises ``FileNotFoundError`` where there is none.
    """
    from safetensors import safe_open

    given = Path(path)
    files = [given] if given.is_file() else sorted(given.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{path} has no safetensors file; give what ready.export or save_pretrained has written"
        )
    found: dict[str, str] = {}
    for one in files:
        with safe_open(one, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                found[name] = as_hex(fingerprint(file.get_tensor(name)))
    return found
