"""torch.compile."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from prepkit.config.wrapping import Wrap, WrapBlocks


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
