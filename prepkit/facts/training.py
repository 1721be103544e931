"""What stands beside the model: optimizer, scheduler, loaders."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

Scalar = bool | int | float | str | None


@frozen(kw_only=True)
class GroupFact:
    """One parameter group of an optimizer."""

    slots: tuple[str | None, ...]
    """Per slot the name of the model parameter that it holds, by identity; None: not a parameter of the model."""
    options: tuple[tuple[str, Scalar], ...] = ()
    """The group's scalar options, sorted by name."""


@frozen(kw_only=True)
class OptimizerFacts:
    """One live optimizer."""

    name: str
    """Class name."""
    module: str
    """Python module that defines the class."""
    groups: tuple[GroupFact, ...]
    stateful: tuple[str, ...] = ()
    """Names of the parameters that already have state."""
    keeps_own_list: bool = False
    """Whether it holds parameters outside its groups and state, as LBFGS does: those cannot be rebound."""


@frozen(kw_only=True)
class SchedulerFacts:
    """One learning-rate scheduler."""

    name: str
    drives_optimizer: bool
    """Whether its ``optimizer`` is the one that was given."""
    factory: bool = False
    """Whether it is a function that makes the scheduler from an optimizer."""


@frozen(kw_only=True)
class LoaderFacts:
    """One data loader."""

    batch_size: int | None
    length: int | None
    """Number of samples; None where the dataset has no length."""
    sampler: Literal["sequential", "random", "distributed", "custom"]
    iterable: bool = False
    """Whether the dataset is an ``IterableDataset``."""
    custom_batches: bool = False
    """Whether it was built with a batch sampler of the user's own."""
    drop_last: bool = False
