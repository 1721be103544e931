"""What is done to the model: dtype, device, forward, methods, blocks, layers in float8."""

from __future__ import annotations

from typing import Literal

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


@frozen(kw_only=True)
class RegisterEntryPoints:
    """Makes methods of the model run as its forward does. Fails if the model has no such method.

    ``units``: torch's ``register_fsdp_forward_method`` gathers the root around each call. ``wrapper``: the outermost
    module gets the method, and runs it in the place of the model's forward inside its own. ``forward``: the method gets
    the patches that the forward has. No call is compiled as a whole; modules that it calls run as they are compiled.
    """

    names: tuple[str, ...]
    through: Literal["units", "wrapper", "forward"]
    in_step: bool = False
    """Ranks gather parameters together in each forward, and ``generate`` is told so: it goes on until all are done."""


@frozen(kw_only=True)
class ConvertFP8Linears:
    """Puts a torchao ``Float8Linear`` in the place of each Linear; without ``all_gather`` parameters stay the same.

    Fails if torchao cannot be imported, a module is no plain Linear any more, or one carries hooks that would be lost.
    """

    paths: tuple[str, ...]
    recipe: str
    """Name that torchao's ``Float8LinearConfig.from_recipe_name`` knows."""
    pad_inner_dim: bool
    all_gather: bool
    """Wrap the weights so that FSDP2 gathers them in float8: new parameters, of the same names."""
    emulate: bool


@frozen(kw_only=True)
class ConvertTransformerEngine:
    """Puts TransformerEngine's layers in the place of torch's and copies their values: new parameters, same names.

    Fails as ``ConvertFP8Linears`` does, and if a parameter is partitioned by ZeRO-3.
    """

    linears: tuple[str, ...]
    norms: tuple[str, ...]
    """Paths of LayerNorms with weight and bias."""


@frozen(kw_only=True)
class AutocastFP8Forward:
    """Runs the forward of whatever is outermost under TransformerEngine's autocast. Fails if it already does."""

    recipe: Literal["DelayedScaling", "MXFP8BlockScaling"]
    fp8_format: Literal["HYBRID", "E4M3"]
    margin: int
    during_eval: bool
    """Also while the model is in evaluation mode."""
    amax_history_len: int | None = None
    """None, here and below: not passed, because the recipe or newer libraries do not know it."""
    amax_compute_algo: str | None = None
    interval: int | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None


@frozen(kw_only=True)
class InitializeMSAMP:
    """MS-AMP replaces every Linear and the optimizer. Fails without Adam or AdamW, or if DDP would not reduce them."""

    opt_level: Literal["O1", "O2"]
    linears: tuple[str, ...]
    """Paths of the Linears that it will find."""
    kept: tuple[str, ...]
    """Paths of Linears that it is told to leave, because their weights are tied, or packed in fewer bits."""
    reduced: bool
    """DDP comes after it, which has to be MS-AMP's own to reduce float8 gradients."""


@frozen(kw_only=True)
class PrecomputeFloat8Scales:
    """After every optimizer step, one reduction gives the scales of all weights that FSDP2 gathers in float8.

    Fails without an optimizer, or if torchao cannot be imported.
    """
