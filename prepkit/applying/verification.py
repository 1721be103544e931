"""After apply: one look at every parameter, step and slot, and at values that steps leave alone, on all ranks alike.

A buffer is in no optimizer and often in no checkpoint: one that was left uninitialised, or that each rank has drawn for
itself, trains silently and wrongly. Where every rank shards the copy that it has built, a rank with another seed gives
its shards of another model, and nothing notices: a sample of every parameter travels as a digest before the first step.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from ctypes import string_at
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from prepkit.applying.step_kinds import KINDS
from prepkit.facts.run import AppliedFacts, RunFacts
from prepkit.objects import names
from prepkit.objects.state import LiveModel, inspect
from prepkit.objects.target import Target
from prepkit.observe import fingerprints
from prepkit.observe.fingerprints.tensor import as_hex
from prepkit.observe.model import dtype_name
from prepkit.observe.prepared.applied import after_apply
from prepkit.plan import Plan
from prepkit.plan.attestation import Attestation
from prepkit.ranks.world import world
from prepkit.rules import due
from prepkit.rules.rule import Moment, answers
from prepkit.steps import (
    InitializeDeepSpeed,
    InitializeTensors,
    ReadTensors,
    SendTensors,
    ShardUnits,
    Step,
    WrapDDP,
    WrapFSDP1,
)

REWRITES: dict[type, Callable[[Any, int], bool]] = {
    WrapDDP: lambda step, rank: step.broadcast_buffers and rank > 0,  # it sends rank 0's to all
    WrapFSDP1: lambda step, rank: step.sync_module_states and rank > 0,  # likewise
    SendTensors: lambda _, rank: rank > 0,  # likewise
    InitializeDeepSpeed: lambda step, rank: step.dtype is not None or rank > 0,  # casts, and sends rank 0's
}
"""Step kinds that may change the values of buffers, and whether this step does on this rank."""

SAMPLED = 64
"""Elements of each parameter that are compared before the first step, evenly spaced from the first to the last."""


@frozen(kw_only=True)
class Before:
    """Values before the first step, of what this rank has whole."""

    buffers: Mapping[str, str]
    """Name to digest."""
    weights: Mapping[str, int] | None
    """Name to fingerprint, in the dtype that each is to have; None: nobody has asked for fingerprints."""
    sample: str
    """What ``sampled`` gives where the engine puts rank 0's weights in the place of every rank's own; else empty."""


def before(plan: Plan, model: Module, buffers: Mapping[str, Tensor], *, fingerprint: bool) -> Before:
    """Reads every buffer, and every weight where fingerprints are asked for. Asks no other rank."""
    sample = sampled(model) if overwrites_own_copies(plan) else ""
    if not fingerprint:
        return Before(buffers=_digests(buffers), weights=None, sample=sample)
    now = {name: dtype_name(param.dtype) for name, param in names.named_parameters(model).items()}
    # A conversion that is no cast, as of packed weights, is none here.
    cast = {one.name: one.dtype for one in plan.layout if now.get(one.name, one.dtype) != one.dtype}
    return Before(buffers=_digests(buffers), weights=fingerprints.before(model, cast), sample=sample)


def compared(
    facts: RunFacts, applied: AppliedFacts, plan: Plan, live: LiveModel, earlier: Before
) -> tuple[RunFacts, dict[str, int]]:
    """The facts with what has changed and what ranks differ in, and the fingerprints that were asked for.

    Collective where a group runs that carries data, for every rank of it alike: 32 bytes for the buffers and for what
    was overwritten, or all digests where they differ; and what ``fingerprints`` takes.
    """
    steps = [planned.step for planned in plan.steps]
    sent = any(REWRITES[type(step)](step, facts.rank) for step in steps if type(step) in REWRITES)
    now = _digests(live.buffers)
    changed = [] if sent else _changed(steps, live, now, earlier.buffers)
    own = any(isinstance(step, WrapDDP) and not step.broadcast_buffers for step in steps)  # each rank keeps its own
    parted, odd, other = _unlike({} if own else now, earlier.sample)
    if earlier.weights is None:
        prints: dict[str, int] = {}
    else:
        found = fingerprints.fingerprints(live.target.model)
        filled = any(isinstance(step, InitializeTensors | ReadTensors) for step in steps)
        kept = {} if filled or (sent and facts.rank) else earlier.weights
        changed += [name for name in kept if found.values.get(name, kept[name]) != kept[name]]
        parted, prints = (*parted, *found.parted), found.values
    applied = evolve(applied, changed=tuple(changed), odd_ranks=odd, overwritten=other)
    return evolve(facts, parted=parted, applied=applied), prints


def _changed(steps: list[Step], live: LiveModel, now: Mapping[str, str], earlier: Mapping[str, str]) -> list[str]:
    sources = {source.name for step in steps if isinstance(step, ReadTensors) for source in step.sources}
    read = {id(buffer) for name, buffer in live.buffers.items() if name in sources}  # one may have two names
    kept = (name for name in earlier if id(live.buffers.get(name)) not in read)
    return [name for name in kept if now.get(name, earlier[name]) != earlier[name]]


def _digests(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Name to SHA-256 of the bytes; without those on meta and those of tensor subclasses, which lie as they like."""
    return {name: _digest(buffer) for name, buffer in named.items() if not buffer.is_meta and type(buffer) is Tensor}


