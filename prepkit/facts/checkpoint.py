"""What was seen of a checkpoint: its files, and what their headers say of the tensors inside."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class StoredFile:
    """One safetensors file."""

    name: str
    """File name, in the folder of ``CheckpointFacts.folder``."""
    size: int
    """Bytes of the whole file."""
    header: str
    """Digest of its first bytes, up to the first tensor: names, dtypes, shapes and places of all tensors."""
    data: int
    """Where the header ends and the first tensor begins."""


@frozen(kw_only=True)
class WeightConverter:
    """How the model's own library makes tensors of the model from those of a checkpoint: it stacks, then joins them.

    ``WeightConverter(sources=(".experts.*.w1.weight", ".experts.*.w3.weight"), stack=0, join=1)`` is how
    transformers 5 makes ``experts.gate_up_proj`` [experts, 2 x inner, hidden] (``MergeModulelist``, ``Concatenate``).
    """

    sources: tuple[str, ...]
    """Patterns of the keys, as the library writes them, in the order in which their tensors are joined."""
    stack: int | None = None
    """The new dim that the tensors of one pattern are stacked along; None: they are not stacked."""
    join: int | None = None
    """The dim that all are then joined along; None: they are not joined."""
    others: tuple[str, ...] = ()
    """The library's operations, where they are others than these two: such tensors are not read."""


@frozen(kw_only=True)
class KeyMapping:
    """Where a tensor of the checkpoint belongs in the model, where that is not the tensor of its own key."""

    name: str
    """Parameter or buffer of the model."""
    recipe: int | None = None
    """Index into ``CheckpointFacts.recipes``; None: it is the whole, under another name."""
    source: int = 0
    """Index into the recipe's ``sources``."""
    number: int = 0
    """Position among the tensors of that source."""


@frozen(kw_only=True)
class StoredTensor:
    """One tensor in a file."""

    key: str
    dtype: str
    """Name in torch, such as ``bfloat16``; that of the format where torch has none."""
    shape: tuple[int, ...]
    file: int
    """Index into ``CheckpointFacts.files``."""
    start: int
    """First byte, counted from the beginning of the file. Elements lie in row-major order, little-endian."""
    length: int
    """Number of bytes."""
    place: KeyMapping | None = None
    """Where it belongs; None: to the parameter or buffer of its own key, if there is one."""


@frozen(kw_only=True)
class StoredProblem:
    """Why a checkpoint, or a file of it, cannot be read as it should be."""

    file: str
    what: str


@frozen(kw_only=True)
class CheckpointFacts:
    """What the headers of a checkpoint say. No tensor's data was read."""

    path: str
    """As it was asked for."""
    folder: str
    """Where the files are."""
    files: tuple[StoredFile, ...] = ()
    tensors: tuple[StoredTensor, ...] = ()
    """In the order of the files, and in each in the order of the bytes."""
    problems: tuple[StoredProblem, ...] = ()
    recipes: tuple[WeightConverter, ...] = ()
    """How the model's library makes what is here in parts."""
    rename: tuple[tuple[str, str], ...] = ()
    """The renaming (``LoadWeights.rename``) after which the places were found; the keys here are those of the files."""
