"""DeepSpeed."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from prepkit.steps.common import LocalDevice


@frozen(kw_only=True)
class MarkLeafModules:
    """Marks modules that ZeRO-3 is to gather whole, whatever they call inside. Fails if a path is no module."""

    paths: tuple[str, ...]


@frozen(kw_only=True)
class ConvertOptimizer:
    """Puts DeepSpeed's CPU form of the optimizer in its place, with the same groups.

    Fails if the optimizer has state, or DeepSpeed's kernel cannot be built.
    """

    algorithm: Literal["DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion"]
    decoupled: bool
    """Weight decay as in AdamW, not as in Adam; only DeepSpeedCPUAdam can do both."""


@frozen(kw_only=True)
class Setting:
    """One value of a DeepSpeed config."""

    path: tuple[str, ...]
    """Keys that lead to it, such as ``("zero_optimization", "stage")``."""
    value: str
    """The value as JSON text."""


@frozen(kw_only=True)
class PartitionParameters:
    """Divides each parameter over the ranks as ``deepspeed.zero.Init`` does, before DeepSpeed sees the model (ZeRO-3).

    One after the other: a rank holds its parts and one whole parameter. What is on meta has no values yet: a later step
    fills its part. Buffers are whole on the device; each parameter stays the object that it is. Nothing is sent.

    Has no way back: the model has to be built again if a later step fails.
    Fails if DeepSpeed is missing, works on another device, or has divided a parameter before.
    """

    device: LocalDevice
    settings: tuple[Setting, ...]
    """The complete config, as ``InitializeDeepSpeed`` has it: where parts lie, and how they are gathered."""


@frozen(kw_only=True)
class InitializeDeepSpeed:
    """Hands model, optimizer and scheduler to ``deepspeed.initialize`` with this config, whole as it stands here.

    MS-AMP's own ``initialize`` replaces the Linears and the optimizer as well, then does the same (behaviour DS-1).

    Has no way back: the model has to be built again if a later step fails.
    Fails if DeepSpeed is missing, works on another device, or refuses the config.
    """

    device: str
    """The device type that DeepSpeed must have found."""
    data_parallel: int
    """Ranks that see different data: fewer than all where DeepSpeed splits the model over some of them."""
    stage: int
    """ZeRO stage."""
    dtype: str | None
    """Dtype to which parameters and buffers are cast; None: they stay as they are."""
    optimizer: Literal["given", "section", "none"]
    """``given``: the optimizer that stands there; ``section``: DeepSpeed makes that of its config."""
    names: tuple[str, ...]
    """Parameters that DeepSpeed's own optimizer gets; empty unless it makes one."""
    scheduler: Literal["handed over", "section", "outside"]
    """``handed over``: DeepSpeed steps the one that is given; ``outside``: it knows of none."""
    settings: tuple[Setting, ...]
    """The complete config, sorted by path."""
    library: Literal["deepspeed", "msamp"] = "deepspeed"
    """Whose ``initialize`` is called: ``deepspeed``'s, or that of ``msamp.deepspeed``."""
    filled: bool = False
    """Earlier steps give the model its values, so that it may be on meta; parts of parameters are cast here."""
    kept: tuple[str, ...] = ()
    """Paths of Linears that MS-AMP is told to leave, as in ``InitializeMSAMP``."""