def _digest(buffer: Tensor) -> str:
    on_host = buffer.detach().cpu().contiguous()
    size = on_host.numel() * on_host.element_size()
    data = (ctypes.c_char * size).from_address(on_host.data_ptr()) if size else b""  # no copy, and no numpy
    return hashlib.sha256(data).hexdigest()


def _unlike(mine: dict[str, str], sample: str) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """Buffers that are not the same everywhere, the ranks that differ from the first, and those whose sample does."""
    if world().same((sorted(mine.items()), sample)):  # without asking where nothing carries data
        return (), (), ()
    by_rank, samples = zip(*world().gather((mine, sample)), strict=True)
    every = dict.fromkeys(name for held in by_rank for name in held)
    parted = tuple(name for name in every if len({held.get(name) for held in by_rank}) > 1)
    return parted, _others(by_rank), _others(samples)


def _others(held: Sequence[object]) -> tuple[int, ...]:
    return tuple(rank for rank, one in enumerate(held) if one != held[0])


# --- before the first step ---


def to_agree_on(plan: Plan, model: Module) -> tuple[tuple[str, str], ...]:
    """Digests to agree on beside those of plan and model. Reads ``SAMPLED`` elements of each parameter."""
    modes = "".join("01"[site.module.training] for site in names.sites(model))
    return (
        *((("values", sampled(model)),) if shards_own_copies(plan) else ()),
        ("training modes", hashlib.sha256(modes.encode()).hexdigest()),
    )


def shards_own_copies(plan: Plan) -> bool:
    """Return whether each rank's values come from the model that it has built itself: nobody sends or reads them."""
    steps = [planned.step for planned in plan.steps]
    if any(isinstance(step, ReadTensors | SendTensors | InitializeTensors) for step in steps):
        return False
    return any(
        (isinstance(step, ShardUnits) and not step.already_sharded)
        or (isinstance(step, WrapFSDP1) and not step.sync_module_states)
        for step in steps
    )


def overwrites_own_copies(plan: Plan) -> bool:
    """Return whether the engine sends rank 0's weights over those that each rank has built, unasked by the config."""
    steps = [planned.step for planned in plan.steps]
    given = any(isinstance(step, ReadTensors | SendTensors | InitializeTensors) for step in steps)
    return not given and any(isinstance(step, WrapDDP | InitializeDeepSpeed) for step in steps)


def sampled(model: Module) -> str:
    """Digest of a sample of every parameter's elements, bit by bit; of shards that arrive sharded nothing."""
    samples: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for param in names.named_parameters(model).values():
        if not isinstance(param, DTensor) and not param.is_meta and param.numel():
            samples.setdefault((param.device, param.dtype), []).append(_sample(param.detach()))
    digest = hashlib.sha256()
    for (_, dtype), parts in samples.items():
        joint = torch.cat(parts).cpu().contiguous()
        digest.update(str(dtype).encode())
        digest.update(string_at(joint.data_ptr(), joint.nbytes))
    return digest.hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    """Views of it: the first element, and others at even distances up to the last."""
    flat = tensor.reshape(-1)
    if flat.numel() <= SAMPLED:
        return flat
    step = (flat.numel() - 1) // (SAMPLED - 1)
    rest = flat[flat.numel() - 1 - step * (SAMPLED - 2) :: step]
    return torch.cat((flat[:1], rest))


@torch.no_grad()
def verify(plan: Plan, target: Target, *, rehearsed: bool = False, before: Before | None = None) -> Attestation:
    """Asks the rules of ``Moment.APPLY`` about what the plan has led to on this rank. Reads only.

    Never raises on a difference: it is a finding. ``rehearsed``: nothing has data. ``before``: values are compared as
    well, with those and over the ranks, which every rank has to take part in (``compared``).
    """
    live = inspect(target)
    facts = after_apply(plan, live, world().rank, rehearsed=rehearsed)
    steps = (one for planned in plan.steps for one in KINDS[type(planned.step)].verify(planned.step, live))
    applied = evolve(facts.applied or AppliedFacts(), steps=tuple(steps))
    facts, prints = evolve(facts, applied=applied), dict[str, int]()
    if before is not None:
        facts, prints = compared(facts, applied, plan, live, before)
    return Attestation(
        rank=facts.rank,
        asked=answers(due(Moment.APPLY), Moment.APPLY, facts),
        fingerprints=tuple((name, as_hex(prints[name])) for name in sorted(prints)),
    )
