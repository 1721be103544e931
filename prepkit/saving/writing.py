"""Writing a checkpoint: beside the last good one, by every rank its part, and swapped in when all of it is there."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from prepkit.facts.saved_run import SavedFacts, SavedFile, SavedRun
from prepkit.objects.flat_range import FlatRange
from prepkit.ranks.world import new_group, ranks_of, world
from prepkit.saving import files
from prepkit.saving import folder as folders
from prepkit.saving.contents import nested
from prepkit.saving.failures import failed, on_every_rank, torch_failure
from prepkit.saving.files import METADATA, SHARED, own_file
from prepkit.saving.planners import SavePlanner
from prepkit.version import VERSION

LOG = logging.getLogger("prepkit")
NOT_WRITTEN = "checkpoint.not-written"

PATIENCE_S = 60.0
"""Seconds that a run which ends with an error waits for a checkpoint that is being written."""


@frozen(kw_only=True)
class Snapshot:
    """Everything that one rank contributes to a checkpoint; tensors are the live ones until they are staged."""

    tensors: dict[str, Any]
    own: bytes
    """Of this rank alone: random states, loader positions."""
    shared: bytes
    texts: dict[str, str]
    """Files that rank 0 writes besides: the plan, the attestation."""
    run: SavedFacts
    steps: int
    epoch: int


@frozen
class Destination:
    """Where a checkpoint is written, and which others of the folder stay when it is whole."""

    folder: str
    draft: Path
    keep: int
    """The newest so many of this run stay."""
    spared: tuple[str, ...]
    """Names of those of other runs, which all stay."""


@define
class Writer:
    """Writes checkpoints, one at a time; in the background where it is asked to."""

    pending: Future[None] | None = None
    """The checkpoint that is being written."""
    group: dist.ProcessGroup | None = field(default=None)
    """Of the background's own collectives, on gloo; made once."""
    _of: Any = None
    known: set[str] = field(factory=set)
    """Names of checkpoints of this run: those that it wrote, and those that were there when it was resumed."""
    stager: Any = None
    """Copies to host memory, into the same memory every time: a page that is new costs more than the copy."""

    def save(self, folder: str, snapshot: Snapshot, *, keep: int, wait: bool, spared: tuple[str, ...]) -> None:
        """Write one. Collective; returns when it counts or, without ``wait``, when it is copied to host memory.

        Raises ``CheckpointFailed`` on every rank, also for the one before that was written in the background.
        """
        self.finish()
        place = Destination(folder, folders.begin(folder, snapshot.steps), keep, spared)
        self.known.add(place.draft.name.removesuffix(folders.PARTIAL))
        on_every_rank(lambda: place.draft.mkdir(parents=True, exist_ok=True), NOT_WRITTEN, folder)
        if wait:
            _write_whole(place, snapshot, nested(snapshot.tensors), None)
            return
        group = self._background_group()
        self.stager = self.stager or _stager()
        staged = _staged(self.stager, snapshot.tensors)
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepkit-save")
        self.pending = executor.submit(_write_in_background, place, snapshot, staged, group)
        executor.shutdown(wait=False)

    def goes_on_from(self, folder: str) -> None:
        """Count what is in the folder as this run's, which was resumed there."""
        here = Path(folder)  # which may be one checkpoint itself
        self.known |= {path.name for place in (here, here.parent) for path in folders.checkpoints(str(place))}

    def others(self, folder: str) -> tuple[str, ...]:
        """Names of the checkpoints there that another run has written, newest first."""
        return tuple(path.name for path in folders.checkpoints(folder) if path.name not in self.known)

    def finish(self) -> None:
        """Wait for what is being written. Raises ``CheckpointFailed`` where it could not be."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait for what is being written, and let go of the memory for copies. Raises as ``finish`` does."""
        try:
            self.finish()
        finally:
            if self.stager is not None:
                self.stager.close()
                self.stager = None

    def leave(self) -> None:
        """Wait a while for what is being written, and raise nothing: an error is under way, which has to come out."""
        if self.pending is not None:
            wait_for([self.pending], timeout=PATIENCE_S)

    def _background_group(self) -> dist.ProcessGroup | None:
        """Collectives of the background would mix with those of training on any other group."""
        if not world().running:
            return None
        if self.group is None or self._of is not dist.group.WORLD:
            self.group, self._of = new_group("gloo"), dist.group.WORLD
        return self.group


def _stager() -> Any:
    """Torch's stager, which keeps its memory; None where torch has none yet (before 2.9)."""
    try:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    except ImportError:
        return None
    on_gpu = torch.cuda.is_available()
    return DefaultStager(
        StagingOptions(on_gpu, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=on_gpu)
    )


