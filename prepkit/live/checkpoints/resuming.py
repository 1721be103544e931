"""Going on from a checkpoint: found, checked byte by byte, held against what stands here, and only then read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from attrs import frozen
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load

from prepkit.facts.saved_run import RunFacts, SavedRun
from prepkit.findings import Finding
from prepkit.live.checkpoints import contents, fits, manifest, metadata
from prepkit.live.checkpoints import folder as folders
from prepkit.live.checkpoints.contents import Contents
from prepkit.live.checkpoints.failures import CheckpointFailed, on_every_rank, quiet_alone, refused, torch_told
from prepkit.live.checkpoints.flat_range import LoadPlanner
from prepkit.live.checkpoints.saving import SHARED, own_file

LOG = logging.getLogger("prepkit")


@frozen(kw_only=True)
class WholeCheckpoint:
    """A checkpoint that is whole, and what is in it."""

    path: Path
    saved: SavedRun | None
    """None: torch has written it without prepkit, and nobody can say what it is of."""
    metadata: Metadata
    shared: dict[str, Any]
    """What is the same on every rank; empty without a manifest."""
    own: dict[str, Any] | None
    """What this rank had for itself; None where fewer ranks were saved."""

    @property
    def names(self) -> dict[str, tuple[int, ...] | None]:
        """Everything that it holds of model and optimizer, and the shapes of tensors."""
        shapes = {name: tuple(one.size) for name, one in metadata.tensors(self.metadata).items()}
        return {**dict.fromkeys(self.shared.get("plain", {})), **shapes}


def open_source(folder: str) -> WholeCheckpoint:
    """The newest whole checkpoint in the folder, its bytes checked. Collective: every rank checks its share.

    Where the latest is torn, the newest whole one before it is taken, and said. Raises ``CheckpointFailed`` on every
    rank where there is none, and where a byte is not as it was written.
    """
    failed = f"{folder} could not be read"
    found: list[Any] = []

    def choose() -> None:
        if _rank() == 0:
            found.append(_choose(folder))

    on_every_rank(choose, failed)
    chosen: list[Any] = found or [None]
    if dist.is_initialized():
        dist.broadcast_object_list(chosen, src=0)
    path, told = chosen[0]
    if told and _rank() == 0:
        LOG.warning("%s", told)
    return on_every_rank(lambda: _read(path), failed)


def nothing_saved(folder: str) -> bool:
    """Whether no checkpoint was ever finished in the folder, as before the first start. Collective, by rank 0's word.

    Checkpoints that are there and damaged are something: going on without them would train anew over them.
    """
    found: list[Any] = []

    def look() -> None:
        if _rank() == 0:
            found.append(folders.nothing_finished(folder))

    on_every_rank(look, f"{folder} could not be read")
    chosen: list[Any] = found or [None]
    if dist.is_initialized():
        dist.broadcast_object_list(chosen, src=0)
    if chosen[0] and _rank() == 0:  # a warning, which is seen without set-up: the folder may be a slip of the pen
        path = Path(folder).absolute()
        why = "holds no finished checkpoint" if path.exists() else "does not exist"
        LOG.warning("resume: the folder %s %s, so that training begins anew", path, why)
    return bool(chosen[0])


def _choose(folder: str) -> tuple[Path, str]:
    """The first that is whole, and what to say where it is not the one that was asked for."""
    torn: list[str] = []
    for path in folders.find(folder):
        if _is_torch_s(path) and str(path) == str(Path(folder)):
            return path, ""
        try:
            manifest.read(path)
        except CheckpointFailed as error:
            torn.append(str(error))
            continue
        return path, f"{'; '.join(torn)}; going on from {path}, the newest that is whole" if torn else ""
    raise CheckpointFailed(f"it holds no whole checkpoint: {'; '.join(torn)}")


def _is_torch_s(path: Path) -> bool:
    """Whether torch has written it without prepkit; not so a checkpoint of prepkit's that has lost its manifest."""
    ours = any((path / name).exists() for name in (folders.MANIFEST, SHARED, own_file(0)))
    return not ours and (path / metadata.FILE).is_file()


