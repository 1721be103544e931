"""The optimizers that prepkit can create. One more is a class here, its name in two lists, and a row."""

from __future__ import annotations

from typing import Literal

from attrs import fields, frozen

__all__ = ["SGD", "Adafactor", "Adagrad", "Adam", "AdamW", "Group", "Muon", "RMSprop"]


@frozen(kw_only=True)
class Group:
    """Parameters of an optimizer that have other options than the rest of it, such as no weight decay."""

    names: tuple[str, ...]
    """Patterns of parameter names; ``*`` and ``?`` stand for any characters, dots too: ``("*.bias", "*norm*")``."""
    lr: float | None = None
    """Learning rate; None: the optimizer's."""
    weight_decay: float | None = None
    """Weight decay; None: the optimizer's."""
    betas: tuple[float, float] | None = None
    """Decay of the moments; None: the optimizer's."""
    momentum: float | None = None
    """Momentum; None: the optimizer's."""


@frozen(kw_only=True)
class AdamW:
    """``torch.optim.AdamW``, created after the model is wrapped."""

    lr: float = 1e-3
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 1e-2
    """Decoupled weight decay; 0 for none."""
    names: tuple[str, ...] = ()
    """Patterns, as in ``Group``, of the parameters that it steps; none: all that no other optimizer steps."""
    groups: tuple[Group, ...] = ()
    """Parameters with options of their own."""


@frozen(kw_only=True)
class SGD:
    """``torch.optim.SGD``, created after the model is wrapped."""

    lr: float = 1e-3
    """Learning rate."""
    momentum: float = 0.0
    """0 for none; without momentum the optimizer has no state."""
    weight_decay: float = 0.0
    """L2 penalty; 0 for none."""
    nesterov: bool = False
    """Nesterov momentum."""
    names: tuple[str, ...] = ()
    """As in ``AdamW``."""
    groups: tuple[Group, ...] = ()
    """As in ``AdamW``."""


@frozen(kw_only=True)
class Adam:
    """``torch.optim.Adam``, created after the model is wrapped."""

    lr: float = 1e-3
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """L2 penalty, added to the gradient; 0 for none. ``AdamW`` has the decoupled one."""
    amsgrad: bool = False
    """Keep the largest second moment as well."""
    names: tuple[str, ...] = ()
    """As in ``AdamW``."""
    groups: tuple[Group, ...] = ()
    """As in ``AdamW``."""


@frozen(kw_only=True)
class RMSprop:
    """``torch.optim.RMSprop``, created after the model is wrapped."""

    lr: float = 1e-2
    """Learning rate."""
    alpha: float = 0.99
    """Decay of the mean square."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """L2 penalty; 0 for none."""
    momentum: float = 0.0
    """0 for none."""
    centered: bool = False
    """Divide by an estimate of the variance."""
    names: tuple[str, ...] = ()
    """As in ``AdamW``."""
    groups: tuple[Group, ...] = ()
    """As in ``AdamW``."""


@frozen(kw_only=True)
class Adagrad:
    """``torch.optim.Adagrad``, created after the model is wrapped."""

    lr: float = 1e-2
    """Learning rate."""
    lr_decay: float = 0.0
    """Decay of the learning rate."""
    weight_decay: float = 0.0
    """L2 penalty; 0 for none."""
    eps: float = 1e-10
    """Added to the denominator."""
    names: tuple[str, ...] = ()
    """As in ``AdamW``."""
    groups: tuple[Group, ...] = ()
    """As in ``AdamW``."""


@frozen(kw_only=True)
class Adafactor:
    """``torch.optim.Adafactor``, created after the model is wrapped. Its second moments are rows and columns."""

    lr: float = 1e-2
    """Upper limit of the relative learning rate."""
    beta2_decay: float = -0.8
    """Decay of the second moment's coefficient."""
    d: float = 1.0
    """Updates of a larger root mean square are clipped."""
    weight_decay: float = 0.0
    """Decoupled weight decay; 0 for none."""
    names: tuple[str, ...] = ()
    """As in ``AdamW``."""
    groups: tuple[Group, ...] = ()
    """As in ``AdamW``."""


