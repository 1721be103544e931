"""Steps that bring values to the model, and those of its loaders."""

from __future__ import annotations

from math import prod
from posixpath import join

from prepkit.config import BroadcastWeights, InitWeights, KeepLoaders, ShardLoaders, WrapBlocks
from prepkit.facts import BufferFact, LoaderFacts, ParamFact
from prepkit.facts.checkpoint import CheckpointFacts
from prepkit.findings.text import count
from prepkit.plan import because
from prepkit.plan.layout import chunk_rows
from prepkit.planner import pieces
from prepkit.planner.pieces import Piece, is_spread
from prepkit.resolve import loaders
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
    ShardLoader,
    StashTensors,
    Transfer,
    WrapLoader,
)


def gives_values(resolved: Resolved) -> bool:
    """Return whether the plan gives the model its values, so that it may be on meta."""
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


def prepare_loaders(resolved: Resolved) -> Piece:
    """Each loader divided, where it is, and then wrapped."""
    world = resolved.facts.env.world_size
    steps: Piece = ()
    for index, loader in enumerate(resolved.facts.loaders):
        how = loaders.choice(resolved.cfg, index)
        if isinstance(how, ShardLoaders) and loaders.is_divided(how, loader, world):
            steps += _shard(resolved, index, loader, how)
        steps += _wrap(resolved, index, how)
    return steps


def _readers(resolved: Resolved) -> tuple[tuple[str, ...] | None, int]:
    """Axes of the mesh over which data is divided, and how many neighbours read the same where there is no mesh."""
    axes = resolved.data_axes
    if resolved.engine_traits.own_layout:
        return None, resolved.facts.env.world_size // resolved.data_parallel_size
    return axes, 1


def _shard(resolved: Resolved, index: int, loader: LoaderFacts, how: ShardLoaders) -> Piece:
    axes, same = _readers(resolved)
    parts = resolved.data_parallel_size
    step = ShardLoader(
        index=index,
        shuffle=loader.sampler == "random",
        seed=how.seed if loader.iterable or how.draws == "seed" else None,
        drop_last=how.drop_last,
        axes=axes,
        same_data=same,
        split="stream" if how.dispatch and loader.iterable else loaders.split(loader, parts),
        batch_size=loaders.batch_size(how, loader, parts) if how.split_batches else None,
        dispatch=how.dispatch and resolved.facts.env.world_size > 1,
        spread=how.purpose == "evaluation",
        fill=how.whole_batches and how.purpose == "training",
    )
    reason, *rows = _why_divided(resolved, parts, axes is not None or same > 1)
    repeated = loaders.repeats(how, loader, parts)
    if repeated and loader.length is not None:
        counts = "; gather_for_metrics leaves them out" if how.purpose == "evaluation" else ""
        reason += f"; {repeated} of {count(loader.length, 'sample')} are read twice{counts}"
    return because(step, reason, *rows)


def _why_divided(resolved: Resolved, parts: int, tensor: bool) -> tuple[str, ...]:
    if resolved.facts.env.world_size == 1:
        return "the order follows from seed and epoch, as on any number of ranks", "DL-10", "DL-28"
    if not tensor:
        return "every rank reads its own samples", "DL-15"
    if parts > 1:
        return "tensor ranks read the same samples, all others their own", "DL-15", "DL-6", "DL-7", "G-47"
    return "all ranks read the same", "DL-15", "DL-6", "DL-7", "G-47"


def _wrap(resolved: Resolved, index: int, how: ShardLoaders | KeepLoaders) -> Piece:
    axes, same = _readers(resolved)
    moves = how.to_device and not is_spread(resolved)
    step = WrapLoader(
        index=index,
        device=LocalDevice(type=resolved.compute_device) if moves else None,
        ends_window=how.ends_window and how.purpose == "training" and resolved.trains,
        evaluation=how.purpose == "evaluation",
        axes=axes,
        same_data=same,
    )
    where = f"batches arrive on {resolved.compute_device}" if moves else "batches stay where the loader leaves them"
    return because(step, f"{where}; epochs advance by themselves", "DL-23", "DL-27", "DL-28")
