"""What is done to the model as it stands: dtype, device, forward, blocks."""

from __future__ import annotations

from attrs import frozen

from prepkit.steps.common import LocalDevice


@frozen(kw_only=True)
class MakeContiguous:
    """Lays the elements of parameters in the order of their indices; each stays the object that it is.

    Fails if a parameter holds a gradient.
    """

    names: tuple[str, ...]


@frozen(kw_only=True)
class UpcastParameters:
    """Casts the named parameters in place, keeping each object, and the optimizer state that has their dtype.

    Fails if a name is not a parameter, or one holds a gradient.
    """

    names: tuple[str, ...]
    dtype: str


@frozen(kw_only=True)
class MoveModel:
    """Moves parameters and buffers to the device, in place. Fails if the device is missing or a tensor is on meta."""

    device: LocalDevice


@frozen(kw_only=True)
class AutocastForward:
    """Runs the root's forward under autocast, and casts its low-precision outputs. Fails if it already does."""

    device: str
    dtype: str
    output_dtype: str


@frozen(kw_only=True)
class CheckpointModules:
    """Puts a non-reentrant checkpoint wrapper in the place of each module.

    Fails if one is already checkpointed, or torch has no operator of a name.
    """

    paths: tuple[str, ...]
    preserve_rng_state: bool
    keep_ops: tuple[str, ...] = ()
    """Operators whose outputs are kept, as ``aten.mm`` or ``aten.mm.default``; everything else is recomputed."""
    offload: bool = False
    """Whether the inputs of the modules wait in host memory."""


@frozen(kw_only=True)
class BackendOption:
    """One entry of ``torch.compile(options=...)``."""

    name: str
    value: bool | int | float | str


@frozen(kw_only=True)
class CompileModules:
    """Compiles each module in place, so that names and hooks stay.

    Fails if one is already compiled, or torch does not know the backend, an option or an argument.
    """

    paths: tuple[str, ...]
    """``("",)`` is the whole model."""
    backend: str
    mode: str
    fullgraph: bool
    dynamic: bool | None
    options: tuple[BackendOption, ...] = ()
    recompile_limit: int | None = None
    """Compilations of one function before it runs eagerly; None: torch's own."""
    isolate_recompiles: bool = False


@frozen(kw_only=True)
class CastForward:
    """Casts the root's floating inputs to one dtype and its 16-bit floating outputs to another.

    Fails if the forward is cast already.
    """

    dtype: str
    output_dtype: str
