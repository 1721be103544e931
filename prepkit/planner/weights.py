"""Steps that give the model its values, where it does not bring them along."""

from __future__ import annotations

from math import prod
from posixpath import join

from prepkit.config import BroadcastWeights, InitWeights, WrapBlocks
from prepkit.facts import BufferFact, ParamFact
from prepkit.facts.checkpoint import CheckpointFacts
from prepkit.plan import because
from prepkit.plan.layout import chunk_rows
from prepkit.planner import pieces
from prepkit.planner.pieces import Piece
from prepkit.resolve.modules import select
from prepkit.resolve.resolved import Resolved
from prepkit.steps import (
    AllocateTensors,
    CheckFiles,
    File,
    FileSlice,
    FlatPlace,
    InitializeTensors,
    LocalDevice,
    ReadTensors,
    SendTensors,
    StashTensors,
    Transfer,
)


def gives_values(resolved: Resolved) -> bool:
    """Whether the plan gives the model its values, so that it may be on meta."""
    return resolved.cfg.weights is not None


def check_files(resolved: Resolved) -> Piece:
    """A look at the files before anything is changed, as sharding has no way back."""
    if (checkpoint := resolved.values.checkpoint) is None:
        return ()
    reason = "a file that is missing or another one on any rank is an error on every rank, before anything is changed"
    return because(CheckFiles(files=_files(checkpoint)), reason, "G-62", "G-67")


def stash(resolved: Resolved) -> Piece:
    """Rank 0's values are kept out of the model that is sharded, so that it is on meta on every rank."""
    if not isinstance(resolved.cfg.weights, BroadcastWeights):
        return ()
    model = resolved.facts.model
    step = StashTensors(params=tuple(p.name for p in model.params), buffers=tuple(b.name for b in model.buffers))
    reason = "on every rank the model is cut and sharded without values, whoever has them"
    return because(step, reason, "M2-8", "H-19")


def move(resolved: Resolved) -> Piece:
    """Model to its device; none where ``fill`` puts it there later, because what has no values cannot be moved."""
    return () if gives_values(resolved) else pieces.move(resolved)


def fill(resolved: Resolved) -> Piece:
    """Storage for what is on meta, then values: computed, read, or both. Nothing where the model keeps its own."""
    if not gives_values(resolved):
        return ()
    computes = LocalDevice(type=resolved.compute_device)
    device = LocalDevice(type="cpu") if resolved.offloads else computes
    what = "on the device at once, and not first on the host"
    if resolved.engine_traits.makes_dtensors:
        what = "each rank holds its shards, and never the whole model"
    step = AllocateTensors(device=device, buffers=computes if computes != device else None)
    # Unit by unit, or parameter by parameter: FSDP1 flattens, and ZeRO-3 divides, what has storage.
    allocates_itself = resolved.engine_traits.flattens or resolved.zero_stage == 3
    return (
        (() if allocates_itself else because(step, what, "M2-8", "M2-14", "pain 17"))
        + _initialize(resolved)  # before reading: what a checkpoint holds has the last word
        + _read(resolved)
        + _send(resolved)
    )


def _initialize(resolved: Resolved) -> Piece:
    cfg = resolved.cfg
    params, buffers = resolved.values.initialized_params, resolved.values.computed_buffers
    if not params and not buffers:
        return ()
    seed = cfg.weights.seed if isinstance(cfg.weights, InitWeights) else 0
    # ZeRO-3 has no units; its parameters are whole by blocks, or every rank would hold the whole model.
    units = select(WrapBlocks(), resolved.facts.model) if resolved.zero_stage == 3 else resolved.units
    step = InitializeTensors(params=params, buffers=buffers, units=(*units, ""), seed=seed)
    reason = "one seed for each module's path: the same values on every rank, for every world size"
    if not params:
        reason = "buffers that no checkpoint holds are computed by their own modules, should they be on meta"
    return because(step, reason, "G-5", "H-18", "pain 17")


def _read(resolved: Resolved) -> Piece:
    if (checkpoint := resolved.values.checkpoint) is None:
        return ()
    match = resolved.values.match
    sources = tuple(
        FileSlice(
            name=tensor.name,
            key=stored.key,
            file=stored.file,
            start=stored.start,
            dtype=stored.dtype,
            shape=tensor.shape,
            placements=() if place else resolved.placements.get(tensor.name, ()),
            chunk=block,
            flat=place,
        )
        for tensor in (match.assembled if match else ())
        for place in (_place(resolved, tensor.name, tensor.shape),)
        for stored, block in zip(tensor.stored, tensor.blocks, strict=True)
    )
    step = ReadTensors(files=_files(checkpoint), sources=sources, axes=resolved.planned_mesh)
    reason = "planned byte ranges go straight into the final storage: no collective, and no rank holds the whole"
    return because(step, reason, "M2-13", "G-11", "G-62", "G-67")


def _send(resolved: Resolved) -> Piece:
    if not isinstance(resolved.cfg.weights, BroadcastWeights):
        return ()
    facts: list[ParamFact | BufferFact] = [*resolved.facts.model.params, *resolved.facts.model.buffers]
    placements = resolved.placements
    rows = tuple("partition" if axis.name == "shard" else "replicate" for axis in resolved.planned_mesh)
    tensors = tuple(
        Transfer(
            name=fact.name,
            dtype=fact.dtype,
            shape=(prod(fact.shape),) if place else fact.shape,
            placements=rows if place and place.axis else placements.get(fact.name, ()),
            flat=place,
        )
        for fact, place in ((fact, _place(resolved, fact.name, fact.shape)) for fact in facts)
    )
    step = SendTensors(tensors=tensors, axes=resolved.planned_mesh)
    reason = "each part leaves rank 0 once, its first keeper hands it on to others, and none holds more but one piece"
    return because(step, reason, "M2-13", "M2-14", "H-18", "H-19", "G-11", "pain 17")


def _place(resolved: Resolved, name: str, shape: tuple[int, ...]) -> FlatPlace | None:
    if "partition" in resolved.placements.get(name, ()):
        # deepspeed partition_parameters.py _partition_param: of each parameter equal runs of elements, the last padded
        return FlatPlace(start=0, shard=chunk_rows(prod(shape), resolved.axis_size("shard")), axis="shard")
    part = resolved.flat_shards.get(name)
    if part is None:
        return None
    return FlatPlace(start=part.start, shard=part.shard, axis="shard" if part.shards > 1 else "")


def _files(checkpoint: CheckpointFacts) -> tuple[File, ...]:
    return tuple(
        File(path=join(checkpoint.folder, file.name), size=file.size, header=file.header, data=file.data)
        for file in checkpoint.files
    )
