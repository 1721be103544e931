"""The optimizer, where prepkit is to create it, and clipping."""

from __future__ import annotations

from attrs import frozen


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


OptimizerSpec = AdamW | SGD
"""Each is named as the class of ``torch.optim``, and has its options as fields, in the order of the created plan."""


@frozen(kw_only=True)
class OptimizerTraits:
    """What the rest of prepkit asks of a spec, so that it need not know which ones there are."""

    below_one: tuple[str, ...] = ()
    """Fields whose numbers have to be below 1; all numbers have to be at least 0 and finite."""
    section_types: tuple[str, ...]
    """Types in the ``optimizer`` section of a DeepSpeed config that compute what the spec does."""


OPTIMIZERS: dict[type, OptimizerTraits] = {
    AdamW: OptimizerTraits(below_one=("betas",), section_types=("adamw", "adam")),  # DeepSpeed's Adam decays as AdamW
    SGD: OptimizerTraits(section_types=("SGD",)),
}
"""One row for each member of ``OptimizerSpec``; ``tests/test_completeness.py`` sees that none is missing."""


@frozen(kw_only=True)
class NoClip:
    """Gradients are not clipped."""


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


Clip = NoClip | ClipNorm | ClipValue
