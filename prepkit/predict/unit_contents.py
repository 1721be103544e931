"""What the units of a model hold, without saying twice what is equal.

A model of many equal blocks has few kinds of units, and a unit has few kinds of parameters. So the formulas run over
kinds with their numbers: a prediction for 405 billion parameters takes milliseconds.
"""

from __future__ import annotations

from math import prod

from attrs import frozen


@frozen
class ParamKind:
    """Parameters of one unit that are equal in everything that bytes depend on."""

    shape: tuple[int, ...]
    """Global shape; of a parameter that tensor parallelism cuts, the shape of the largest part."""
    size: int
    """Bytes of one element as stored."""
    floating: bool
    """Whether mixed precision casts it: its dtype is a floating one."""
    trains: bool
    """Whether it gets a gradient (``requires_grad``)."""
    group: int | None
    """Index of the optimizer's ``param_groups`` entry that steps it; None: no optimizer does."""
    grad_factor: int = 1
    """Elements of its gradient as autograd makes it, in multiples of its own elements.

    More than 1 for an embedding that tensor parallelism cuts by rows: torch makes its gradient with the rows of all
    ranks, and only then shards it.
    """
    start: int | None = None
    """Its first element in the flat parameter of its FSDP1 unit; None: it is in none."""

    @property
    def numel(self) -> int:
        """Elements of one, before the shard axis divides it."""
        return prod(self.shape)


@frozen
class UnitContent:
    """The parameters of a unit: each kind with how many there are of it."""

    params: tuple[tuple[ParamKind, int], ...]
    full: bool
    """Whether it is gathered and reduced in float32 whatever the others are: a batch norm."""

    def bytes(self, *, trained: bool = False) -> int:
        """Bytes of all parameters as stored; with ``trained`` of those that get a gradient."""
        return sum(param.numel * param.size * count for param, count in self.params if param.trains or not trained)

    def trains(self) -> bool:
        """Whether any parameter gets a gradient."""
        return any(param.trains for param, _ in self.params)


@frozen
class UnitInstance:
    """One unit that owns parameters: where it is, what it holds, how long it stays gathered."""

    path: str
    """Module path; ``""`` is the root."""
    content: int
    """Index into ``Inputs.contents``."""
    reshard: bool | int
    """After forward: True, it is freed; False, it stays gathered until backward; a number, it is sharded over so many
    ranks (``reshard_after_forward`` of ``fully_shard``)."""
    stays: bool = False
    """Whether it stays gathered from one micro-batch to the next, until gradients are averaged (FSDP1
    ``SHARD_GRAD_OP``)."""
