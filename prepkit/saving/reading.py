"""Reading a checkpoint: found, checked byte by byte, held against the run here, and only then read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from prepkit.facts.saved_run import ResumeFacts, SavedRun
from prepkit.ranks.world import world
from prepkit.saving import contents, files
from prepkit.saving import folder as folders
from prepkit.saving.contents import Contents
from prepkit.saving.failures import CheckpointFailed, failed, on_every_rank, torch_failure
from prepkit.saving.files import MANIFEST, METADATA, SHARED, own_file
from prepkit.saving.planners import LoadPlanner

NOT_READ = "checkpoint.not-read"


@frozen(kw_only=True)
class WholeCheckpoint:
    """A checkpoint that is whole, and what is in it."""

    path: Path
    torn: tuple[str, ...] = ()
    """Problems of newer checkpoints in the folder."""
    saved: SavedRun | None
    """None: torch has written it without prepkit, and nobody knows the run that it is of."""
    metadata: Metadata
    shared: dict[str, Any]
    """State that is the same on every rank; empty without a manifest."""
    own: dict[str, Any] | None
    """State of this rank alone; None where fewer ranks were saved."""

    @property
    def names(self) -> dict[str, tuple[int, ...] | None]:
        """Everything that it holds of model and optimizer, and the shapes of tensors."""
        shapes = {name: tuple(one.size) for name, one in files.tensors(self.metadata).items()}
        return {**dict.fromkeys(self.shared.get("plain", {})), **shapes}


def open_source(folder: str) -> WholeCheckpoint:
    """Open the newest whole checkpoint in the folder, its bytes checked. Collective: every rank checks its share.

    Raises ``CheckpointFailed`` on every rank where there is none, and where a byte is not as it was written.
    """
    chosen: Any = on_every_rank(lambda: _choose(folder) if world().is_first else None, NOT_READ, folder)
    path, torn = world().from_first(chosen)
    return evolve(on_every_rank(lambda: _read(path), NOT_READ, path), torn=torn)


def nothing_saved(folder: str) -> str:
    """Why no checkpoint was ever finished in the folder; empty where one was. Collective, by rank 0's word.

    Checkpoints that are there and damaged are something: going on without them would train over them.
    """

    def look() -> str:
        if not world().is_first or not folders.nothing_finished(folder):
            return ""
        return "it holds no finished checkpoint" if Path(folder).exists() else "there is no such folder"

    return world().from_first(on_every_rank(look, NOT_READ, folder))


def _choose(folder: str) -> tuple[Path, tuple[str, ...]]:
    """The first that is whole, and what is wrong with those before it."""
    found, problem = folders.find(folder)
    torn = [f"{Path(folder, folders.LATEST)}: {problem}"] if problem else []
    for path in found:
        if _is_torch_s(path) and str(path) == str(Path(folder)):
            return path, ()
        try:
            files.read_manifest(path)
        except CheckpointFailed as error:
            torn += [f"{finding.where}: {finding.what}" for finding in error.findings]
            continue
        return path, tuple(torn)
    raise failed("checkpoint.not-there", folder, f"it holds no whole checkpoint: {'; '.join(torn)}")


def _is_torch_s(path: Path) -> bool:
    """True where torch has written it without prepkit, and not where one of prepkit's has lost its manifest."""
    ours = any((path / name).exists() for name in (MANIFEST, SHARED, own_file(0)))
    return not ours and (path / METADATA).is_file()


def _read(path: Path) -> WholeCheckpoint:
    if _is_torch_s(path):
        return WholeCheckpoint(path=path, saved=None, metadata=files.read_metadata(path), shared={}, own=None)
    saved = files.read_manifest(path)
    if bad := files.damaged(path, saved):
        before = [str(other) for other in folders.checkpoints(str(path.parent)) if other != path]
        fix = f"Go on from {before[0]}." if before else "Restore the files from a copy."
        raise failed("checkpoint.damaged", path, f"{', '.join(bad)}: not the bytes that were written", fix)
    rank = own_file(world().rank)
    kept = {file.name for file in saved.files}
    return WholeCheckpoint(
        path=path,
        saved=saved,
        metadata=files.read_metadata(path),
        shared=files.read_plain(path / SHARED) if SHARED in kept else {},
        own=files.read_plain(path / rank) if rank in kept else None,
    )


def compared(facts: ResumeFacts, source: WholeCheckpoint, wanted: Contents, *, only_model: bool) -> ResumeFacts:
    """The facts with the names and shapes in which the checkpoint and ``wanted`` differ."""
    stored = files.tensors(source.metadata)
    return evolve(
        facts,
        lacking=tuple(contents.missing(wanted, source.names)),
        unknown=tuple(contents.unknown(wanted, source.names, only_model=only_model)),
        reshaped=tuple(
            f"{name} {list(stored[name].size)}, here {list(one.shape)}"
            for name, one in wanted.tensors.items()
            if name in stored and tuple(stored[name].size) != tuple(one.shape)
        ),
    )


def fill(source: WholeCheckpoint, wanted: Contents) -> None:
    """Read tensors into those of ``wanted``, and all else into its ``plain``. Collective."""
    reader, planner = files.reader(source.path, source.metadata), LoadPlanner()
    tensors = contents.nested(wanted.tensors)

    def alone() -> None:
        """Take the steps that torch's ``load`` takes without a process group, of which it would warn each time."""
        planner.set_up_planner(tensors, source.metadata, is_coordinator=True)
        reader.set_up_storage_reader(source.metadata, True)  # noqa: FBT003 - torch's own signature
        plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        (plan,) = reader.prepare_global_plan(plans)
        reader.read_data(planner.finish_plan(plan), planner).wait()

    if world().running:
        with torch_failure(NOT_READ, source.path):
            load(tensors, storage_reader=reader, planner=planner)
    else:
        on_every_rank(alone, NOT_READ, source.path)
    plain = source.shared.get("plain", {})
    wanted.plain.update({name: plain[name] for name in wanted.plain})
