"""Writing a checkpoint: beside the last good one, by every rank its part, and swapped in when all of it is there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as write

from prepkit.facts.saved_run import RunFacts, SavedFile, SavedRun
from prepkit.findings.text import count
from prepkit.live.checkpoints import folder as folders
from prepkit.live.checkpoints import manifest
from prepkit.live.checkpoints.contents import nested
from prepkit.live.checkpoints.failures import CheckpointFailed, on_every_rank, quiet_alone, torch_told
from prepkit.live.checkpoints.flat_range import FlatRange, SavePlanner
from prepkit.live.checkpoints.metadata import FILE as METADATA
from prepkit.version import VERSION

SHARED = "shared.pt"
"""What is the same on every rank: scheduler, scaler, options of the optimizer's groups."""

LOG = logging.getLogger("prepkit")


@frozen(kw_only=True)
class Snapshot:
    """Everything that one rank contributes to a checkpoint; tensors are the live ones until they are staged."""

    tensors: dict[str, Any]
    own: bytes
    """Of this rank alone: random states, loader positions."""
    shared: bytes
    texts: dict[str, str]
    """Files that rank 0 writes besides: the plan, the attestation."""
    run: RunFacts
    steps: int
    epoch: int


@frozen
class Kept:
    """Which checkpoints of the folder stay when a new one is whole."""

    number: int
    """The newest so many of this run."""
    spared: frozenset[str]
    """Names of those of other runs."""


