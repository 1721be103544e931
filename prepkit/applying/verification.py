"""After apply: one look at every parameter, step and slot, and at values that steps leave alone, on all ranks alike.

A buffer is in no optimizer and often in no checkpoint: one that was left uninitialised, or that each rank has drawn for
itself, trains silently and wrongly. Where every rank shards the copy that it has built, a rank with another seed gives
its shards of another model, and nothing notices: a sample of every parameter travels as a digest before the first step.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import string_at
from itertools import chain, repeat
from math import prod
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from prepkit.applying.step_kinds import KINDS
from prepkit.config import ClipNorm
from prepkit.facts.run import (
    AppliedFacts,
    Departure,
    PreparedOptimizer,
    PreparedScheduler,
    RunFacts,
    RunningFacts,
    same,
)
from prepkit.objects import fsdp1_flat, names
from prepkit.objects.joint_optimizer import members, scheduler_members
from prepkit.objects.local_part import local
from prepkit.objects.names import known_bases
from prepkit.objects.state import LiveModel, actual_layout, inspect, planned_layout
from prepkit.objects.target import Target
from prepkit.observe import fingerprints
from prepkit.observe.fingerprints.tensor import as_hex
from prepkit.observe.model import dtype_name
from prepkit.plan import Owners, Plan
from prepkit.plan.attestation import Attestation
from prepkit.plan.layout import FlatPart, ParamLayout, coordinate, local_range, local_shape
from prepkit.ranks.world import world
from prepkit.rules import due
from prepkit.rules.rule import Moment, answers
from prepkit.steps import (
    InitializeDeepSpeed,
    InitializeTensors,
    ReadTensors,
    RegroupOptimizer,
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


@frozen(kw_only=True, eq=False, repr=False)
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
) -> tuple[RunFacts, dict[str, str]]:
    """The facts with what has changed and what ranks differ in, and name to fingerprint of what was asked for.

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
        prints: dict[str, str] = {}
    else:
        found = fingerprints.fingerprints(live.target.model)
        filled = any(isinstance(step, InitializeTensors | ReadTensors) for step in steps)
        kept = {} if filled or (sent and facts.rank) else earlier.weights
        changed += [name for name in kept if found.values.get(name, kept[name]) != kept[name]]
        parted, prints = (*parted, *found.parted), {name: as_hex(value) for name, value in found.values.items()}
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
    facts, prints = evolve(facts, applied=applied), dict[str, str]()
    if before is not None:
        facts, prints = compared(facts, applied, plan, live, before)
    return Attestation(
        rank=facts.rank,
        asked=answers(due(Moment.APPLY), Moment.APPLY, facts),
        fingerprints=tuple(sorted(prints.items())),
    )


FLAT = "_flat_param"
"""Name of the parameter that is in a unit's module in the place of its own (torch ``FLAT_PARAM``)."""

OWNERS = "plan.owners"
"""Where a duty is another's than the plan says."""


def after_apply(plan: Plan, live: LiveModel, rank: int, *, rehearsed: bool = False) -> RunFacts:
    """Return what the rules of ``Moment.APPLY`` read, but for steps and values. ``rehearsed``: there is no data."""
    optimizer, scheduler = live.target.optimizer, plan.facts.scheduler
    engine = live.target.model if "DeepSpeedEngine" in known_bases(type(live.target.model)) else None
    missing = () if rehearsed or engine is None else tuple(copies(plan, engine))
    drives = scheduler is None or not scheduler.drives_optimizer or _drives(live)
    return RunFacts(
        rank=rank,
        running=(_compared(plan, live),),
        optimizers=() if optimizer is None else (PreparedOptimizer(name=type(optimizer).__name__, held=()),),
        scheduler=PreparedScheduler(name=type(live.target.scheduler).__name__, drives_optimizer=drives),
        applied=AppliedFacts(
            layout=(*_parameters(plan, live, rank), *_lost_attributes(plan, live), *_buffers(plan, live)),
            masters=(*(_low(live) if plan.run.master_weights_in_place else ()), *missing),
            empty=() if rehearsed else tuple(_empty(live)),
            owners=() if rehearsed else tuple(_owners(plan.owners, live, engine)),
        ),
    )


# --- the model ---


def _parameters(plan: Plan, live: LiveModel, rank: int) -> Iterator[Departure]:
    for layout in plan.layout:
        if layout.flat is not None or "split" in layout.placements:
            continue  # flat parts are looked at below; DeepSpeed decides which way it splits which layer
        param = live.params.get(layout.name)
        if param is None:
            yield Departure(layout.name, "the model has no such parameter")
        elif bad := planned_layout(layout, plan.mesh, rank).against(actual_layout(param)):
            yield Departure(layout.name, "; ".join(bad))
    yield from _parts(plan, live, rank)
    flat = {f"{one.unit}.{FLAT}".lstrip(".") for one in plan.layout if one.flat and not one.flat.original}
    known = {layout.name for layout in plan.layout} | {name for group in plan.facts.model.ties for name in group} | flat
    tied = {id(live.params[name]) for name in known if name in live.params}  # also where a module is shared
    for name, param in live.params.items():
        if name not in known and id(param) not in tied:
            yield Departure(name, "the plan has no such parameter")