@frozen(kw_only=True)
class Muon:
    """``torch.optim.Muon``, created after the model is wrapped. Of the parameters it may have it takes the matrices.

    Give it the hidden layers and another optimizer the rest: ``optimizer=(Muon(names=("layers.*",)), AdamW())``.
    """

    lr: float = 1e-3
    """Learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay; 0 for none."""
    momentum: float = 0.95
    """Momentum."""
    nesterov: bool = True
    """Nesterov momentum."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """How the rate follows a matrix' shape; ``match_rms_adamw`` takes rates and decays that are tuned for AdamW."""
    names: tuple[str, ...] = ()
    """As in ``AdamW``."""
    groups: tuple[Group, ...] = ()
    """As in ``AdamW``."""


OptimizerSpec = AdamW | SGD | Adam | RMSprop | Adagrad | Adafactor | Muon
"""Each is named as the class of ``torch.optim``, and has its options as fields, in the order of the created plan."""

SELECTS = ("names", "groups")
"""Fields that every spec has, and that are no options of torch."""


@frozen(kw_only=True)
class OptimizerTraits:
    """What the rest of prepkit asks of a spec, so that it need not know which ones there are."""

    below_one: tuple[str, ...] = ()
    """Fields whose numbers have to be below 1; all numbers have to be at least 0 and finite."""
    up_to_zero: tuple[str, ...] = ()
    """Fields whose numbers have to be at most 0."""
    from_one: tuple[str, ...] = ()
    """Fields whose numbers have to be at least 1."""
    section_types: tuple[str, ...] = ()
    """Types in the ``optimizer`` section of a DeepSpeed config that compute what the spec does."""
    since: tuple[int, int] = (2, 6)
    """The release of torch that has it first."""
    only_matrices: bool = False
    """Whether it steps two-dimensional parameters only, and leaves others to another optimizer."""


OPTIMIZERS: dict[type, OptimizerTraits] = {
    AdamW: OptimizerTraits(below_one=("betas",), section_types=("adamw", "adam")),  # DeepSpeed's Adam decays as AdamW
    SGD: OptimizerTraits(section_types=("SGD",)),
    Adam: OptimizerTraits(below_one=("betas",)),
    RMSprop: OptimizerTraits(below_one=("alpha",), section_types=("RMSprop",)),
    Adagrad: OptimizerTraits(),
    Adafactor: OptimizerTraits(up_to_zero=("beta2_decay",), from_one=("d",), section_types=("Adafactor",)),
    Muon: OptimizerTraits(since=(2, 9), only_matrices=True),
}
"""One row for each member of ``OptimizerSpec``; ``tests/test_completeness.py`` sees that none is missing."""


def specs(asked: OptimizerSpec | tuple[OptimizerSpec, ...] | None) -> tuple[OptimizerSpec, ...]:
    """Return what ``Config.optimizer`` asks for, as a tuple: none, one or several."""
    if asked is None:
        return ()
    return asked if isinstance(asked, tuple) else (asked,)


def options(spec: OptimizerSpec | Group) -> dict[str, bool | int | float | str | tuple[float, ...]]:
    """The options that it says, by the names that torch has for them."""
    said = {field.name: getattr(spec, field.name) for field in fields(type(spec)) if field.name not in SELECTS}
    return {name: value for name, value in said.items() if value is not None}


@frozen
class ClipNorm:
    """Scale all gradients so that their joint norm, over every rank's shards, is at most ``max_norm``."""

    max_norm: float
    """Above 0."""
    norm_type: float = 2.0
    """Which p-norm."""


@frozen
class ClipValue:
    """Clamp every gradient element to ``[-max_value, max_value]``."""

    max_value: float
    """Above 0."""


Clip = ClipNorm | ClipValue | None
"""None: gradients are not clipped."""