@define
class Writer:
    """Writes checkpoints, one at a time; in the background where it is asked to."""

    pending: Future[None] | None = None
    """The checkpoint that is being written."""
    group: dist.ProcessGroup | None = field(default=None)
    """Of the background's own collectives, on gloo; made once."""
    _of: Any = None
    known: set[str] = field(factory=set)
    """Names of checkpoints of this run: those that it wrote, and those that lay where it was resumed."""
    _told: set[str] = field(factory=set)
    """Folders of another run's checkpoints that were warned of."""
    stager: Any = None
    """Copies to host memory, into the same memory every time: a page that is new costs more than the copy."""

    def save(self, folder: str, snapshot: Snapshot, *, keep: int, wait: bool) -> None:
        """Collective. Returns when the checkpoint counts or, without ``wait``, when it has been copied to host memory.

        Raises ``CheckpointFailed`` on every rank, also for the one before that was written in the background.
        """
        self.finish()
        quiet_alone()
        spared = self._of_others(folder, snapshot.steps)
        draft = folders.begin(folder, snapshot.steps)
        self.known.add(draft.name.removesuffix(folders.PARTIAL))
        failed = f"{folder} could not be written"
        on_every_rank(lambda: draft.mkdir(parents=True, exist_ok=True), failed)
        if wait:
            self._write_now(draft, snapshot, Kept(keep, spared), failed)
        else:
            self._write_behind(draft, snapshot, Kept(keep, spared), failed)

    def goes_on_from(self, folder: str) -> None:
        """What lies in the folder is of this run, which was resumed there."""
        here = Path(folder)  # which may be one checkpoint itself
        self.known |= {path.name for place in (here, here.parent) for path in folders.checkpoints(str(place))}

    def _of_others(self, folder: str, steps: int) -> frozenset[str]:
        """Names of the checkpoints there that another run has written; rank 0 warns of them, once."""
        others = [path.name for path in folders.checkpoints(folder) if path.name not in self.known]
        if others and folder not in self._told and _rank() == 0:
            self._told.add(folder)
            LOG.warning(
                "%s holds %s of a run that this one did not resume, %s the newest; they are left alone, and the "
                "latest is now that of step %d of this run. Give each run a folder of its own, or go on with "
                "ready.resume(folder)",
                folder,
                count(len(others), "checkpoint"),
                others[0],
                steps,
            )
        return frozenset(others)

    def finish(self) -> None:
        """Waits for what is being written. Raises ``CheckpointFailed`` where it could not be."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for what is being written, and lets go of the memory for copies."""
        self.finish()
        if self.stager is not None:
            self.stager.close()
            self.stager = None

    def _write_now(self, draft: Path, snapshot: Snapshot, kept: Kept, failed: str) -> None:
        try:
            with torch_told(failed):
                write(
                    nested(snapshot.tensors),
                    storage_writer=FileSystemWriter(draft),
                    planner=SavePlanner(),
                    no_dist=not dist.is_initialized(),
                )
            _complete(draft, snapshot, kept, failed, None)
        except CheckpointFailed:
            _discard(draft)
            raise

    def _write_behind(self, draft: Path, snapshot: Snapshot, kept: Kept, failed: str) -> None:
        group = self._background_group()
        done: Future[None] = Future()
        self.stager = self.stager or _stager()
        how: dict[str, Any] = {} if self.stager is None else {"async_stager": self.stager}
        tensors = snapshot.tensors if how else _copied(snapshot.tensors)
        started: Any = async_save(
            nested(tensors),
            storage_writer=FileSystemWriter(draft),
            **how,
            planner=SavePlanner(),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
        complete = partial(_complete, draft, snapshot, kept, failed, group)
        started.add_done_callback(lambda future: _finish(future, done, complete, draft, failed))
        self.pending = done

    def _background_group(self) -> dist.ProcessGroup | None:
        """Collectives of the background would mix with those of training on any other group."""
        if not dist.is_initialized():
            return None
        if self.group is None or self._of is not dist.group.WORLD:
            self.group, self._of = dist.new_group(backend="gloo"), dist.group.WORLD
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


def _copied(tensors: dict[str, Any]) -> dict[str, Any]:
    """For a torch that copies only tensors by itself."""
    return {name: one.staged() if isinstance(one, FlatRange) else one for name, one in tensors.items()}


def try_folder(folder: str, snapshot: Snapshot) -> None:
    """Writes what is small of a checkpoint, reads it back, and removes it again. Collective.

    Raises ``CheckpointFailed`` for a folder that some rank cannot write, or that is another one on some rank.
    """
    draft = folders.begin(folder, snapshot.steps)
    failed = f"{folder} cannot hold checkpoints"

    def seen_by_rank_0() -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        missing = [rank for rank in range(world) if not (draft / own_file(rank)).is_file()]
        if _rank() == 0 and missing:
            fix = "give a folder on a file system that all of them share"
            raise CheckpointFailed(f"rank 0 does not see what ranks {missing} have written there; {fix}")

    try:
        on_every_rank(lambda: draft.mkdir(parents=True, exist_ok=True), failed)
        on_every_rank(lambda: _write_small(draft, snapshot), failed)
        on_every_rank(seen_by_rank_0, failed)
    finally:
        _discard(draft)


def own_file(rank: int) -> str:
    """The name of a rank's own file."""
    return f"rank-{rank:05d}.pt"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _write_small(draft: Path, snapshot: Snapshot) -> None:
    """The files that are not torch's."""
    manifest.write_bytes(draft / own_file(_rank()), snapshot.own)
    if _rank() == 0:
        manifest.write_bytes(draft / SHARED, snapshot.shared)
        for name, text in snapshot.texts.items():
            manifest.write_bytes(draft / name, text.encode())


def _complete(draft: Path, snapshot: Snapshot, kept: Kept, failed: str, group: dist.ProcessGroup | None) -> None:
    """Once torch has written its files: digests of all, the manifest, and the swap. Collective over ``group``."""
    on_every_rank(lambda: _write_small(draft, snapshot), failed, group)
    mine = on_every_rank(lambda: manifest.digests(draft, _names(draft, snapshot)), failed, group)
    parts: list[Any] = [mine]
    if dist.is_initialized():
        parts = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, mine, group=group)

    def publish() -> None:
        if _rank() == 0:
            files: tuple[SavedFile, ...] = tuple(file for part in parts for file in part)
            run = SavedRun(
                prepkit=VERSION,
                torch=torch.__version__,
                steps=snapshot.steps,
                epoch=snapshot.epoch,
                run=snapshot.run,
                files=files,
            )
            manifest.write(draft, run)
            manifest.read(draft)  # as whoever goes on from it will: that every rank's files are in this folder
            folders.publish(draft, kept.number, kept.spared)

    on_every_rank(publish, failed, group)


def _names(draft: Path, snapshot: Snapshot) -> list[str]:
    """The files that this rank has written."""
    rank = _rank()
    tensors = sorted(path.name for path in draft.glob(f"__{rank}_*"))
    more = [METADATA, SHARED, *snapshot.texts] if rank == 0 else []
    return [*tensors, own_file(rank), *more]


def _discard(draft: Path) -> None:
    if _rank() == 0:
        folders.discard(draft)


def _finish(written: Future[Any], done: Future[None], complete: Callable[[], None], draft: Path, failed: str) -> None:
    """Runs in the thread that has written. What goes wrong is logged at once, and raised by the next call."""
    try:
        with torch_told(failed):
            written.result()
        complete()
    except BaseException as error:
        _discard(draft)
        LOG.error("%s", error)  # noqa: TRY400 - the message says all; it is raised again by the next call
        done.set_exception(error if isinstance(error, CheckpointFailed) else CheckpointFailed(f"{failed}: {error}"))
        return
    done.set_result(None)
