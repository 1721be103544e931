"""What a checkpoint of a run says of itself: from whose objects it was made, when, and which files it consists of."""

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
    """What one module says of itself besides its tensors: how many heads it has, its epsilon, its dropout."""

    path: str
    cls: str
    values: Said = ()
    """Its public attributes that are numbers, strings or booleans."""


@frozen(kw_only=True)
class RunFacts:
    """The objects of a run, as far as another run has to be like it to go on from its checkpoint."""

    engine: str
    world_size: int
    tensors: tuple[SavedTensor, ...]
    modules: tuple[SavedModule, ...] = ()
    config: Said = ()
    """The model's own ``config``, where it has one, without what changes nothing (``live.checkpoints.run_facts``)."""
    optimizer: str = ""
    """Class name, of several one after the other; empty: none."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Names of the parameters in each group of the optimizer."""
    scheduler: str = ""
    """Class name; empty: none."""
    scaler: bool = False
    """Whether the loss of float16 training is scaled by prepkit."""
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
    run: RunFacts
    files: tuple[SavedFile, ...]
    """Every other file of the checkpoint."""
