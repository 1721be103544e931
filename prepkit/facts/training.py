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
class MemberFact:
    """One of several optimizers that were given together."""

    name: str
    """Class name."""
    module: str
    """Python module that defines the class."""
    groups: int
    """How many groups it has: those after the groups of the members before it."""


@frozen(kw_only=True)
class OptimizerFacts:
    """One live optimizer, or several that were given together."""

    name: str
    """Class name; of several the names of their classes, such as ``Muon + AdamW``."""
    module: str
    """Python module that defines the class; empty for several."""
    groups: tuple[GroupFact, ...]
    """Its groups; of several the groups of the first, then those of the second, and so on."""
    stateful: tuple[str, ...] = ()
    """Names of the parameters that already have state."""
    initial_state: bool = False
    """Whether that state is what the class begins with, as torch's Adagrad does: no step was made."""
    keeps_own_list: bool = False
    """Whether it holds parameters outside its groups and state, as LBFGS does: those cannot be rebound."""
    unfinished: tuple[str, ...] = ()
    """Classes whose ``__init__`` never came to that of ``torch.optim.Optimizer``, which makes room for hooks."""
    members: tuple[MemberFact, ...] = ()
    """Where several were given, each of them; none for one optimizer."""

    @property
    def classes(self) -> tuple[MemberFact, ...]:
        """Every optimizer that is there, also where it is one."""
        return self.members or (MemberFact(name=self.name, module=self.module, groups=len(self.groups)),)

    @property
    def class_of_group(self) -> tuple[MemberFact, ...]:
        """For each group the optimizer that has it."""
        return tuple(member for member in self.classes for _ in range(member.groups))


@frozen(kw_only=True)
class SchedulerFacts:
    """One learning-rate scheduler."""

    name: str
    drives_optimizer: bool
    """Whether its ``optimizer`` is the one that was given."""
    factory: bool = False
    """Whether it is a function that makes the scheduler from an optimizer."""
    horizon: int | None = None
    """Ticks that it is made for, as ``OneCycleLR(total_steps=...)`` says; None: none, or not known."""
    needs_metric: bool = False
    """Whether its ``step`` wants a metric, as ``ReduceLROnPlateau`` does."""


@frozen(kw_only=True)
class LoaderFacts:
    """One data loader."""

    batch_size: int | None
    length: int | None
    """Number of samples in a pass; None where nobody knows."""
    sampler: Literal["sequential", "random", "distributed", "custom"]
    iterable: bool = False
    """Whether the dataset is an ``IterableDataset``."""
    custom_batches: bool = False
    """Whether it was built with a batch sampler of the user's own."""
    drop_last: bool = False
    batches: int | None = None
    """Number of batches that a batch sampler of the user's own makes; None where nobody knows."""
    name: str = "DataLoader"
    """Class name."""
    foreign: bool = False
    """Whether it is no torch ``DataLoader``, so that nothing is known of how it draws."""
    own_iteration: bool = False
    """Whether its class iterates in a way of its own, so that a new sampler may not reach what it reads."""
    shards: int | None = None
    """Number of shards of a data set that splits itself by them (``shard`` and ``num_shards`` of ``datasets``)."""
    divided: bool = False
    """Whether its stream was split by rank before (``split_dataset_by_node`` of ``datasets``)."""
    stateful: bool = False
    """Whether it says by itself where it stands (``state_dict``, as torchdata's ``StatefulDataLoader``)."""
    pin_memory: bool = False
    workers: int = 0
    """Number of worker processes."""
    in_order: bool = True
    """Batches come in the order in which they were asked for, not as workers end them."""