def _parts(plan: Plan, live: LiveModel, rank: int) -> Iterator[Departure]:
    """Each flattened parameter of FSDP1 that has not its planned place and view, to the element."""
    shards = fsdp1_flat.flat_shards(live.target.model) if any(param.flat for param in plan.layout) else {}
    for layout in plan.layout:
        part, shard = layout.flat, shards.get(layout.name)
        if part is None:
            continue
        if shard is None:
            yield Departure(layout.name, "it is in no flat parameter")
            continue
        pairs = _places(layout, part, shard, plan, rank)
        bad = [f"{what} planned {planned}, found {found}" for what, planned, found in pairs if planned != found]
        param = live.params.get(layout.name)
        if param is not None:
            view = evolve(layout, shape=local_shape(layout, plan.mesh, rank), flat=None)  # a row of it, or the whole
            bad.extend(planned_layout(view, plan.mesh, rank).against(actual_layout(param)))
        elif part.original:
            bad.append("the model has no such parameter")
        if bad:
            yield Departure(layout.name, "; ".join(bad))


def _places(
    layout: ParamLayout, part: FlatPart, shard: fsdp1_flat.FlatShard, plan: Plan, rank: int
) -> Iterator[tuple[str, object, object]]:
    at = coordinate(rank, plan.mesh)[-1] if part.shards > 1 else 0
    yield "unit", layout.unit, shard.unit
    yield "start", part.start, shard.start
    yield "elements per rank", part.shard, shard.shard
    yield "shape", layout.shape, tuple(shard.shape)
    yield "elements here", local_range(part, prod(layout.shape), at), (shard.first, shard.last)
    yield "dtype", layout.dtype, dtype_name(shard.flat.dtype)
    yield "still a parameter", part.original, shard.original


def _lost_attributes(plan: Plan, live: LiveModel) -> Iterator[Departure]:
    """Yield what somebody has set on parameters, and those that took their place have not."""
    for name, key in plan.facts.model.param_attributes:
        if name in live.params and not hasattr(live.params[name], key):
            yield Departure(name, f"its attribute {key} is gone")


def _empty(live: LiveModel) -> Iterator[str]:
    for name, tensor in {**live.params, **live.buffers}.items():
        if local(tensor).device.type == "meta":  # MS-AMP knows no is_meta
            yield name


def _buffers(plan: Plan, live: LiveModel) -> Iterator[Departure]:
    casts = any(isinstance(planned.step, InitializeDeepSpeed) for planned in plan.steps)
    facts = plan.facts.model.buffers
    for fact in facts:
        buffer = live.buffers.get(fact.name)
        if buffer is None:
            yield Departure(fact.name, "it is gone")
            continue
        shape, dtype = tuple(buffer.shape), fact.dtype if casts else dtype_name(buffer.dtype)
        if (shape, dtype) != (fact.shape, fact.dtype):
            yield Departure(fact.name, f"planned {fact.dtype}{list(fact.shape)}, found {dtype}{list(shape)}")
    known = {id(live.buffers.get(fact.name)) for fact in facts}  # a shared module leads to one on two ways
    for name, buffer in live.buffers.items():
        if id(buffer) not in known:
            yield Departure(name, "the plan has no such buffer")


def _low(live: LiveModel) -> Iterator[str]:
    """Trained parameters of fewer than 32 bits."""
    for name, param in live.params.items():
        if param.requires_grad and param.is_floating_point() and param.element_size() < 4:
            yield f"{name} is {actual_layout(param).dtype}"


# --- optimizer and scheduler ---


def _compared(plan: Plan, live: LiveModel) -> tuple[RunningFacts, RunningFacts]:
    """Ties, slots and state as the plan has them, and as they are, in the form in which drift compares two looks."""
    flat = {one.name for one in plan.layout if one.flat is not None and not one.flat.original}
    ties = tuple(group for group in plan.facts.model.ties if not flat.intersection(group))  # one flat parameter is one
    tied = tuple(group for group in ties if len({id(live.params.get(name)) for name in group}) == 1)
    planned, found = RunningFacts(params=(), ties=ties), RunningFacts(params=(), ties=tied)
    seen, optimizer = plan.facts.optimizer, live.target.optimizer
    if any(isinstance(one.step, InitializeDeepSpeed) for one in plan.steps) or (seen is None and optimizer is None):
        return planned, found  # DeepSpeed's optimizer has slots of its own, and its step looks at them
    params = [] if optimizer is None else [group["params"] for group in optimizer.param_groups]
    groups = () if seen is None else tuple(tuple(name or "" for name in group.slots) for group in seen.groups)
    if seen is None or any(isinstance(one.step, RegroupOptimizer) for one in plan.steps):
        params, groups = [list(chain(*params))], (tuple(chain(*groups)),)  # its step knows what the groups have become
        held: tuple[tuple[str, ...], ...] = (tuple(_trained(live, None if seen is None else {*groups[0]})),)
        there = {id(param) for param in params[0]}
        now: tuple[tuple[str, ...], ...] = (tuple(name for name in held[0] if id(live.params[name]) in there),)
    else:
        more = max(len(params), len(groups))
        params, held = [*params, *[[]] * (more - len(params))], (*groups, *[()] * (more - len(groups)))
        now = tuple(tuple(_named(live, names, group)) for names, group in zip(held, params, strict=True))
        groups = held
    allowed = tuple(sum(not name for name in group) for group in groups)
    ours = {id(param) for param in live.params.values()}
    orphans = tuple(sum(id(param) not in ours for param in group) for group in params)
    stateful = () if seen is None or optimizer is None else tuple(_state(live, optimizer, seen.stateful))
    return (
        evolve(planned, held=held, orphans=allowed, stateful=(tuple(name for name, _ in stateful),)),
        evolve(found, held=now, orphans=orphans, stateful=(tuple(name for name, kept in stateful if kept),)),
    )