def _staged(stager: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """The state as torch takes it, copied to host memory."""
    if stager is not None:
        staged: dict[str, Any] = stager.stage(nested(tensors))
        return staged
    copies = {name: one.staged() if isinstance(one, FlatRange) else _host(one) for name, one in tensors.items()}
    return nested(copies)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def write(tensors: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Write the tensors as torch's distributed checkpoint. Collective over ``group``; raises ``CheckpointFailed``."""
    writer, planner = FileSystemWriter(folder), SavePlanner()
    if world().running:
        with torch_failure(NOT_WRITTEN, folder.parent):
            save(tensors, storage_writer=writer, planner=planner, process_group=group)
        return
    on_every_rank(lambda: _write_alone(tensors, writer, planner), NOT_WRITTEN, folder.parent)


def _write_alone(tensors: dict[str, Any], writer: FileSystemWriter, planner: SavePlanner) -> None:
    """Take the steps that torch's ``save`` takes without a process group, of which it would warn each time."""
    planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    written.wait()
    writer.finish(metadata, [written.value()])


def _write_whole(
    place: Destination, snapshot: Snapshot, tensors: dict[str, Any], group: dist.ProcessGroup | None
) -> None:
    try:
        write(tensors, place.draft, group)
        _complete(place, snapshot, group)
    except BaseException:
        _discard(place.draft)
        raise


def _write_in_background(
    place: Destination, snapshot: Snapshot, tensors: dict[str, Any], group: dist.ProcessGroup | None
) -> None:
    """Log at once what goes wrong, which the next call raises."""
    try:
        _write_whole(place, snapshot, tensors, group)
    except Exception as error:
        LOG.error("%s", error)  # noqa: TRY400 - the message says all
        raise


def try_folder(folder: str, snapshot: Snapshot) -> None:
    """Write what is small of a checkpoint, look for it, and remove it again. Collective.

    Raises ``CheckpointFailed`` for a folder that some rank cannot write, or that is another one on some rank.
    """
    draft = folders.begin(folder, snapshot.steps)

    def seen_by_rank_0() -> None:
        missing = [rank for rank in range(world().size) if not (draft / own_file(rank)).is_file()]
        if world().is_first and missing:
            raise failed("checkpoint.not-shared", folder, f"rank 0 does not see what ranks {missing} have written")

    try:
        on_every_rank(lambda: draft.mkdir(parents=True, exist_ok=True), NOT_WRITTEN, folder)
        on_every_rank(lambda: _write_small(draft, snapshot), NOT_WRITTEN, folder)
        on_every_rank(seen_by_rank_0, NOT_WRITTEN, folder)
    finally:
        _discard(draft)


def _write_small(draft: Path, snapshot: Snapshot) -> None:
    """Write the files that are not torch's."""
    files.write_bytes(draft / own_file(world().rank), snapshot.own)
    if world().is_first:
        files.write_bytes(draft / SHARED, snapshot.shared)
        for name, text in snapshot.texts.items():
            files.write_bytes(draft / name, text.encode())


def _complete(place: Destination, snapshot: Snapshot, group: dist.ProcessGroup | None) -> None:
    """Once torch has written its files: digests of all, the manifest, and the swap. Collective over ``group``."""
    draft = place.draft
    on_every_rank(lambda: _write_small(draft, snapshot), NOT_WRITTEN, place.folder, group)
    mine = on_every_rank(lambda: files.digests(draft, _names(draft, snapshot)), NOT_WRITTEN, place.folder, group)
    parts = ranks_of(group).gather(mine)

    def publish() -> None:
        if world().is_first:
            every: tuple[SavedFile, ...] = tuple(file for part in parts for file in part)
            run = SavedRun(
                prepkit=VERSION,
                torch=torch.__version__,
                steps=snapshot.steps,
                epoch=snapshot.epoch,
                run=snapshot.run,
                files=every,
            )
            files.write_manifest(draft, run)
            files.read_manifest(draft)  # as a resume will: the files of every rank are in this folder
            folders.publish(draft, place.keep, place.spared)

    on_every_rank(publish, NOT_WRITTEN, place.folder, group)


def _names(draft: Path, snapshot: Snapshot) -> list[str]:
    """The files that this rank has written."""
    rank = world().rank
    tensors = sorted(path.name for path in draft.glob(f"__{rank}_*"))
    more = [METADATA, SHARED, *snapshot.texts] if rank == 0 else []
    return [*tensors, own_file(rank), *more]


def _discard(draft: Path) -> None:
    if world().is_first:
        folders.discard(draft)
