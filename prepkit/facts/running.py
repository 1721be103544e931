"""What was seen of a model while it trains: little enough to be looked at again every hundred steps."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class RunningParam:
    """One parameter as it lies at a step; tied ones once."""

    name: str
    dtype: str
    device: str
    """Kind of its device: ``cpu``, ``cuda``, ``meta``."""
    requires_grad: bool
    known: bool = True
    """Whether the very parameter was there at the earlier look."""
    served: bool = True
    """Whether it would be averaged and stepped if it trains."""
    stuck: bool = False
    """Whether it is stepped though it is frozen: the engine keeps master weights, or one flat parameter with others."""


@frozen(kw_only=True)
class RunningFacts:
    """Model, optimizers and learning rates at one moment."""

    params: tuple[RunningParam, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    hooks: tuple[tuple[str, str], ...] = ()
    """Where a hook hangs, a module or a parameter, and which: its kind and its function."""
    held: tuple[tuple[str, ...], ...] = ()
    """Per optimizer the parameters that it steps, by name."""
    orphans: tuple[int, ...] = ()
    """Per optimizer how many tensors it steps that the model does not have."""
    stateful: tuple[tuple[str, ...], ...] = ()
    """Per optimizer the slots of which it has state: by name, or by number where the model has no such parameter."""
    rates: tuple[float, ...] = ()
    """Learning rates of the groups that the scheduler drives."""
    scheduled: tuple[float, ...] = ()
    """What the scheduler has set them to last; empty without one, or where it does not say."""
    parted: tuple[str, ...] = ()
    """Parameters whose replicas on different ranks differ."""