def _trained(live: LiveModel, among: set[str] | None) -> Iterator[str]:
    """Trained parameters under their first names, of these or of all."""
    first = {id(param): name for name, param in reversed(live.params.items())}
    for name, param in live.params.items():
        if param.requires_grad and first[id(param)] == name and (among is None or name in among):
            yield name


def _named(live: LiveModel, planned: tuple[str, ...], group: list[Any]) -> Iterator[str]:
    """What the slots of a group hold: a tied parameter by its planned name; empty for what the model does not have."""
    first = {id(param): name for name, param in reversed(live.params.items())}
    for name, param in zip(chain(planned, repeat("")), group, strict=False):
        yield name if name and live.params.get(name) is param else first.get(id(param), "")


def _state(live: LiveModel, optimizer: Optimizer, names: tuple[str, ...]) -> Iterator[tuple[str, bool]]:
    """Whether each of these has state, under whatever holds it now; a rank without a part of one has none to lose."""
    stateful = {id(param) for param, state in optimizer.state.items() if state}
    shards = fsdp1_flat.flat_shards(live.target.model)
    holders = {**live.params, **{name: shard.flat for name, shard in shards.items() if not shard.original}}
    empty = {name for name, shard in shards.items() if shard.original and shard.cut and shard.first == shard.last}
    return ((name, id(holders.get(name)) in stateful) for name in names if name not in empty)


def _drives(live: LiveModel) -> bool:
    """Return whether the scheduler ticks for the optimizer that is here."""
    optimizer = live.target.optimizer
    groups = getattr(optimizer, "param_groups", None)  # DeepSpeed shows those of the one inside
    here = (optimizer, *(members(optimizer) if optimizer is not None else ()))
    driven = [getattr(one, "optimizer", None) for one in scheduler_members(live.target.scheduler)]
    return all(any(one is each for each in here) or getattr(one, "param_groups", 0) is groups for one in driven)


# --- owners: who counts, clips, scales, ticks and keeps master weights ---


def _owners(owners: Owners, live: LiveModel, engine: Any) -> Iterator[Departure]:
    """Prepkit's own driver does what no engine, scaler or scheduler of another does."""
    scaler, scheduler = live.target.scaler, live.target.scheduler
    scaling = "prepkit" if scaler is not None and scaler.is_enabled() else "nobody"
    ticking = "prepkit" if scheduler is not None else "nobody"
    if engine is not None:
        scaling = "DeepSpeed" if engine.fp16_enabled() else scaling
        ticking = "DeepSpeed" if engine.lr_scheduler is not None else ticking
        counted = engine.gradient_accumulation_steps()
        yield from same(OWNERS, "micro-batches of a window", owners.accumulation_steps, counted)
        most = owners.clip.max_norm if isinstance(owners.clip, ClipNorm) and owners.clipping == "DeepSpeed" else 0.0
        yield from same(OWNERS, "DeepSpeed clips to", float(most), float(engine.gradient_clipping() or 0.0))
    yield from same(OWNERS, "loss scaling", owners.loss_scaling, scaling)
    yield from same(OWNERS, "accumulation", owners.accumulation, "prepkit" if engine is None else "DeepSpeed")
    yield from same(OWNERS, "scheduler", owners.scheduler, ticking)


def copies(plan: Plan, engine: Any) -> Iterator[str]:
    """Yield what is missing of the float32 copies that DeepSpeed was to make."""
    if not plan.owners.master_weights.startswith("DeepSpeed's float32 copies"):
        return
    kept = (
        "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat",
        "fp32_groups_flat_partition",
        "fp32_groups_flat",
        "fp32_groups",
    )
    groups = [group for name in kept for group in getattr(engine.optimizer, name, None) or ()]
    parts = [part for group in groups for part in (group if isinstance(group, list) else [group])]  # unfused: one each
    if not groups:
        yield f"{type(engine.optimizer).__name__} keeps none"
    yield from (f"a group of them is {part.dtype}" for part in parts if str(part.dtype) != "torch.float32")