def _read(path: Path) -> WholeCheckpoint:
    if _is_torch_s(path):
        return WholeCheckpoint(path=path, saved=None, metadata=metadata.read_metadata(path), shared={}, own=None)
    saved = manifest.read(path)
    if bad := manifest.damaged(path, saved):
        before = [str(other) for other in folders.checkpoints(str(path.parent)) if other != path]
        fix = f"go on from {before[0]}" if before else "restore the files from a copy"
        what = f"{', '.join(bad)}: not the bytes that were written"
        raise CheckpointFailed(f"{path} is damaged", (refused("damaged", str(path), what, fix),))
    rank = own_file(_rank())
    kept = {file.name for file in saved.files}
    return WholeCheckpoint(
        path=path,
        saved=saved,
        metadata=metadata.read_metadata(path),
        shared=metadata.read_plain(path / SHARED) if SHARED in kept else {},
        own=metadata.read_plain(path / rank) if rank in kept else None,
    )


def check(source: WholeCheckpoint, here: RunFacts, accept: Collection[str]) -> None:
    """Raises ``CheckpointFailed`` where this run cannot go on from it, before anything is read. Same on every rank."""
    unknown = [one for one in accept if one not in fits.ACCEPTABLE]
    if unknown:
        raise CheckpointFailed(f"accept={unknown} names no finding that can be accepted; write {fits.ACCEPTABLE}")
    if source.saved is not None:
        found = fits.differences(source.saved.run, here, str(source.path))
        _raise(source, tuple(one for one in found if one.rule not in accept))


def fill(source: WholeCheckpoint, wanted: Contents, *, only_model: bool) -> None:
    """Reads tensors into those that stand here, and the rest into ``plain``. Collective."""
    stored = metadata.tensors(source.metadata)
    plain = source.shared.get("plain", {})
    _raise(source, tuple(_names(source, wanted, only_model=only_model)))
    shapes = [
        f"{name} {list(stored[name].size)}, here {list(one.shape)}"
        for name, one in wanted.tensors.items()
        if tuple(stored[name].size) != tuple(one.shape)
    ]
    if shapes:
        what = f"it holds {fits.listed(shapes)}"
        _raise(source, (refused("other-optimizer", str(source.path), what, "use the optimizer that was saved"),))
    quiet_alone()
    with torch_told(f"{source.path} could not be read"):
        reader = metadata.reader(source.path, source.metadata)
        alone = not dist.is_initialized()
        load(contents.nested(wanted.tensors), storage_reader=reader, planner=LoadPlanner(), no_dist=alone)
    wanted.plain.update({name: plain[name] for name in wanted.plain})


def _names(source: WholeCheckpoint, wanted: Contents, *, only_model: bool) -> Iterator[Finding]:
    """What one has and the other lacks, both ways."""
    where = str(source.path)
    if lacking := contents.missing(wanted, source.names):
        kind = "other-model" if any(name.startswith(contents.MODEL) for name in lacking) else "other-optimizer"
        fix = "build the model and the optimizer that were saved, or give the folder of these"
        yield refused(kind, where, f"it lacks {fits.listed(lacking)}", fix)
    if extra := contents.unknown(wanted, source.names, only_model=only_model):
        kind = "other-model" if any(name.startswith(contents.MODEL) for name in extra) else "other-optimizer"
        fix = "build the model and the optimizer that were saved, or give the folder of these"
        yield refused(kind, where, f"it holds {fits.listed(extra)}, which nothing here has", fix)


def _raise(source: WholeCheckpoint, findings: tuple[Finding, ...]) -> None:
    if findings:
        raise CheckpointFailed(f"{source.path} does not fit what stands here:", findings)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
