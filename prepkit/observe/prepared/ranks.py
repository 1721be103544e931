"""What ranks tell each other in an audit: one small exchange, and a second one where values differ."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from prepkit.facts.run import RankFacts, RunFacts
from prepkit.facts.window import GradientFacts
from prepkit.objects.bare_tree import is_sharded
from prepkit.objects.names import Site, parameters_at, sites
from prepkit.observe.fingerprints import summed
from prepkit.observe.fingerprints.parts import Part, as_computed
from prepkit.observe.fingerprints.tensor import fingerprint
from prepkit.observe.prepared.gradients import Gradient, judged_alike, told
from prepkit.observe.prepared.modules import generator
from prepkit.observe.prepared.optimizers import held_alike, inner, kept_of, options, unlike
from prepkit.ranks.world import ranks_of, world


def compared(
    facts: RunFacts,
    places: list[Site],
    optimizers: list[Any],
    stepped: Sequence[Gradient] | None,
    *,
    asks: bool,
    awaited: tuple[str, ...] = (),
) -> RunFacts:
    """Add what every rank has reported. Collective with ``asks``, where the default group has several ranks.

    One exchange: a few digests per rank, the optimizers' options, and some numbers for each gradient in ``stepped``;
    where values differ, a second one of a number per tensor. Raises what torch raises when a rank does not come.
    """
    own = told(stepped or ())
    if not (asks and world().carries_data):
        return _judged(facts, places, optimizers, stepped, [own])
    values = _values(facts, places)
    shards = {name: part for name, part in _shards(facts, places, values) if not part.values.is_meta}
    here = evolve(_told(facts, places, optimizers, values), awaits=awaited)
    everyone = world().gather((here, options(optimizers), own, sorted(shards)))
    ranks = tuple(rank for rank, _, _, _ in everyone)
    apart, own_sizes = unlike([held for _, held, _, _ in everyone]), _own_sizes(facts, ranks)
    parted = tuple(name for name in _parted(ranks, values) if name not in own_sizes)
    facts = evolve(facts, ranks=ranks, parted=parted, unlike=apart, own_sizes=own_sizes)
    if shards and all(names == everyone[0][3] for _, _, _, names in everyone):
        facts = evolve(facts, parted=(*facts.parted, *summed(shards).parted))
    stages = len({rank.names for rank in ranks}) > 1
    return _judged(facts, places, optimizers, stepped, [own] if stages else [one for _, _, one, _ in everyone])


def _judged(
    facts: RunFacts,
    places: list[Site],
    optimizers: list[Any],
    stepped: Sequence[Gradient] | None,
    everyone: Sequence[dict[str, list[float]]],
) -> RunFacts:
    if stepped is None:
        return evolve(facts, gradients=_waited_for(facts))
    scaled = any(hasattr(inner(one), "found_inf") for one in optimizers)  # a GradScaler lets it skip by itself
    return evolve(facts, gradients=judged_alike(stepped, places[0].slot, everyone, scaled=scaled))


def _waited_for(facts: RunFacts) -> GradientFacts | None:
    """What DDP has waited for on some rank, where nobody is about to step; None: for nothing."""
    names = tuple(dict.fromkeys(name for rank in facts.ranks for name in rank.awaits))
    ranks = tuple(rank.rank for rank in facts.ranks if rank.awaits)
    trained = sum(param.requires_grad for param in facts.params)
    return GradientFacts(stepped=trained, missing=names, awaited=names, awaited_on=ranks) if names else None


def _shards(facts: RunFacts, places: list[Site], whole: dict[str, int]) -> Iterator[tuple[str, Part]]:
    """Yield what is divided over ranks, of which others may hold the same part: copies of shards."""
    if facts.engine is None and any({"fsdp1", "fsdp2"} & set(param.averaged_by) for param in facts.params):
        yield from (one for one in as_computed(places[0].slot) if one[0] not in whole)


def _told(facts: RunFacts, places: list[Site], optimizers: list[Any], values: dict[str, int]) -> RankFacts:
    names = tuple(param.name for param in facts.model.params)
    state, keeps = _state(facts, places, optimizers)
    return RankFacts(
        rank=world().rank,
        names=_digest(names),
        model=_digest((_params(facts), facts.model.ties, tuple(buffer.name for buffer in facts.model.buffers))),
        values=_digest(values),
        generator=str(generator("cuda" if any(one.device == "cuda" for one in facts.params) else "cpu")),
        tensor_ranks=tensor_ranks(places),
        loaders=tuple((one.replicas, one.part, one.division, one.data) for one in facts.loaders),
        passes=tuple((one.batches, one.seen.batch_size, one.order) for one in facts.loaders),
        contents=tuple(one.content for one in facts.loaders),
        held_data=tuple(one.held for one in facts.loaders),
        picks=tuple(one.picked for one in facts.loaders),
        reads=tuple((one.indices, one.samples) for one in facts.loaders),
        modes=_digest(tuple(site.module.training for site in places)),
        scheduler=_digest(facts.scheduler),
        state=_digest(state),
        keeps=keeps,
        held=_digest(tuple(one.held for one in facts.optimizers)),
    )


def _state(facts: RunFacts, places: list[Site], optimizers: list[Any]) -> tuple[list[Any], frozenset[str]]:
    """Of what every rank steps alike; and of which of it there is more than zeros, where that is not of all.

    Of parameters under DDP, or under nothing, by optimizers that divide no state.
    """
    whole = {param.name for param in facts.params if set(param.averaged_by) <= {"ddp"}}
    params = {path: param for path, param in parameters_at(places) if path in whole}
    names = {id(param): path for path, param in params.items()}
    alike = [one for one in map(inner, optimizers) if type(one).__name__ != "ZeroRedundancyOptimizer"]
    kept = frozenset(name for one in alike for name in kept_of(one, names))
    return [held_alike(one, names) for one in alike], kept if len(kept) < len(names) else frozenset()


def resting_apart(called: Sequence[nn.Module]) -> tuple[str, ...]:
    """Classes of these modules, none of whose parameters trains, of which other ranks hold other values. Collective.

    Where ranks call the same ones, each whole: a stage, or a part of layers, is each rank's own.
    """
    held = [(type(one).__name__, list(one.parameters())) for one in called if not is_sharded(one)]
    held = [(name, params) for name, params in held if params and not any(one.requires_grad for one in params)]
    whole = [(name, params) for name, params in held if all(map(_is_plain, params))]
    mine = [(name, [tuple(one.shape) for one in params], sum(map(fingerprint, params))) for name, params in whole]
    every = world().gather(mine)
    if any([one[:2] for one in told] != [one[:2] for one in mine] for told in every):
        return ()
    return tuple(name for at, (name, _, _) in enumerate(mine) if len({told[at][2] for told in every}) > 1)


def tied_over_stages(model: nn.Module, looked_up: Collection[int]) -> tuple[tuple[str, str, int], ...]:
    """Matrices of this rank that begin as one of another stage does, and are about to step by another gradient.

    In one of the two ids were looked up (``looked_up``, by ``id``), in the other none: stages that were seeded alike
    have layers of one kind alike. Each with the other's name and rank. Collective where stages differ.
    """
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not world().carries_data or world().same([name for name, _ in trained]):
        return ()
    held = [(name, one) for name, one in trained if one.dim() == 2 and one.grad is not None and _is_plain(one)]
    mine = [
        (name, tuple(one.shape), id(one) in looked_up, fingerprint(one.detach()), fingerprint(one.grad))
        for name, one in held
        if one.grad is not None and one.grad.layout is torch.strided
    ]
    return tuple(
        (name, other, rank)
        for rank, told in enumerate(world().gather(mine))
        for other, *theirs, slope in told
        for name, *ours, own in mine
        if theirs[0] == ours[0] and theirs[1] != ours[1] and theirs[2] == ours[2] and slope != own
    )


def _is_plain(param: Tensor) -> bool:
    return type(param) in (Tensor, nn.Parameter) and not param.is_meta


def _params(facts: RunFacts) -> list[object]:
    """Parameters as every rank should see them; a view of FSDP1 has the shape of this rank's part."""
    cut = {param.name for param in facts.params if "fsdp1" in param.averaged_by}
    return [evolve(param, shape=()) if param.name in cut else param for param in facts.model.params]


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def tensor_ranks(places: list[Site]) -> tuple[int, ...]:
    """Ranks that hold parts of the layers that this rank holds parts of, the units of FSDP2 aside."""
    from prepkit.objects.fsdp2_units import is_unit

    sharded = any(is_unit(module) for site in places for module in site.stack)
    widest: tuple[int, ...] = (world().rank,)
    for site in places:
        for param in site.module._parameters.values():
            if isinstance(param, DTensor):
                mesh = param.device_mesh
                if sharded and mesh.ndim == 1:
                    continue
                ranks = _last_axis(mesh) if sharded else tuple(mesh.mesh.reshape(-1).tolist())
                widest = ranks if len(ranks) > len(widest) else widest
    return widest


