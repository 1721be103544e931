"""Which modules become units, recompute their activations or are compiled."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen


@frozen(kw_only=True)
class WrapBlocks:
    """The classes that the model declares in ``_no_split_modules``; where it declares none, its repeated blocks.

    A repeated block is an item of a ``ModuleList`` or ``Sequential`` of at least two items, all of one class.
    A module that holds some names of a tied parameter and not the others is left to the root: the tie stays whole.
    """


@frozen
class WrapClasses:
    """Every module whose class has one of these names; exact text, subclasses do not match (behaviour G-60).

    ``WrapClasses(("LlamaDecoderLayer",), paths=("lm_head",))`` means single modules besides.
    """

    names: tuple[str, ...]
    """Class names, such as ``("LlamaDecoderLayer",)``."""
    paths: tuple[str, ...] = ()
    """Patterns of further modules, as in ``WrapPaths``."""


@frozen
class WrapPaths:
    """Every module whose dotted path matches one of these patterns."""

    patterns: tuple[str, ...]
    """Shell patterns over dotted paths, such as ``("model.layers.*",)``; ``*`` stays inside one path segment."""


@frozen
class WrapSize:
    """Every module, leaves first, that still owns at least this many parameters once its own units are taken out."""

    min_params: int
    """Number of elements, at least 1."""


@frozen(kw_only=True)
class WrapRoot:
    """No module of its own: the root is the only unit, and the whole model is gathered at once."""


Wrap = WrapBlocks | WrapClasses | WrapPaths | WrapSize | WrapRoot


@frozen(kw_only=True)
class CheckpointBlocks:
    """Recompute each block's activations in backward (torch ``checkpoint_wrapper``, non-reentrant)."""

    blocks: Wrap = WrapBlocks()
    """Which modules."""
    preserve_rng_state: bool = True
    """Replay dropout exactly. False is faster and right only for blocks without randomness."""
    every: int = 1
    """1: all of these modules; 2: the second, the fourth and so on, while the others keep their activations, and alike
    for larger numbers (torchtitan's ``selective_ac_option``)."""
    keep_ops: tuple[str, ...] = ()
    """Operators whose outputs are kept instead of recomputed, such as ``aten.mm`` for all of its overloads or
    ``aten.mm.default`` for one (torch ``create_selective_checkpoint_contexts``)."""
    offload: bool = False
    """Keep what the blocks are recomputed from, their inputs, in host memory until backward (torch ``save_on_cpu``,
    behaviour K-F18). Outputs of ``keep_ops`` stay on the device."""


ActivationCheckpointing = CheckpointBlocks | None
"""None: all activations are kept."""


@frozen(kw_only=True)
class CompileOption:
    """One entry of ``torch.compile(options=...)``."""

    name: str
    """A name that the backend knows; ``torch._inductor.list_options()`` has inductor's."""
    value: bool | int | float | str
    """What it is set to."""


def _options(
    given: Mapping[str, bool | int | float | str] | list[CompileOption] | tuple[CompileOption, ...],
) -> tuple[CompileOption, ...]:
    """As torch takes them, a mapping, or one by one. What is neither stays, for the check of types to name."""
    if isinstance(given, Mapping):
        return tuple(CompileOption(name=name, value=value) for name, value in given.items())
    return tuple(given) if isinstance(given, list) else given


@frozen(kw_only=True)
class CompileModel:
    """Compile the whole model."""

    backend: str = "inductor"
    """A backend that ``torch.compile`` knows."""
    mode: str = "default"
    """``default``, ``reduce-overhead``, ``max-autotune`` or ``max-autotune-no-cudagraphs``."""
    fullgraph: bool = False
    """Refuse graph breaks."""
    dynamic: bool | None = None
    """Compile for dynamic shapes; None lets torch decide."""
    options: tuple[CompileOption, ...] = field(default=(), converter=_options)
    """Options of the backend, as a mapping of names to values, such as ``{"max_autotune": True}``. inductor takes them
    in the place of a mode (behaviour K-DY5)."""
    recompile_limit: int | None = None
    """Compilations of one function before it is left to run eagerly; None: torch's own 8. torch 2.13 knows it."""
    isolate_recompiles: bool = False
    """Each compiled module counts its compilations by itself. torch 2.13 knows it."""


@frozen(kw_only=True)
class CompileBlocks:
    """Compile each repeated block by itself: one compilation serves all of them."""

    blocks: Wrap = WrapBlocks()
    """Which modules."""
    backend: str = "inductor"
    """A backend that ``torch.compile`` knows."""
    mode: str = "default"
    """As in ``CompileModel``."""
    fullgraph: bool = False
    """Refuse graph breaks."""
    dynamic: bool | None = None
    """Compile for dynamic shapes; None lets torch decide."""
    options: tuple[CompileOption, ...] = field(default=(), converter=_options)
    """As in ``CompileModel``."""
    recompile_limit: int | None = None
    """As in ``CompileModel``."""
    isolate_recompiles: bool = False
    """As in ``CompileModel``."""


Compile = CompileModel | CompileBlocks | None
"""None: the model runs eagerly."""
