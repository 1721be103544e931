"""Steps that give the model its values, where it does not bring them along."""

from __future__ import annotations

from posixpath import join

from prepkit.config import FSDP2, Config, InitWeights, KeepWeights, LoadWeights, OffloadToCPU, SendWeights
from prepkit.facts import BufferFact, Facts, ParamFact
from prepkit.facts.checkpoint import CheckpointFacts
from prepkit.plan import because
from prepkit.planner import pieces
from prepkit.planner.outcome import layout
from prepkit.planner.pieces import Piece
from prepkit.resolve.checkpoint import asked, computed, initialised, match
from prepkit.resolve.fsdp2 import unit_paths
from prepkit.resolve.mesh import axes
from prepkit.steps import (
    AllocateTensors,
    CheckFiles,
    File,
    FileSlice,
    InitializeTensors,
    LocalDevice,
    ReadTensors,
    SendTensors,
    StashTensors,
    Transfer,
)


def fills(cfg: Config) -> bool:
    """Whether the plan gives the model its values, so that it may be on meta."""
    return not isinstance(cfg.weights, KeepWeights)


def check_files(cfg: Config, facts: Facts) -> Piece:
    """A look at the files before anything is changed, as sharding has no way back."""
    if (checkpoint := asked(cfg, facts)) is None:
        return ()
    reason = "a file that is missing or another one on any rank is an error on every rank, before anything is changed"
    return because(CheckFiles(files=_files(checkpoint)), reason, "G-62", "G-67")


def set_aside(cfg: Config, facts: Facts) -> Piece:
    """Rank 0's values are kept out of the model that is sharded, so that it is on meta on every rank."""
    if not isinstance(cfg.weights, SendWeights):
        return ()
    model = facts.model
    step = StashTensors(params=tuple(p.name for p in model.params), buffers=tuple(b.name for b in model.buffers))
    reason = "on every rank the model is cut and sharded without values, whoever has them"
    return because(step, reason, "M2-8", "H-19")


def move(cfg: Config, facts: Facts) -> Piece:
    """Model to its device; none where ``fill`` puts it there later, because what has no values cannot be moved."""
    return () if fills(cfg) else pieces.move(cfg, facts)


def fill(cfg: Config, facts: Facts) -> Piece:
    """Storage for what is on meta, then values: computed, read, or both. Nothing where the model keeps its own."""
    if not fills(cfg):
        return ()
    offloads = isinstance(cfg.engine, FSDP2) and isinstance(cfg.engine.offload, OffloadToCPU)
    computes = LocalDevice(type=pieces.device(cfg, facts))
    device = LocalDevice(type="cpu") if offloads else computes
    what = "each rank holds its shards, and never the whole model"
    if not isinstance(cfg.engine, FSDP2):
        what = "on the device at once, and not first on the host"
    step = AllocateTensors(device=device, buffers=computes if computes != device else None)
    return (
        because(step, what, "M2-8", "M2-14", "pain 17")
        + _initialise(cfg, facts)  # before reading: what a checkpoint holds has the last word
        + _read(cfg, facts)
        + _send(cfg, facts)
    )


def _initialise(cfg: Config, facts: Facts) -> Piece:
    params, buffers = initialised(cfg, facts), computed(cfg, facts)
    if not params and not buffers:
        return ()
    units = unit_paths(cfg.engine, facts.model) if isinstance(cfg.engine, FSDP2) else ()
    seed = cfg.weights.seed if isinstance(cfg.weights, InitWeights) else 0
    step = InitializeTensors(params=params, buffers=buffers, units=(*units, ""), seed=seed)
    reason = "one seed for each module's path: the same values on every rank, for every world size"
    if not params:
        reason = "buffers that no checkpoint holds are computed by their own modules, should they be on meta"
    return because(step, reason, "G-5", "H-18", "pain 17")


def _read(cfg: Config, facts: Facts) -> Piece:
    if (checkpoint := asked(cfg, facts)) is None or not isinstance(cfg.weights, LoadWeights):
        return ()
    mesh = axes(cfg, facts.env) or ()
    placements = {one.name: one.placements for one in layout(cfg, facts, mesh)}
    sources = tuple(
        FileSlice(
            name=filled.name,
            key=stored.key,
            file=stored.file,
            start=stored.start,
            dtype=stored.dtype,
            shape=filled.shape,
            placements=placements.get(filled.name, ()),
            chunk=block,
        )
        for filled in match(facts.model, checkpoint).found
        for stored, block in zip(filled.stored, filled.blocks, strict=True)
    )
    step = ReadTensors(files=_files(checkpoint), sources=sources, axes=mesh)
    reason = "planned byte ranges go straight into the final storage: no collective, and no rank holds the whole"
    return because(step, reason, "M2-13", "G-11", "G-62", "G-67")


def _send(cfg: Config, facts: Facts) -> Piece:
    if not isinstance(cfg.weights, SendWeights):
        return ()
    mesh = axes(cfg, facts.env) or ()
    placements = {one.name: one.placements for one in layout(cfg, facts, mesh)}
    held: list[ParamFact | BufferFact] = [*facts.model.params, *facts.model.buffers]
    tensors = tuple(
        Transfer(name=one.name, dtype=one.dtype, shape=one.shape, placements=placements.get(one.name, ()))
        for one in held
    )
    step = SendTensors(tensors=tensors, axes=mesh)
    reason = "each part leaves rank 0 once, its first keeper hands it on to others, and none holds more but one piece"
    return because(step, reason, "M2-13", "M2-14", "H-18", "H-19", "G-11", "pain 17")


def _files(checkpoint: CheckpointFacts) -> tuple[File, ...]:
    return tuple(
        File(path=join(checkpoint.folder, file.name), size=file.size, header=file.header, data=file.data)
        for file in checkpoint.files
    )