def _last_axis(mesh: Any) -> tuple[int, ...]:
    """Tensor parallelism is the innermost axis under FSDP2 (torch ``fully_shard``: the mesh of shards comes first)."""
    if mesh.mesh_dim_names and not any("tp" in name or "tensor" in name for name in mesh.mesh_dim_names[-1:]):
        return ()
    return ranks_of(mesh.get_group(mesh.ndim - 1)).members


def _values(facts: RunFacts, places: list[Site]) -> dict[str, int]:
    """Fingerprints of the parameters and buffers that every rank holds whole and should hold alike."""
    averaged = {param.name: param.averaged_by for param in facts.params}
    found: dict[str, int] = {}
    seen: set[int] = set()
    for site in places:
        if not site.first:
            continue
        for name, tensor in (*site.module._parameters.items(), *_lasting(site.module)):
            if id(tensor) in seen:  # tied: its first name says who averages it
                continue
            seen.add(id(tensor))
            path = f"{site.path}.{name}" if site.path else name
            part = _whole(tensor) if tensor is not None and "fsdp1" not in averaged.get(path, ()) else None
            if part is not None and part.device.type != "meta" and getattr(tensor, "allreduce", True):
                found[path] = fingerprint(part)
    return found


def _lasting(module: nn.Module) -> tuple[tuple[str, Tensor | None], ...]:
    """Buffers, without what batch norms count in training: each rank counts its own batches."""
    counts = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
    return () if counts else tuple(module._buffers.items())


