"""Checkpoints as facts: the run that one is of, and all that is seen before one is written or read.

Rules at ``Moment.FOLDER`` look at ``FolderFacts``, those at ``Moment.RESUME`` at
``ResumeFacts`` (``rules.run.saving``).
"""

from __future__ import annotations

from attrs import frozen

Said = tuple[tuple[str, str], ...]
"""Names and values as Python writes them."""


@frozen(kw_only=True)
class SavedFile:
    """One file of a checkpoint."""

    name: str
    size: int
    """Bytes."""
    sha256: str


@frozen(kw_only=True)
class SavedTensor:
    """One parameter or buffer, whole."""

    name: str
    dtype: str
    """In which it was saved: float32 where an engine keeps master weights."""
    shape: tuple[int, ...]


@frozen(kw_only=True)
class SavedModule:
    """Settings of one module besides its tensors: how many heads it has, its epsilon, its dropout."""

    path: str
    cls: str
    values: Said = ()
    """Its public attributes that are numbers, strings or booleans."""


@frozen(kw_only=True)
class SavedFacts:
    """The objects of a run, as far as another run has to be like it to go on from its checkpoint."""

    engine: str
    world_size: int
    tensors: tuple[SavedTensor, ...]
    modules: tuple[SavedModule, ...] = ()
    config: Said = ()
    """The model's own ``config``, where it has one, without what changes nothing (``saving.saved_facts``)."""
    optimizer: str = ""
    """Class name, of several one after the other; empty: none."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Names of the parameters in each group of the optimizer."""
    scheduler: str = ""
    """Class name; empty: none."""
    scaler: bool = False
    """prepkit scales the loss, for float16."""
    loaders: int = 0
    """Loaders whose position is kept (``state_dict``)."""


@frozen(kw_only=True)
class SavedRun:
    """The contents of ``prepkit.json`` in a checkpoint."""

    prepkit: str
    """Version of prepkit."""
    torch: str
    steps: int
    """Optimizer steps that had been taken."""
    epoch: int
    run: SavedFacts
    files: tuple[SavedFile, ...]
    """Every other file of the checkpoint."""


@frozen(kw_only=True)
class SavedWindows:
    """Optimizer steps of a plan, which no checkpoint's state holds: batch, clipping and their number."""

    micro_batches: int
    """Of one step, on each data rank."""
    ranks: int
    """Data ranks."""
    clip: str
    """As written in the config; empty: no clipping."""
    global_batch: int | None = None
    """Samples of one step, on all data ranks; None: neither the config nor a loader says it."""
    total_steps: int | None = None
    """Steps of the whole run; None: not known."""

    @property
    def batch(self) -> int:
        """Micro-batches of one step, on all data ranks."""
        return self.micro_batches * self.ranks


@frozen(kw_only=True)
class GivenFolder:
    """The folder that one rank has given."""

    path: str
    problem: str = ""
    """Why it is no folder; empty: it may be one."""


@frozen(kw_only=True)
class FolderFacts:
    """A folder as it is seen before a checkpoint is written into it, or read from it."""

    given: tuple[GivenFolder, ...] = ()
    """Per rank."""
    folder: str = ""
    """The folder itself, once all ranks have given the same; empty: it was not looked into."""
    others: tuple[str, ...] = ()
    """Checkpoints in the folder that this run has neither written nor been resumed beside, newest first."""
    steps: int = 0
    """Optimizer steps of this run."""


@frozen(kw_only=True)
class ResumeFacts:
    """A checkpoint and a run that is about to go on from it; each look fills in more."""

    where: str = ""
    """The checkpoint's folder; before one was found, the folder of checkpoints."""
    accepted: tuple[str, ...] = ()
    """Ids that the call accepts."""
    nothing: str = ""
    """Why training begins at step 0, where that is allowed; empty: there is a checkpoint."""
    torn: tuple[str, ...] = ()
    """Problems of newer checkpoints, which are not read because of them."""
    saved: SavedFacts | None = None
    """The run that was saved; None: torch has written the checkpoint without prepkit."""
    here: SavedFacts | None = None
    """The run that is to go on; None: nothing was looked at yet."""
    lacking: tuple[str, ...] = ()
    """Names in model and optimizer that the checkpoint lacks."""
    unknown: tuple[str, ...] = ()
    """Names of model and optimizer in the checkpoint that nothing here has."""
    reshaped: tuple[str, ...] = ()
    """Tensors that have another shape here, with both shapes."""
    before: SavedWindows | None = None
    """Of the checkpoint's plan; None: there is no plan that can be read."""
    now: SavedWindows | None = None
    """Of this run's plan."""
    joined: tuple[str, ...] = ()
    """Counts of steps that differ over parameters, and that DeepSpeed keeps one of."""
    replaced: tuple[str, ...] = ()
    """Settings of optimizer and scheduler that the checkpoint's have replaced, with both values."""
    other_data: tuple[str, ...] = ()
    """Loaders whose pass goes on over another number of samples than it began with, with both numbers."""
