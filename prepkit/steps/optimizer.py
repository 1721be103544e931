"""The optimizer and its grad scaler."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class OptimizerOption:
    """One keyword argument of an optimizer."""

    name: str
    value: bool | int | float | str | tuple[float, ...]


@frozen(kw_only=True)
class OptimizerGroup:
    """Parameters that an optimizer steps with some options of their own."""

    names: tuple[str, ...]
    options: tuple[OptimizerOption, ...]


@frozen(kw_only=True)
class ReleaseOptimizer:
    """Takes the model's parameters out of the optimizer, so that sharding can free them; keeps the state.

    Fails if a slot holds another parameter than ``slots`` says.
    """

    slots: tuple[tuple[str, ...], ...]
    """Per group, per slot, the parameter's canonical name; ``""``: a tensor that is not the model's, left alone."""


@frozen(kw_only=True)
class RebindOptimizer:
    """Puts into every slot the parameter that now has the slot's name, and moves existing state to its layout.

    Fails if a name is no longer a parameter, or state of the parameter's shape cannot take its layout.
    """

    slots: tuple[tuple[str, ...], ...]
    """As in ``ReleaseOptimizer``."""


@frozen(kw_only=True)
class CreateOptimizer:
    """Creates a torch optimizer over the named parameters of the model as it now stands.

    Where a flat parameter has taken the place of named ones, it stands for them, once.
    """

    algorithm: str
    """Name of the class in ``torch.optim``."""
    names: tuple[str, ...]
    options: tuple[OptimizerOption, ...]
    groups: tuple[OptimizerGroup, ...] = ()
    """More of its groups, after that of ``names``, which is left out where there are no names."""
    index: int = 0
    """Which of several optimizers it is, in the order in which they are created."""


@frozen(kw_only=True)
class CreateGradScaler:
    """Creates the scaler that keeps small float16 gradients from vanishing. Fails if the device is not there."""

    device: str
    sharded: bool
    """FSDP1's, which asks all ranks whether one overflowed; torch's plain one does so for DTensors by itself."""
    init_scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