def _whole(tensor: Tensor) -> Tensor | None:
    """The tensor's data where this rank has all of it; None for a part."""
    if hasattr(tensor, "ds_tensor"):
        return None
    if isinstance(tensor, DTensor):
        whole = all(placement.is_replicate() for placement in tensor.placements)
        return tensor._local_tensor if whole else None  # to_local() would enter the graph of autograd
    return tensor


def _own_sizes(facts: RunFacts, ranks: tuple[RankFacts, ...]) -> tuple[str, ...]:
    """As in ``RunFacts``. Collective only where digests of models differ, which every rank sees alike."""
    if len({rank.model for rank in ranks}) == 1 or len({rank.names for rank in ranks}) > 1:
        return ()
    averaged = {param.name for param in facts.params if param.averaged_by}
    mine = {param.name: param.shape for param in facts.model.params}
    rest = [evolve(param, shape=()) for param in facts.model.params]
    each = world().gather((mine, _digest((rest, facts.model.ties, [one.name for one in facts.model.buffers]))))
    resized = {name for name in mine if any(shapes[name] != each[0][0][name] for shapes, _ in each)}
    if not resized or averaged & resized or len({digest for _, digest in each}) > 1:
        return ()
    own = tuple(name for name in mine if name not in averaged)
    places = {name.rpartition(".")[0] for name in own}
    return own + tuple(one.name for one in facts.model.buffers if one.name.rpartition(".")[0] in places)


def _parted(ranks: tuple[RankFacts, ...], values: dict[str, int]) -> tuple[str, ...]:
    """Names of what differs. Collective only where digests do, which every rank sees alike."""
    if len({rank.values for rank in ranks}) == 1 or len({rank.names for rank in ranks}) > 1:
        return ()
    return other_values(values)


def other_values(values: dict[str, int]) -> tuple[str, ...]:
    """Names under which some rank has another number than the first one. Collective."""
    gathered = world().gather(values)
    return tuple(name for name in gathered[0] if len({other.get(name) for other in gathered}) > 1)


def buffers_apart(model: nn.Module) -> tuple[str, ...]:
    """Buffers of a checkpoint that ranks hold unlike. Collective where some rank has any.

    None under DDP that sends rank 0's before each forward: what the others have then lasts until the next one.
    """
    sent = isinstance(model, DistributedDataParallel) and model.broadcast_buffers
    if sent or not world().carries_data:
        return ()
    found: dict[str, int] = {}
    for site in sites(model):
        for name, buffer in site.module._buffers.items() if site.first else ():
            held = None if name in site.module._non_persistent_buffers_set or buffer is None else _whole(buffer)
            if held is not None and held.device.type != "meta" and held.layout is torch.strided:
                found[f"{site.path}.{name}" if site.path else name] = fingerprint(held)
    return other_values(found)
